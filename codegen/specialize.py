"""Which kernels a plan needs, and with which constants. Every decision about generated code is taken here, none in a template."""

from itertools import chain

from tangram_plan.ir import Plan

from .decode_kernels import decode_kernels
from .eviction_kernels import eviction_kernels
from .kernel_spec import KernelSpec
from .prefill_kernels import prefill_kernels


def specialize(plan: Plan) -> tuple[KernelSpec, ...]:
    """The kernels of a verified plan, by name."""
    families = (decode_kernels, prefill_kernels, eviction_kernels)
    return tuple(sorted(chain.from_iterable(family(plan) for family in families), key=lambda spec: spec.name))
