"""Which part of its history every KV head may keep."""

from collections.abc import Mapping
from dataclasses import dataclass

from .model_shape import KVHead
from .page_law import RetentionLaw


@dataclass(frozen=True)
class BudgetTable:
    """The law of every planned KV head; laws differ in rho only.

    Args:
        sink_tokens: first tokens that every head keeps.
        window_tokens: most recent tokens that every head keeps.
        rho: per KV head, in the order of `ModelShape.kv_heads()`, the part kept of all other tokens, over `RHO_ONE`.
    """

    sink_tokens: int
    window_tokens: int
    rho: Mapping[KVHead, int]

    def law(self, rho: int) -> RetentionLaw:
        """The law of a KV head or head group with this rho."""
        return RetentionLaw(self.sink_tokens, self.window_tokens, rho)

    def ideal_slots(self, prompt_tokens: int) -> int:
        """Head-token slots of a prompt if every KV head had exactly what its own law keeps."""
        return sum(self.law(rho).kept(prompt_tokens) for rho in self.rho.values())
