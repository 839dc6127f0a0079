"""Groups of equal size: `adjacent` in the order of layers and heads, `sorted` by falling budget (the paper's clustering).

    minimise over page_slots and p:  the common objective of groups of p consecutive rows
    subject to                       at most max_groups groups; no group over a layer's end if groups stay inside layers

Where p does not divide the rows, the one short group stands where it costs least.

`sorted` with `scope: layer` is Tangram's head-group clustering (arXiv 2606.06302): the heads of a layer sorted by budget
and cut into consecutive groups of p.
"""

from dataclasses import dataclass

from tangram_plan.ir import PAGE_TOKEN_ALIGNMENT

from .grouping_problem import COST_SCALE, GroupingProblem, GroupingSolution, Row, SolverDoesNotApplyError, cut


@dataclass(frozen=True)
class EqualGroups:
    """Cuts rows into groups of one size.

    Args:
        sort_rows: whether rows are sorted by falling budget first.
    """

    sort_rows: bool

    def solve(self, problem: GroupingProblem) -> GroupingSolution:
        """The best size of page and group.

        Raises:
            SolverDoesNotApplyError: the number of groups per layer is limited.
            TangramError: the KV heads do not fit into `max_groups` groups.
        """
        if problem.max_groups_per_layer is not None:
            name = "sorted" if self.sort_rows else "adjacent"
            raise SolverDoesNotApplyError(
                f"solver {name} cannot limit the groups that touch a layer",
                where="grouping.solver",
                got=name,
                expected="cp_sat",
            )
        rows = problem.sorted_rows if self.sort_rows else problem.natural_rows
        spans = _spans(problem, rows)
        candidates = []
        for slots in problem.feasible_page_slots():
            for size in range(1, slots // PAGE_TOKEN_ALIGNMENT + 1):
                if sum(-(-len(span) // size) for span in spans) <= problem.max_groups:
                    groups = tuple(group for span in spans for group in _cut_span(problem, span, size, slots))
                    candidates.append(GroupingSolution(groups, slots, 0.0, None, "heuristic"))
        best = min(candidates, key=problem.solution_cost)
        return GroupingSolution(
            best.groups, best.page_slots, problem.solution_cost(best) / COST_SCALE, None, "heuristic"
        )


def _spans(problem: GroupingProblem, rows: tuple[Row, ...]) -> list[tuple[Row, ...]]:
    """The rows between the ends that no group may cross."""
    ends = sorted(set(problem.bounds(rows)))
    return [tuple(rows[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _cut_span(problem: GroupingProblem, span: tuple[Row, ...], size: int, slots: int) -> tuple[tuple[Row, ...], ...]:
    """Groups of `size` consecutive rows, with the short one, if there is one, at the cheapest place."""
    whole, short = divmod(len(span), size)
    if not short:
        return cut(span, range(size, len(span) + 1, size))
    placements = [
        cut(span, [*range(size, place * size + 1, size), *range(place * size + short, len(span) + 1, size)])
        for place in range(whole + 1)
    ]
    return min(
        placements, key=lambda groups: problem.solution_cost(GroupingSolution(groups, slots, 0.0, None, "heuristic"))
    )
