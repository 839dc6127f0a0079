"""The Plan: everything that a compressed cache needs to know, fixed before the first request arrives.

    ModelShape --> BudgetTable --> HeadGrouping --> PageLayout --> CtaPartition
                       |  HeadOrder: which rank owns which KV head      |
                       `---------------------- Plan --------------------'

A plan is a value: the same inputs give the same plan, the same text (`ir.text`) and the same hash.
"""

from dataclasses import dataclass

from .budget_table import BudgetTable
from .cta_partition import CtaPartition
from .head_grouping import HeadGrouping
from .head_order import HeadOrder
from .model_shape import ModelShape
from .page_law import pages
from .page_layout import PageLayout

KEEP_EVERYTHING = "keep everything"  # the rule of a plan that evicts nothing on purpose


@dataclass(frozen=True)
class Provenance:
    """Where a plan comes from; every field changes the plan's hash.

    Args:
        profile: name of the profile that set the budgets.
        profile_hash: hash of that profile's content.
        rule: rule and ratio that turned the profile into budgets, or `KEEP_EVERYTHING`.
        grouping_solver: solver of the head groups.
        partition_solver: solver of the static splits.
        seed: seed of every solver.
    """

    profile: str
    profile_hash: str
    rule: str
    grouping_solver: str
    partition_solver: str
    seed: int


@dataclass(frozen=True)
class Plan:
    """A verified plan; KV heads are named by their place in the head order, as the runtime sees the checkpoint.

    Args:
        model: shape of the model that it was made for.
        tensor_parallel: ranks that share every layer's KV heads.
        head_order: order of KV heads that the checkpoint must have.
        budgets: law of every KV head.
        grouping: KV heads that share pages.
        layout: bytes of a page.
        partition: how decode work is cut over CTAs.
        scorer: ranks tokens at serving time.
        compress_chunk_tokens: eviction happens at multiples of this, and at the prompt's end.
        max_new_tokens: longest answer that the runtime admits; bounds the width of page tables.
        provenance: where the plan comes from.
    """

    model: ModelShape
    tensor_parallel: int
    head_order: HeadOrder
    budgets: BudgetTable
    grouping: HeadGrouping
    layout: PageLayout
    partition: CtaPartition
    scorer: str
    compress_chunk_tokens: int
    max_new_tokens: int
    provenance: Provenance

    def group_tokens(self, group_id: int, prompt_tokens: int, num_tokens: int) -> int:
        """Tokens that each member of a group holds, when `num_tokens` of prompt and answer have been computed."""
        return self.budgets.law(self.grouping.groups[group_id].rho).held(prompt_tokens, num_tokens)

    def group_pages(self, group_id: int, prompt_tokens: int, num_tokens: int) -> int:
        """Pages of one group of one request, on each rank."""
        held = self.group_tokens(group_id, prompt_tokens, num_tokens)
        return pages(held, self.layout.tokens_per_page(self.grouping.groups[group_id].num_members))

    def num_pages(self, prompt_tokens: int, num_tokens: int) -> int:
        """Pages of one request, on each rank: what the scheduler reserves."""
        return sum(self.group_pages(g, prompt_tokens, num_tokens) for g in range(len(self.grouping.groups)))
