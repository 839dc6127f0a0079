"""How much memory a plan takes, honestly: sinks, window, padding, page tails, positions and scores counted."""

from dataclasses import dataclass

from .plan import Plan

REPORT_CONTEXTS = (2048, 8192, 32768, 131072)  # prompt lengths, in tokens, at which every report shows memory


@dataclass(frozen=True)
class MemoryUse:
    """One request with a prompt of `context` tokens and no answer yet, all ranks together.

    Args:
        context: prompt length, in tokens.
        ideal_slots: head-token slots if every KV head had exactly what its own law keeps.
        pages: pages of all groups and ranks.
        allocated_slots: head-token slots of those pages.
        allocated_bytes: bytes of those pages.
        full_bytes: bytes of the keys and values of the same KV heads when nothing is evicted.
    """

    context: int
    ideal_slots: int
    pages: int
    allocated_slots: int
    allocated_bytes: int
    full_bytes: int

    @property
    def allocated_over_ideal(self) -> float:
        """What grouping and paging cost, in slots; 1.0 is perfect."""
        return self.allocated_slots / self.ideal_slots

    @property
    def allocated_over_full(self) -> float:
        """The honest compression ratio, in bytes; below 1.0 memory is saved."""
        return self.allocated_bytes / self.full_bytes


def memory_use(plan: Plan, context: int) -> MemoryUse:
    """Memory of one request at a prompt of `context` tokens."""
    num_pages = plan.num_pages(context, context) * plan.tensor_parallel
    return MemoryUse(
        context=context,
        ideal_slots=plan.budgets.ideal_slots(context),
        pages=num_pages,
        allocated_slots=num_pages * plan.layout.page_slots,
        allocated_bytes=num_pages * plan.layout.page_bytes,
        full_bytes=plan.model.num_kv_heads * context * plan.layout.kv_bytes,
    )
