"""Plan in, files out: kernel specs, templates, allocator configuration."""
