"""Groups of equal size: `adjacent` in the order of layers and heads, `sorted` by falling budget (the paper's clustering).

    minimise over page_slots and p:  the common objective of groups of p consecutive rows
    subject to                       at most max_groups groups; no group over a layer's end if groups stay inside layers

`sorted` with `scope: layer` is Tangram's head-group clustering (arXiv 2606.06302): the heads of a layer sorted by budget
and cut into consecutive groups of p.
"""

from dataclasses import dataclass

from tangram_plan.ir import PAGE_TOKEN_ALIGNMENT

from .grouping_problem import COST_SCALE, GroupingProblem, GroupingSolution, Row, cut


@dataclass(frozen=True)
class EqualGroups:
    """Cuts rows into groups of one size.

    Args:
        sort_rows: whether rows are sorted by falling budget first.
    """

    sort_rows: bool

    def solve(self, problem: GroupingProblem) -> GroupingSolution:
        """The best size of page and group."""
        rows = problem.sorted_rows if self.sort_rows else problem.natural_rows
        candidates = []
        for slots in problem.feasible_page_slots():
            for size in range(1, slots // PAGE_TOKEN_ALIGNMENT + 1):
                groups = cut(rows, _ends(problem, rows, size))
                if len(groups) <= problem.max_groups:
                    candidates.append(GroupingSolution(groups, slots, 0.0, None, "heuristic"))
        best = min(candidates, key=problem.solution_cost)
        return GroupingSolution(
            best.groups, best.page_slots, problem.solution_cost(best) / COST_SCALE, None, "heuristic"
        )


def _ends(problem: GroupingProblem, rows: tuple[Row, ...], size: int) -> list[int]:
    bounds, ends = problem.bounds(rows), [0]
    while ends[-1] < len(rows):
        ends.append(min(ends[-1] + size, bounds[ends[-1]]))
    return ends[1:]
