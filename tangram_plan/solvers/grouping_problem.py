"""Clustering as a problem that every solver shares: rows to cover, what a group costs, what is allowed.

Rows. Under tensor parallelism every rank has the same page law, so the i-th KV head of each rank share a *row*, whose
rho is the largest of theirs. With one rank a row is a KV head.

Objective, in millionths of a percent of the ideal memory (an integer, so that solvers compare exactly):

    sum_g sum_n w[n] * pages_g(n) * (page_slots + PAGE_COST_SLOTS)  +  TABLE_COST * groups
    pages_g(n) = ceil(kept_g(n) / tokens_per_page_g)          w[n] = 1 / (contexts * ideal slots of one rank at n)

that is, the mean over the planned contexts of allocated / ideal, plus a price for every page (control-plane time: rows
of page tables, the scheduler's lists) and every page table.

Contiguity. For given group sizes, cutting the rows in falling order of rho is never worse than any other choice of
members: the k-th largest law cannot be smaller than the rho of the first row that k - 1 groups leave over. And of all
sizes with the same tokens per page the largest is never worse, because the rows that it leaves over are fewer and
smaller. So without constraints on layers, a grouping is a path over the sorted rows whose arcs have *dominant* sizes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tangram_plan.ir import (
    PAGE_TOKEN_ALIGNMENT,
    BudgetTable,
    HeadGroup,
    HeadGrouping,
    KVHead,
    TangramError,
    pages,
    tokens_per_page,
)

COST_SCALE = 10**8  # objective units per 1.0 of ideal memory
PAGE_COST_SLOTS = (
    0.25  # price of a page in head-token slots: its entries in page tables and the scheduler's lists, about 130 bytes
)
TABLE_COST = COST_SCALE // 5000  # price of one page table: 0.02 % of the ideal memory
LEAST_PAGE_SLOTS = ((32, 32), (128, 128))  # (KV heads of a rank up to, least page_slots); above them LARGE_PAGE_SLOTS
LARGE_PAGE_SLOTS = 512
PAGE_SLOTS_STEPS = (1, 1.25, 1.5, 2, 3, 4, 8)  # candidates, as multiples of the least


class SolverDoesNotApplyError(TangramError):
    """The problem has a constraint that this solver cannot hold; another solver, or fewer constraints, can help."""


class Row(NamedTuple):
    """KV heads in one column position of all ranks.

    Args:
        kv_heads: one KV head per rank.
        rho: the largest of their budgets.
    """

    kv_heads: tuple[KVHead, ...]
    rho: int

    @property
    def layer(self) -> int:
        """Layer of the first rank's KV head; of all of them if rows were made layer by layer."""
        return self.kv_heads[0].layer


class Arc(NamedTuple):
    """A candidate group: rows `start` to `end` (half-open) of the sorted rows, at its cost."""

    start: int
    end: int
    cost: int


@dataclass(frozen=True)
class GroupingProblem:
    """What a clustering solver gets.

    Args:
        budgets: law of every KV head.
        ranks: per rank, its KV heads in (layer, head) order.
        contexts: prompt lengths to optimise for, in tokens.
        max_groups: most groups.
        max_groups_per_layer: most groups that may touch a layer; None for no limit.
        within_layers: whether a group must stay inside one layer.
        page_slots: candidates, rising.
        seed: seed of the solver.
    """

    budgets: BudgetTable
    ranks: tuple[tuple[KVHead, ...], ...]
    contexts: tuple[int, ...]
    max_groups: int
    max_groups_per_layer: int | None
    within_layers: bool
    page_slots: tuple[int, ...]
    seed: int

    @property
    def num_rows(self) -> int:
        """KV heads of one rank."""
        return len(self.ranks[0])

    @cached_property
    def natural_rows(self) -> tuple[Row, ...]:
        """Rows in the order of layers and heads."""
        return self._rows(self.ranks)

    @cached_property
    def sorted_rows(self) -> tuple[Row, ...]:
        """Rows by falling rho: over the whole model, or layer by layer if groups must stay inside layers."""
        return self._rows(tuple(tuple(sorted(rank, key=self._rank_key)) for rank in self.ranks))

    def bounds(self, rows: Sequence[Row]) -> tuple[int, ...]:
        """For every row, the end of the rows that may share a group with it (the end of its layer, or of all)."""
        if not self.within_layers:
            return (len(rows),) * len(rows)
        ends = [len(rows)] * len(rows)
        for index in range(len(rows) - 2, -1, -1):
            ends[index] = ends[index + 1] if rows[index].layer == rows[index + 1].layer else index + 1
        return tuple(ends)

    def cost(self, rho: int, num_members: int, slots: int) -> int:
        """Cost of one group with this law and so many members, in units of 1 / COST_SCALE."""
        page_tokens = tokens_per_page(slots, num_members)
        slots_per_page = slots + PAGE_COST_SLOTS
        pages_cost = sum(
            pages(kept, page_tokens) * weight for kept, weight in zip(self._kept(rho), self._weights, strict=True)
        )
        return round(pages_cost * slots_per_page) + TABLE_COST

    def least_member_cost(self, rho: int) -> float:
        """Least that one KV head under this law takes of any group, whatever its size and page: no grouping costs less than their sum."""
        return min(self.cost(rho, size, slots) / size for slots in self.page_slots for size in dominant_sizes(slots))

    def arcs(self, slots: int) -> Iterator[Arc]:
        """Every group over the sorted rows that an optimal path may need, for one size of page."""
        rows, ends = self.sorted_rows, self.bounds(self.sorted_rows)
        sizes = dominant_sizes(slots)
        for start, row in enumerate(rows):
            for size in sizes:
                end = min(start + size, ends[start])
                yield Arc(start, end, self.cost(row.rho, end - start, slots))
                if start + size >= ends[start]:
                    break

    def solution_cost(self, solution: "GroupingSolution") -> int:
        """Objective of a grouping."""
        return sum(self.cost(max(row.rho for row in rows), len(rows), solution.page_slots) for rows in solution.groups)

    def feasible_page_slots(self) -> tuple[int, ...]:
        """Candidates with which `max_groups` groups can hold every row.

        Raises:
            TangramError: there is none.
        """
        ends = set(self.bounds(self.sorted_rows))
        spans = [end - start for start, end in zip(sorted({0, *ends})[:-1], sorted(ends), strict=True)]
        needed = {
            slots: sum(-(-span // (slots // PAGE_TOKEN_ALIGNMENT)) for span in spans) for slots in self.page_slots
        }
        feasible = tuple(slots for slots, groups in needed.items() if groups <= self.max_groups)
        if not feasible:
            raise TangramError(
                f"{self.num_rows} KV heads a rank do not fit into {self.max_groups} groups",
                where="grouping",
                got=f"at least {min(needed.values())} groups with pages of at most {max(self.page_slots)} slots",
                expected=f"at most {self.max_groups}",
                fix="raise grouping.max_groups or grouping.page_slots, or set grouping.scope to model",
            )
        return feasible

    def _rank_key(self, kv_head: KVHead) -> tuple[int, int, KVHead]:
        return (kv_head.layer if self.within_layers else 0, -self.budgets.rho[kv_head], kv_head)

    def _rows(self, ranks: tuple[tuple[KVHead, ...], ...]) -> tuple[Row, ...]:
        return tuple(Row(heads, max(self.budgets.rho[head] for head in heads)) for heads in zip(*ranks, strict=True))

    def _kept(self, rho: int) -> tuple[int, ...]:
        if rho not in self._kept_cache:
            law = self.budgets.law(rho)
            self._kept_cache[rho] = tuple(law.kept(context) for context in self.contexts)
        return self._kept_cache[rho]

    @cached_property
    def _kept_cache(self) -> dict[int, tuple[int, ...]]:
        return {}

    @cached_property
    def _weights(self) -> tuple[float, ...]:
        """Per context, cost units per slot of one rank."""
        ideal = [self.budgets.ideal_slots(context) / len(self.ranks) for context in self.contexts]
        return tuple(COST_SCALE / (len(self.contexts) * slots) for slots in ideal)


@dataclass(frozen=True)
class GroupingSolution:
    """What a clustering solver returns.

    Args:
        groups: the rows of every group.
        page_slots: head-token slots of a page.
        objective: `GroupingProblem.solution_cost`, over COST_SCALE.
        bound: the solver's own proof that no grouping costs less, over COST_SCALE; None if it has none.
        status: `optimal`, `feasible` (limit reached) or `heuristic`.
    """

    groups: tuple[tuple[Row, ...], ...]
    page_slots: int
    objective: float
    bound: float | None
    status: str

    @property
    def gap(self) -> float | None:
        """(objective - bound) / objective; None without a bound."""
        return None if self.bound is None else (self.objective - self.bound) / self.objective

    def grouping(self) -> HeadGrouping:
        """The product, by falling rho."""
        groups = [
            HeadGroup(max(row.rho for row in rows), tuple(zip(*(row.kv_heads for row in rows), strict=True)))
            for rows in self.groups
        ]
        return HeadGrouping(
            tuple(sorted(groups, key=lambda group: (-group.rho, group.members_by_rank))), self.page_slots
        )


def page_slots_candidates(num_rows: int) -> tuple[int, ...]:
    """Sizes of page that `auto` considers: the more KV heads a rank has, the larger, so that the number of pages stays bounded."""
    least = next((slots for rows, slots in LEAST_PAGE_SLOTS if num_rows <= rows), LARGE_PAGE_SLOTS)
    return tuple(int(least * step) for step in PAGE_SLOTS_STEPS if least * step % PAGE_TOKEN_ALIGNMENT == 0)


def cut(rows: Sequence[Row], ends: Sequence[int]) -> tuple[tuple[Row, ...], ...]:
    """Consecutive groups of rows that end at these places."""
    return tuple(tuple(rows[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True))


def dominant_sizes(slots: int) -> tuple[int, ...]:
    """For every number of tokens per page that pages of so many slots allow, the largest group that has it; rising."""
    units = slots // PAGE_TOKEN_ALIGNMENT
    return tuple(sorted({units // (units // size) for size in range(1, units + 1)}))
