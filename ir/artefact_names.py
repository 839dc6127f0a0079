"""What the files of an artefact are called: `codegen` writes them, `runtime` loads them."""

from enum import StrEnum

from .cta_partition import Schedule
from .page_layout import PageLayout

KERNELS_FOLDER = "kernels"
HEAD_TABLES_NAME = "head_tables"  # of the module of constants among the kernels
ALLOCATOR_FILE = "allocator.json"
PAGE_TABLE_KERNEL = "page_table"  # turns rows of pages into page tables; of its file, too


class EvictionRole(StrEnum):
    """The kernels of compression after a prefill chunk, in the order in which they run."""

    SCORE_KEY_ANCHOR = "score_key_anchor"
    HISTOGRAM = "evict_histogram"
    PLACE = "evict_place"
    COPY = "evict_copy"


def plan_kernel_name(schedule: Schedule) -> str:
    """Name of the kernel that plans a decode step of all layers, and of its file."""
    return f"plan_{schedule}"


def decode_kernel_name(layout: PageLayout, gqa_ratio: int) -> str:
    """Name of a decode kernel, and of its file."""
    return f"decode_attention_{_shape(layout, gqa_ratio)}"


def prefill_kernel_name(layout: PageLayout, gqa_ratio: int) -> str:
    """Name of a kernel of chunk attention over a compressed past, and of its file."""
    return f"prefill_attention_{_shape(layout, gqa_ratio)}"


def gather_kernel_name(layout: PageLayout) -> str:
    """Name of the kernel that copies past and chunk into one run per KV head, and of its file."""
    return f"gather_past_d{layout.head_dim}_{layout.dtype}"


def eviction_kernel_name(role: EvictionRole, layout: PageLayout) -> str:
    """Name of a kernel of compression after a prefill chunk, and of its file."""
    return f"{role}_d{layout.head_dim}_{layout.dtype}"


def _shape(layout: PageLayout, gqa_ratio: int) -> str:
    return f"d{layout.head_dim}_gqa{gqa_ratio}_{layout.dtype}"
