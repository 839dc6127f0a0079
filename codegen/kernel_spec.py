"""What every generated kernel's spec is made of, and how sizes become kernel constants."""

from dataclasses import dataclass

from tangram_plan.ir import RHO_ONE, KVDtype, LayerKind, ModelShape, PageLayout, Plan

MIN_DOT_SIZE = 16  # the smallest side of a tensor-core product

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


def gqa_ratios(model: ModelShape) -> tuple[int, ...]:
    """Distinct query heads per KV head among the planned layers and those that share a planned layer's cache."""
    planned = set(model.planned_layers)
    readers = [
        layer
        for layer in model.layers
        if layer.kind in (LayerKind.FULL, LayerKind.SHARED) and layer.kv_owner in planned
    ]
    return tuple(sorted({reader.num_q_heads // model.layers[reader.kv_owner].num_kv_heads for reader in readers}))


def law_constants(plan: Plan) -> LawConstants:
    """The law constants of a plan."""
    return LawConstants(plan.budgets.sink_tokens, plan.budgets.window_tokens, RHO_ONE)


def dot_dtype(dtype: KVDtype) -> str:
    """What a tensor-core product multiplies, as a Python expression."""
    return INTERPRETED_BFLOAT16 if dtype is KVDtype.BFLOAT16 else f"tl.{dtype}"


def page_stride_type(layout: PageLayout) -> str:
    """Triton's type of the distance of two pages."""
    return stride_type(layout.page_elements)


def stride_type(elements: int) -> str:
    """Triton's type of a multiple of so many elements: where it is one of 16, vectors are loaded."""
    return "i32:16" if elements % 16 == 0 else "i32"


def padded(size: int) -> int:
    """Side of a tensor-core product that holds so many rows or columns."""
    return max(MIN_DOT_SIZE, next_power_of_two(size))


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (value - 1).bit_length()
