"""The kernels of a prefill chunk over a compressed past: attention for every gqa_ratio, and the gather for library attention.

Block and step are those that keep tensor cores busy (128 rows by 64 tokens at head_dim 128), made smaller where registers or
the shared memory of the smallest supported GPU would not hold them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tangram_plan.ir import KVDtype, Plan, gather_kernel_name, prefill_kernel_name

from .kernel_spec import (
    MIN_DOT_SIZE,
    TRITON_DTYPES,
    KernelSpec,
    dot_dtype,
    gqa_ratios,
    next_power_of_two,
    padded,
    page_stride_type,
    stride_type,
)

BLOCK_ROWS = 128  # of queries; with 8 warps, each warp group has the 64 rows of a Hopper tensor-core instruction
SHARED_MEMORY_BYTES = 160 * 1024  # for queries and loads in flight; sm_80 has 163 KiB for one CTA
MAX_STEP_BYTES = 16 * 1024  # of the keys, or the values, of one step
MAX_STAGES = 3
GATHER_STEP_BYTES = 16 * 1024  # of the keys, or the values, that one CTA copies


@dataclass(frozen=True)
class PagedSpec(KernelSpec):
    """What reading a compressed past takes.

    Args:
        head_dim: elements of a head.
        padded_head_dim: the power of two that `tl.arange` counts to; a side of the tensor-core products.
        padded_kv_heads: a power of two, at least the KV heads of any layer on a rank.
        dtype: element type of query, keys, values and output.
        triton_dtype: the same, as Triton spells it.
        row_stride_type: Triton's type of the distance of two tokens, which is in whole heads.
        page_slots: head-token slots of a page; where its values begin.
        page_elements: distance of two pages, in elements.
        page_stride_type: Triton's type of that distance.
        step_tokens: tokens that are read at once.
    """

    head_dim: int
    padded_head_dim: int
    padded_kv_heads: int
    dtype: KVDtype
    triton_dtype: str
    row_stride_type: str
    page_slots: int
    page_elements: int
    page_stride_type: str
    step_tokens: int


@dataclass(frozen=True)
class PrefillKernel(PagedSpec):
    """Attention of a chunk over its past and itself.

    Args:
        gqa_ratio: query heads per KV head.
        block_rows: (token, query head) rows of a CTA.
        dot_dtype: what a tensor-core product multiplies, as a Python expression.
        softmax_scale: factor on the scores, unless the caller gives another.
        logit_softcap: of the model's attention; None if it has none.
        has_sinks: whether query heads have a logit of their own.
    """

    gqa_ratio: int
    block_rows: int
    dot_dtype: str
    softmax_scale: float
    logit_softcap: float | None
    has_sinks: bool


@dataclass(frozen=True)
class GatherKernel(PagedSpec):
    """Copy of every KV head's past and chunk into one run of keys and one of values."""


def prefill_kernels(plan: Plan) -> Iterator[KernelSpec]:
    """The kernels of a prefill chunk."""
    yield _gather_kernel(plan)
    for gqa_ratio in gqa_ratios(plan.model):
        yield _prefill_kernel(plan, gqa_ratio)


def _prefill_kernel(plan: Plan, gqa_ratio: int) -> PrefillKernel:
    layout, form = plan.layout, plan.model.attention
    padded_head_dim = padded(layout.head_dim)
    block_rows = _block_rows(padded_head_dim, layout.dtype)
    step_tokens = _step_tokens(padded_head_dim, layout.dtype)
    return PrefillKernel(
        name=prefill_kernel_name(layout, gqa_ratio),
        template="prefill_attention.py.j2",
        num_warps=8 if block_rows > 64 else 4,
        num_stages=_num_stages(block_rows, step_tokens, padded_head_dim, layout.dtype),
        head_dim=layout.head_dim,
        padded_head_dim=padded_head_dim,
        padded_kv_heads=_padded_kv_heads(plan),
        dtype=layout.dtype,
        triton_dtype=TRITON_DTYPES[layout.dtype],
        row_stride_type=stride_type(layout.head_dim),
        page_slots=layout.page_slots,
        page_elements=layout.page_elements,
        page_stride_type=page_stride_type(layout),
        step_tokens=step_tokens,
        gqa_ratio=gqa_ratio,
        block_rows=block_rows,
        dot_dtype=dot_dtype(layout.dtype),
        softmax_scale=form.softmax_scale,
        logit_softcap=form.logit_softcap,
        has_sinks=form.has_sinks,
    )


def _gather_kernel(plan: Plan) -> GatherKernel:
    layout = plan.layout
    padded_head_dim = padded(layout.head_dim)
    return GatherKernel(
        name=gather_kernel_name(layout),
        template="gather_past.py.j2",
        num_warps=4,
        num_stages=1,
        head_dim=layout.head_dim,
        padded_head_dim=padded_head_dim,
        padded_kv_heads=_padded_kv_heads(plan),
        dtype=layout.dtype,
        triton_dtype=TRITON_DTYPES[layout.dtype],
        row_stride_type=stride_type(layout.head_dim),
        page_slots=layout.page_slots,
        page_elements=layout.page_elements,
        page_stride_type=page_stride_type(layout),
        step_tokens=max(MIN_DOT_SIZE, GATHER_STEP_BYTES // (padded_head_dim * layout.dtype.itemsize)),
    )


def _padded_kv_heads(plan: Plan) -> int:
    most = max(plan.model.layers[layer].num_kv_heads for layer in plan.model.planned_layers)
    return next_power_of_two(most // plan.tensor_parallel)


def _block_rows(padded_head_dim: int, dtype: KVDtype) -> int:
    """Rows whose output registers hold; without tensor cores (float32), operands of the products are in registers, too."""
    if dtype is not KVDtype.FLOAT32:
        return BLOCK_ROWS
    return max(MIN_DOT_SIZE, min(32, 2048 // padded_head_dim))


def _step_tokens(padded_head_dim: int, dtype: KVDtype) -> int:
    if dtype is KVDtype.FLOAT32:
        return MIN_DOT_SIZE if padded_head_dim > 64 else 2 * MIN_DOT_SIZE
    return max(2 * MIN_DOT_SIZE, min(64, MAX_STEP_BYTES // (padded_head_dim * dtype.itemsize)))


def _num_stages(block_rows: int, step_tokens: int, padded_head_dim: int, dtype: KVDtype) -> int:
    """As many loads in flight as shared memory holds beside the queries: up to `num_stages` buffers of K and of V."""
    if dtype is KVDtype.FLOAT32:
        return 1
    row_bytes = padded_head_dim * dtype.itemsize
    buffers = (SHARED_MEMORY_BYTES - block_rows * row_bytes) // (2 * step_tokens * row_bytes)
    return max(1, min(MAX_STAGES, buffers))
