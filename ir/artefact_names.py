"""What the files of an artefact are called: `codegen` writes them, `runtime` loads them."""

from .cta_partition import Schedule
from .page_layout import PageLayout

KERNELS_FOLDER = "kernels"
HEAD_TABLES_NAME = "head_tables"  # of the module of constants among the kernels
QUEUE_NAME = "plan_tile_queue"  # of the kernel that lays out the tile queue
ALLOCATOR_FILE = "allocator.json"


def kernel_name(role: str, schedule: Schedule, layout: PageLayout, gqa_ratio: int) -> str:
    """Name of a generated kernel, and of its file, whose role is "decode" or "merge"."""
    return f"{role}_{schedule}_d{layout.head_dim}_gqa{gqa_ratio}_{layout.dtype}"
