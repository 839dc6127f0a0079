"""Solvers, one file each. To add one: write the file, add its line here, and it joins the conformance tests and the ablation."""

from collections.abc import Callable
from typing import Protocol

from .grouping_problem import GroupingProblem, GroupingSolution
from .split_problem import SplitProblem

__all__ = [
    "GROUPING_SOLVERS",
    "SPLIT_SOLVERS",
    "GroupingProblem",
    "GroupingSolution",
    "GroupingSolver",
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


def _adjacent() -> GroupingSolver:
    from .group_equal import EqualGroups

    return EqualGroups(sort_rows=False)


def _sorted() -> GroupingSolver:
    from .group_equal import EqualGroups

    return EqualGroups(sort_rows=True)


def _graph() -> GroupingSolver:
    from .group_graph import ShortestPath

    return ShortestPath()


def _cp_sat_grouping() -> GroupingSolver:
    from .group_cp_sat import CpSatGrouping

    return CpSatGrouping()


def _even() -> SplitSolver:
    from .split_even import EvenSplits

    return EvenSplits()


def _proportional() -> SplitSolver:
    from .split_proportional import ProportionalSplits

    return ProportionalSplits()


def _greedy() -> SplitSolver:
    from .split_greedy import GreedySplits

    return GreedySplits()


def _cp_sat_splits() -> SplitSolver:
    from .split_cp_sat import CpSatSplits

    return CpSatSplits()


GROUPING_SOLVERS: dict[str, Callable[[], GroupingSolver]] = {
    "adjacent": _adjacent,
    "sorted": _sorted,
    "graph": _graph,
    "cp_sat": _cp_sat_grouping,
}
SPLIT_SOLVERS: dict[str, Callable[[], SplitSolver]] = {
    "even": _even,
    "proportional": _proportional,
    "greedy": _greedy,
    "cp_sat": _cp_sat_splits,
}
