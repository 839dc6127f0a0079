"""Solvers, one file each. To add one: write the file, add its line here, and it joins the conformance tests and the ablation."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from .grouping_problem import GroupingProblem, GroupingSolution, SolverDoesNotApplyError
from .split_problem import SplitProblem

__all__ = [
    "GROUPING_SOLVERS",
    "SPLIT_SOLVERS",
    "GroupingProblem",
    "GroupingSolution",
    "GroupingSolver",
    "SolverDoesNotApplyError",
    "SplitProblem",
    "SplitSolver",
]


class GroupingSolver(Protocol):
    """Clusters KV heads into head groups."""

    def solve(self, problem: GroupingProblem) -> GroupingSolution:
        """The best grouping that the solver finds."""


class SplitSolver(Protocol):
    """Cuts one layer's KV heads into static splits."""

    def solve(self, problem: SplitProblem) -> tuple[int, ...]:
        """Splits per KV head: at least 1 each, at most `max_splits` together."""


def _lazy(module: str, name: str, **options: object) -> Callable[[], Any]:
    """Makes a solver; its module, with OR-Tools or networkx, is imported by the first call."""

    def make() -> Any:
        return getattr(import_module(f".{module}", __name__), name)(**options)

    return make


GROUPING_SOLVERS: dict[str, Callable[[], GroupingSolver]] = {
    "adjacent": _lazy("group_equal", "EqualGroups", sort_rows=False),
    "sorted": _lazy("group_equal", "EqualGroups", sort_rows=True),
    "graph": _lazy("group_graph", "ShortestPath"),
    "cp_sat": _lazy("group_cp_sat", "CpSatGrouping"),
}
SPLIT_SOLVERS: dict[str, Callable[[], SplitSolver]] = {
    "even": _lazy("split_even", "EvenSplits"),
    "proportional": _lazy("split_proportional", "ProportionalSplits"),
    "greedy": _lazy("split_greedy", "GreedySplits"),
    "cp_sat": _lazy("split_cp_sat", "CpSatSplits"),
}
