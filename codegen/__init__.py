"""Plan in, files out: kernel specs, templates, allocator configuration."""

from .allocator_config import allocator_config
from .emit import emit
from .head_tables import HeadTables, tabulate
from .render import render_head_tables, render_kernel
from .specialize import DecodeKernel, KernelSpec, MergeKernel, QueueKernel, specialize

__all__ = [
    "DecodeKernel",
    "HeadTables",
    "KernelSpec",
    "MergeKernel",
    "QueueKernel",
    "allocator_config",
    "emit",
    "render_head_tables",
    "render_kernel",
    "specialize",
    "tabulate",
]
