"""Plan in, files out: kernel specs, templates, allocator configuration."""

from .allocator_config import allocator_config
from .decode_kernels import DecodeKernel, PlanKernel
from .emit import emit
from .head_tables import HeadTables, tabulate
from .kernel_spec import KernelSpec
from .render import render_head_tables, render_kernel
from .specialize import specialize

__all__ = [
    "DecodeKernel",
    "HeadTables",
    "KernelSpec",
    "PlanKernel",
    "allocator_config",
    "emit",
    "render_head_tables",
    "render_kernel",
    "specialize",
    "tabulate",
]
