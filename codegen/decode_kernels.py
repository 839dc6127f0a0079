"""The kernels of a decode step: page tables, a plan of the step of all layers by each schedule, and attention for every gqa_ratio.

Page geometry, law and tile come from the plan, and so do step, warps and stages, which were measured for the device: they are
made smaller here where registers, or the shared memory of the smallest supported GPU, would not hold them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tangram_plan.ir import (
    PAGE_TABLE_KERNEL,
    CtaPartition,
    KVDtype,
    Plan,
    Schedule,
    decode_kernel_name,
    plan_kernel_name,
)

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

PLANNED_AT_ONCE = 512  # pairs, CTAs or splits
PAGES_COPIED_AT_ONCE = 1024
PAGES_FOUND_AT_ONCE = 2048  # times groups: each is looked for among the pages of all groups
MAX_MERGE_PARTIALS = 16  # partial results that a merge reads at once
MAX_MERGE_ELEMENTS = 64 * 128  # of them, held in registers
SHARED_MEMORY_BYTES = 150 * 1024  # for loads in flight; sm_80 has 163 KiB for one CTA, reductions take some
MAX_STEP_BYTES = 32 * 1024  # of the keys, or the values, of one step of the inner loop
MAX_STEP_SCORES = 64 * 64  # of one step: query rows times tokens, held in registers


@dataclass(frozen=True)
class DecodeKernel(KernelSpec):
    """Attention of one query token per request over its pages.

    Args:
        head_dim: elements of a head.
        padded_head_dim: the power of two that `tl.arange` counts to; a side of the tensor-core products.
        gqa_ratio: query heads per KV head.
        padded_gqa_ratio: rows of the tensor-core product.
        dtype: element type of query, keys, values and output.
        triton_dtype: the same, as Triton spells it.
        dot_dtype: what a tensor-core product multiplies, as a Python expression.
        softmax_scale: factor on the scores, unless the caller gives another.
        logit_softcap: of the model's attention; None if it has none.
        has_sinks: whether query heads have a logit of their own.
        row_stride_type: Triton's type of the distance of two requests, which is in whole heads.
        page_slots: head-token slots of a page; where its values begin.
        page_elements: distance of two pages, in elements.
        page_stride_type: Triton's type of that distance.
        group_sizes: numbers of members that occur.
        tokens_per_page: tokens per page that occur.
        step_tokens: tokens of one step of the inner loop.
        merge_rows: rows of a merge, a power of two.
        merge_partials: partial results that a merge reads at once.
    """

    head_dim: int
    padded_head_dim: int
    gqa_ratio: int
    padded_gqa_ratio: int
    dtype: KVDtype
    triton_dtype: str
    dot_dtype: str
    softmax_scale: float
    logit_softcap: float | None
    has_sinks: bool
    row_stride_type: str
    page_slots: int
    page_elements: int
    page_stride_type: str
    group_sizes: tuple[int, ...]
    tokens_per_page: tuple[int, ...]
    step_tokens: int
    merge_rows: int
    merge_partials: int


@dataclass(frozen=True)
class PlanKernel(KernelSpec):
    """Plan of one decode step, for all layers.

    Args:
        tile_tokens: tokens of one tile of the queue.
        segment_tiles: tiles that stand for what it costs to begin a pair.
        block: pairs, CTAs or splits that are planned at once.
        law: constants of the page law.
    """

    tile_tokens: int
    segment_tiles: int
    block: int
    law: LawConstants


@dataclass(frozen=True)
class PageTableKernel(KernelSpec):
    """Page tables of a step, of the rows of a serving engine.

    Args:
        padded_groups: a power of two, at least the head groups.
        prompt_pages: pages of the prompt that are copied at once.
        added_pages: pages that decoding added that are looked up at once.
        law: constants of the page law.
    """

    padded_groups: int
    prompt_pages: int
    added_pages: int
    law: LawConstants


def decode_kernels(plan: Plan) -> Iterator[KernelSpec]:
    """The kernels of a decode step."""
    yield _page_table_kernel(plan)
    for schedule in Schedule:
        yield _plan_kernel(plan, schedule)
    for gqa_ratio in gqa_ratios(plan.model):
        yield _decode_kernel(plan, gqa_ratio)


def _page_table_kernel(plan: Plan) -> PageTableKernel:
    padded_groups = next_power_of_two(len(plan.grouping.groups))
    return PageTableKernel(
        name=PAGE_TABLE_KERNEL,
        template="page_table.py.j2",
        num_warps=4,
        num_stages=1,
        padded_groups=padded_groups,
        prompt_pages=PAGES_COPIED_AT_ONCE,
        added_pages=max(1, PAGES_FOUND_AT_ONCE // padded_groups),
        law=law_constants(plan),
    )


def _plan_kernel(plan: Plan, schedule: Schedule) -> PlanKernel:
    return PlanKernel(
        name=plan_kernel_name(schedule),
        template=f"plan_{schedule}.py.j2",
        num_warps=4,
        num_stages=1,
        tile_tokens=plan.partition.tile_tokens,
        segment_tiles=plan.partition.segment_tiles,
        block=PLANNED_AT_ONCE,
        law=law_constants(plan),
    )


def _decode_kernel(plan: Plan, gqa_ratio: int) -> DecodeKernel:
    layout, form, partition = plan.layout, plan.model.attention, plan.partition
    sizes = sorted({group.num_members for group in plan.grouping.groups})
    padded_head_dim, padded_gqa_ratio = padded(layout.head_dim), padded(gqa_ratio)
    step_tokens = _step_tokens(partition, padded_gqa_ratio, padded_head_dim, layout.dtype)
    merge_rows = next_power_of_two(gqa_ratio)
    return DecodeKernel(
        name=decode_kernel_name(layout, gqa_ratio),
        template="decode_attention.py.j2",
        num_warps=partition.num_warps if padded_gqa_ratio <= 32 else max(8, partition.num_warps),
        num_stages=_num_stages(partition, step_tokens, padded_gqa_ratio, padded_head_dim, layout.dtype),
        head_dim=layout.head_dim,
        padded_head_dim=padded_head_dim,
        gqa_ratio=gqa_ratio,
        padded_gqa_ratio=padded_gqa_ratio,
        dtype=layout.dtype,
        triton_dtype=TRITON_DTYPES[layout.dtype],
        dot_dtype=dot_dtype(layout.dtype),
        softmax_scale=form.softmax_scale,
        logit_softcap=form.logit_softcap,
        has_sinks=form.has_sinks,
        row_stride_type=stride_type(layout.head_dim),
        page_slots=layout.page_slots,
        page_elements=layout.page_elements,
        page_stride_type=page_stride_type(layout),
        group_sizes=tuple(sizes),
        tokens_per_page=tuple(sorted({layout.tokens_per_page(size) for size in sizes})),
        step_tokens=step_tokens,
        merge_rows=merge_rows,
        merge_partials=max(2, min(MAX_MERGE_PARTIALS, MAX_MERGE_ELEMENTS // (merge_rows * padded_head_dim))),
    )


def _step_tokens(partition: CtaPartition, padded_gqa_ratio: int, padded_head_dim: int, dtype: KVDtype) -> int:
    """Tokens of one step of the inner loop: a power of two, and no more than registers hold."""
    most = min(MAX_STEP_SCORES // padded_gqa_ratio, MAX_STEP_BYTES // (padded_head_dim * dtype.itemsize))
    if dtype is KVDtype.FLOAT32:  # multiplied without tensor cores, from registers
        most //= 2
    return max(MIN_DOT_SIZE, min(partition.step_tokens, next_power_of_two(most + 1) // 2))


def _num_stages(
    partition: CtaPartition, step_tokens: int, padded_gqa_ratio: int, padded_head_dim: int, dtype: KVDtype
) -> int:
    """As many loads in flight as shared memory holds: Triton keeps up to `num_stages - 1` buffers of K and of V.

    Without tensor cores, it also changes the layout of the output through shared memory.
    """
    output_bytes = padded_gqa_ratio * padded_head_dim * 4 if dtype is KVDtype.FLOAT32 else 0
    buffers = (SHARED_MEMORY_BYTES - output_bytes) // (2 * step_tokens * padded_head_dim * dtype.itemsize)
    return max(1, min(partition.num_stages, buffers + 1))
