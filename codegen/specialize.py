"""Which kernels a plan needs, and with which constants. Every decision about generated code is taken here, none in a template.

One decode and one merge kernel per schedule and distinct gqa_ratio among the layers that read the planned cache,
and one kernel that lays out the tile queue of all layers. Page geometry, law and tile size come from the plan;
warps and stages are plain defaults, kept inside the shared memory of the smallest supported GPU.
"""

from dataclasses import dataclass

from tangram_plan.ir import QUEUE_NAME, RHO_ONE, KVDtype, LayerKind, ModelShape, Plan, Schedule, kernel_name

MIN_DOT_SIZE = 16  # the smallest side of a tensor-core product
MERGE_PARTIALS = 16  # partial results that a merge reads at once
QUEUE_PAIRS = 1024  # (request, KV head) pairs that the queue kernel scans at once
MAX_STAGES = 3
SHARED_MEMORY_BYTES = 150 * 1024  # for loads in flight; sm_80 has 163 KiB for one CTA, reductions take some
MAX_STEP_BYTES = 32 * 1024  # of the keys, or the values, of one step of the inner loop
MAX_STEP_SCORES = 64 * 64  # of one step: query rows times tokens, held in registers

# The interpreter takes bfloat16 operands of a product for integers; there, exact float32 copies are multiplied.
INTERPRETED_BFLOAT16 = "tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16"
TRITON_DTYPES = {KVDtype.FLOAT16: "fp16", KVDtype.BFLOAT16: "bf16", KVDtype.FLOAT32: "fp32"}


@dataclass(frozen=True)
class KernelSpec:
    """One generated file.

    Args:
        name: name of the file and of the kernel; readable, and safe as a file name.
        template: file below `templates/` that it is rendered from.
        num_warps: warps of a CTA.
        num_stages: loads in flight of the inner loop.
    """

    name: str
    template: str
    num_warps: int
    num_stages: int


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
class LawConstants:
    """The part of the page law that is the same for every group; rho comes in as a tensor.

    Args:
        sink_tokens: first tokens, always kept.
        window_tokens: most recent tokens, always kept.
        rho_one: the rho that keeps everything.
    """

    sink_tokens: int
    window_tokens: int
    rho_one: int


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


def specialize(plan: Plan) -> tuple[KernelSpec, ...]:
    """The kernels of a verified plan, by name."""
    specs: list[KernelSpec] = [_queue_kernel(plan)]
    for gqa_ratio in gqa_ratios(plan.model):
        for schedule in Schedule:
            specs += [_decode_kernel(plan, schedule, gqa_ratio), _merge_kernel(plan, schedule, gqa_ratio)]
    return tuple(sorted(specs, key=lambda spec: spec.name))


def gqa_ratios(model: ModelShape) -> tuple[int, ...]:
    """Distinct query heads per KV head among the planned layers and those that share a planned layer's cache."""
    planned = set(model.planned_layers)
    readers = [
        layer
        for layer in model.layers
        if layer.kind in (LayerKind.FULL, LayerKind.SHARED) and layer.kv_owner in planned
    ]
    return tuple(sorted({reader.num_q_heads // model.layers[reader.kv_owner].num_kv_heads for reader in readers}))


def _decode_kernel(plan: Plan, schedule: Schedule, gqa_ratio: int) -> DecodeKernel:
    layout = plan.layout
    sizes = sorted({group.num_members for group in plan.grouping.groups})
    padded_head_dim, padded_gqa_ratio = _padded(layout.head_dim), _padded(gqa_ratio)
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
        row_stride_type=_stride_type(layout.head_dim),
        softmax_scale=plan.model.attention.softmax_scale,
        dot_dtype=INTERPRETED_BFLOAT16 if layout.dtype is KVDtype.BFLOAT16 else f"tl.{layout.dtype}",
        page_slots=layout.page_slots,
        page_elements=layout.page_elements,
        page_stride_type=_stride_type(layout.page_elements),
        group_sizes=tuple(sizes),
        tokens_per_page=tuple(sorted({layout.tokens_per_page(size) for size in sizes})),
        tile_tokens=plan.partition.tile_tokens,
        step_tokens=step_tokens,
        num_ctas=plan.partition.num_ctas,
        law=_law(plan),
    )


def _merge_kernel(plan: Plan, schedule: Schedule, gqa_ratio: int) -> MergeKernel:
    return MergeKernel(
        name=kernel_name("merge", schedule, plan.layout, gqa_ratio),
        template=f"merge_{schedule}.py.j2",
        num_warps=4,
        num_stages=1,
        head_dim=plan.layout.head_dim,
        padded_head_dim=_padded(plan.layout.head_dim),
        gqa_ratio=gqa_ratio,
        dtype=plan.layout.dtype,
        triton_dtype=TRITON_DTYPES[plan.layout.dtype],
        row_stride_type=_stride_type(plan.layout.head_dim),
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
        law=_law(plan),
    )


def _law(plan: Plan) -> LawConstants:
    return LawConstants(plan.budgets.sink_tokens, plan.budgets.window_tokens, RHO_ONE)


def _step_tokens(tile_tokens: int, padded_gqa_ratio: int, padded_head_dim: int, dtype: KVDtype) -> int:
    """Tokens of one step of the inner loop: a power of two, at most a tile, and no more than registers hold."""
    most = min(tile_tokens, MAX_STEP_SCORES // padded_gqa_ratio, MAX_STEP_BYTES // (padded_head_dim * dtype.itemsize))
    if dtype is KVDtype.FLOAT32:  # multiplied without tensor cores, from registers
        most //= 2
    return max(MIN_DOT_SIZE, _next_power_of_two(most + 1) // 2)


def _num_stages(step_tokens: int, padded_gqa_ratio: int, padded_head_dim: int, dtype: KVDtype) -> int:
    """As many loads in flight as shared memory holds: Triton keeps up to `num_stages - 1` buffers of K and of V.

    Without tensor cores, it also changes the layout of the output through shared memory.
    """
    output_bytes = padded_gqa_ratio * padded_head_dim * 4 if dtype is KVDtype.FLOAT32 else 0
    buffers = (SHARED_MEMORY_BYTES - output_bytes) // (2 * step_tokens * padded_head_dim * dtype.itemsize)
    return max(1, min(MAX_STAGES, buffers + 1))


def _stride_type(elements: int) -> str:
    """Triton's type of a multiple of so many elements: where it is one of 16, vectors are loaded."""
    return "i32:16" if elements % 16 == 0 else "i32"


def _padded(size: int) -> int:
    """Side of a tensor-core product that holds so many rows or columns."""
    return max(MIN_DOT_SIZE, _next_power_of_two(size))


def _next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
