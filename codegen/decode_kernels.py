"""The kernels of a decode step: one decode and one merge kernel per schedule and gqa_ratio, and one that lays out the tile queue.

Page geometry, law and tile size come from the plan; warps and stages are plain defaults, kept inside the shared memory of
the smallest supported GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tangram_plan.ir import QUEUE_NAME, KVDtype, Plan, Schedule, kernel_name

from .kernel_spec import (
    MIN_DOT_SIZE,
    TRITON_DTYPES,
    KernelSpec,
    LawConstants,
    dot_dtype,
    gqa_ratios,
    law_constants,
    next_power_of_two,
    padded,
    page_stride_type,
    stride_type,
)

MERGE_PARTIALS = 16  # partial results that a merge reads at once
QUEUE_PAIRS = 1024  # (request, KV head) pairs that the queue kernel scans at once
MAX_STAGES = 3
SHARED_MEMORY_BYTES = 150 * 1024  # for loads in flight; sm_80 has 163 KiB for one CTA, reductions take some
MAX_STEP_BYTES = 32 * 1024  # of the keys, or the values, of one step of the inner loop
MAX_STEP_SCORES = 64 * 64  # of one step: query rows times tokens, held in registers


@dataclass(frozen=True)
class AttentionSpec(KernelSpec):
    """The shape of one head's attention, which decode and merge share.

    Args:
        head_dim: elements of a head.
        padded_head_dim: the power of two that `tl.arange` counts to; a side of the tensor-core products.
        gqa_ratio: query heads per KV head.
        dtype: element type of query, keys, values and output.
        triton_dtype: the same, as Triton spells it.
        row_stride_type: Triton's type of the distance of two requests in query and output, which is in whole heads.
        num_ctas: CTAs in flight.
    """

    head_dim: int
    padded_head_dim: int
    gqa_ratio: int
    dtype: KVDtype
    triton_dtype: str
    row_stride_type: str
    num_ctas: int


@dataclass(frozen=True)
class DecodeKernel(AttentionSpec):
    """Attention of one query token per request over its pages, as partial results.

    Args:
        padded_gqa_ratio: rows of the tensor-core product.
        dot_dtype: what a tensor-core product multiplies, as a Python expression.
        softmax_scale: factor on the scores, unless the caller gives another.
        page_slots: head-token slots of a page; where its values begin.
        page_elements: distance of two pages, in elements.
        page_stride_type: Triton's type of that distance.
        group_sizes: numbers of members that occur.
        tokens_per_page: tokens per page that occur.
        tile_tokens: tokens of one tile of the queue.
        step_tokens: tokens of one step of the inner loop.
        law: constants of the page law.
    """

    padded_gqa_ratio: int
    dot_dtype: str
    softmax_scale: float
    page_slots: int
    page_elements: int
    page_stride_type: str
    group_sizes: tuple[int, ...]
    tokens_per_page: tuple[int, ...]
    tile_tokens: int
    step_tokens: int
    law: LawConstants


@dataclass(frozen=True)
class MergeKernel(AttentionSpec):
    """Merge of the partial results of one schedule.

    Args:
        merge_partials: partial results that are read at once.
    """

    merge_partials: int


@dataclass(frozen=True)
class QueueKernel(KernelSpec):
    """Cumulative tile counts of all (layer, request, KV head) pairs.

    Args:
        tile_tokens: tokens of one tile of the queue.
        queue_pairs: pairs that are scanned at once.
        law: constants of the page law.
    """

    tile_tokens: int
    queue_pairs: int
    law: LawConstants


def decode_kernels(plan: Plan) -> Iterator[KernelSpec]:
    """The kernels of a decode step."""
    yield _queue_kernel(plan)
    for gqa_ratio in gqa_ratios(plan.model):
        for schedule in Schedule:
            yield _decode_kernel(plan, schedule, gqa_ratio)
            yield _merge_kernel(plan, schedule, gqa_ratio)


def _decode_kernel(plan: Plan, schedule: Schedule, gqa_ratio: int) -> DecodeKernel:
    layout = plan.layout
    sizes = sorted({group.num_members for group in plan.grouping.groups})
    padded_head_dim, padded_gqa_ratio = padded(layout.head_dim), padded(gqa_ratio)
    step_tokens = _step_tokens(plan.partition.tile_tokens, padded_gqa_ratio, padded_head_dim, layout.dtype)
    return DecodeKernel(
        name=kernel_name("decode", schedule, layout, gqa_ratio),
        template=f"decode_{schedule}.py.j2",
        num_warps=4 if padded_gqa_ratio <= 32 else 8,
        num_stages=_num_stages(step_tokens, padded_gqa_ratio, padded_head_dim, layout.dtype),
        head_dim=layout.head_dim,
        padded_head_dim=padded_head_dim,
        gqa_ratio=gqa_ratio,
        padded_gqa_ratio=padded_gqa_ratio,
        dtype=layout.dtype,
        triton_dtype=TRITON_DTYPES[layout.dtype],
        row_stride_type=stride_type(layout.head_dim),
        softmax_scale=plan.model.attention.softmax_scale,
        dot_dtype=dot_dtype(layout.dtype),
        page_slots=layout.page_slots,
        page_elements=layout.page_elements,
        page_stride_type=page_stride_type(layout),
        group_sizes=tuple(sizes),
        tokens_per_page=tuple(sorted({layout.tokens_per_page(size) for size in sizes})),
        tile_tokens=plan.partition.tile_tokens,
        step_tokens=step_tokens,
        num_ctas=plan.partition.num_ctas,
        law=law_constants(plan),
    )


def _merge_kernel(plan: Plan, schedule: Schedule, gqa_ratio: int) -> MergeKernel:
    return MergeKernel(
        name=kernel_name("merge", schedule, plan.layout, gqa_ratio),
        template=f"merge_{schedule}.py.j2",
        num_warps=4,
        num_stages=1,
        head_dim=plan.layout.head_dim,
        padded_head_dim=padded(plan.layout.head_dim),
        gqa_ratio=gqa_ratio,
        dtype=plan.layout.dtype,
        triton_dtype=TRITON_DTYPES[plan.layout.dtype],
        row_stride_type=stride_type(plan.layout.head_dim),
        num_ctas=plan.partition.num_ctas,
        merge_partials=MERGE_PARTIALS,
    )


def _queue_kernel(plan: Plan) -> QueueKernel:
    return QueueKernel(
        name=QUEUE_NAME,
        template=f"{QUEUE_NAME}.py.j2",
        num_warps=4,
        num_stages=1,
        tile_tokens=plan.partition.tile_tokens,
        queue_pairs=QUEUE_PAIRS,
        law=law_constants(plan),
    )


def _step_tokens(tile_tokens: int, padded_gqa_ratio: int, padded_head_dim: int, dtype: KVDtype) -> int:
    """Tokens of one step of the inner loop: a power of two, at most a tile, and no more than registers hold."""
    most = min(tile_tokens, MAX_STEP_SCORES // padded_gqa_ratio, MAX_STEP_BYTES // (padded_head_dim * dtype.itemsize))
    if dtype is KVDtype.FLOAT32:  # multiplied without tensor cores, from registers
        most //= 2
    return max(MIN_DOT_SIZE, next_power_of_two(most + 1) // 2)


def _num_stages(step_tokens: int, padded_gqa_ratio: int, padded_head_dim: int, dtype: KVDtype) -> int:
    """As many loads in flight as shared memory holds: Triton keeps up to `num_stages - 1` buffers of K and of V.

    Without tensor cores, it also changes the layout of the output through shared memory.
    """
    output_bytes = padded_gqa_ratio * padded_head_dim * 4 if dtype is KVDtype.FLOAT32 else 0
    buffers = (SHARED_MEMORY_BYTES - output_bytes) // (2 * step_tokens * padded_head_dim * dtype.itemsize)
    return max(1, min(MAX_STAGES, buffers + 1))
