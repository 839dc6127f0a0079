"""`cp_sat`: clustering by OR-Tools, with its own bound (https://developers.google.com/optimization/cp/cp_solver).

One model for every size of page; x[a] = 1 if the group of arc a = (start, end) over the sorted rows is used:

    minimise    sum_a cost[a] * x[a]
    subject to  sum_{a starts at i} x[a] = sum_{a ends at i} x[a]     for every row 0 < i < rows
                sum_{a starts at 0} x[a] = 1
                sum_a x[a] <= max_groups

`path_bounds` first takes out the arcs that no better path can use, and whole sizes of page. Often this Lagrangian
presolve already closes the gap: the path that it met costs no more than its bound, and CP-SAT has nothing left to
prove and is never called. Ranks enter through rows,
layers as the ends that arcs may not cross. A limit on the groups that touch a layer breaks the argument for sorted
rows; `group_cp_sat_layers` has the model for it.
"""

import math
from dataclasses import dataclass

from ortools.sat.python import cp_model

from .cp_sat_solver import deterministic_solver
from .group_cp_sat_layers import solve_limited
from .grouping_problem import COST_SCALE, Arc, GroupingProblem, GroupingSolution, SolverDoesNotApplyError, cut
from .path_bounds import bound_paths

DETERMINISTIC_SECONDS = 10.0


@dataclass(frozen=True)
class CpSatGrouping:
    """CP-SAT over all sizes of page."""

    def solve(self, problem: GroupingProblem) -> GroupingSolution:
        """The best grouping found, with a bound over all sizes of page.

        Raises:
            SolverDoesNotApplyError: groups per layer are limited, and groups stay inside layers or ranks share a law.
            TangramError: the limits leave no room for the KV heads.
        """
        if problem.max_groups_per_layer is None:
            return _solve_unlimited(problem)
        if problem.within_layers or len(problem.ranks) > 1:
            raise SolverDoesNotApplyError(
                "groups per layer can only be limited for groups that span layers on one rank",
                where="grouping.max_groups_per_layer",
                got=problem.max_groups_per_layer,
                expected="grouping.scope: model and tensor_parallel: 1",
                fix="remove the limit",
            )
        return solve_limited(problem, problem.max_groups_per_layer, _solve_unlimited(problem))


def _solve_unlimited(problem: GroupingProblem) -> GroupingSolution:
    """Paths over the sorted rows, for every size of page that can still be better."""
    candidates = {slots: list(problem.arcs(slots)) for slots in problem.feasible_page_slots()}
    bounds = {slots: bound_paths(arcs, problem.num_rows, problem.max_groups) for slots, arcs in candidates.items()}
    relaxed = {slots: found for slots, found in bounds.items() if found is not None}
    best_slots = min(relaxed, key=lambda slots: (relaxed[slots].path_cost, slots))
    best_path, best_cost = relaxed[best_slots].path, relaxed[best_slots].path_cost
    bound = best_cost
    for slots in sorted(relaxed, key=lambda slots: (relaxed[slots].lower, slots)):
        if relaxed[slots].lower >= best_cost:
            continue
        useful = [arc for arc, cost in zip(candidates[slots], relaxed[slots].through, strict=True) if cost < best_cost]
        found, proven = _solve_paths(problem, useful, below=best_cost)
        bound = min(bound, max(proven, relaxed[slots].lower))
        if found:
            best_slots, best_path, best_cost = slots, found, sum(arc.cost for arc in found)
    groups = cut(problem.sorted_rows, [arc.end for arc in best_path])
    status = "optimal" if bound >= best_cost else "feasible"
    return GroupingSolution(groups, best_slots, best_cost / COST_SCALE, min(bound, best_cost) / COST_SCALE, status)


def _solve_paths(problem: GroupingProblem, arcs: list[Arc], *, below: int) -> tuple[tuple[Arc, ...], int]:
    """The best path over these arcs that costs less than `below` (empty: none found), and a bound on all such paths."""
    model, num_rows = cp_model.CpModel(), problem.num_rows
    used = [model.new_bool_var(f"{arc.start}-{arc.end}") for arc in arcs]
    leaving: list[list[cp_model.IntVar]] = [[] for _ in range(num_rows + 1)]
    entering: list[list[cp_model.IntVar]] = [[] for _ in range(num_rows + 1)]
    for arc, var in zip(arcs, used, strict=True):
        leaving[arc.start].append(var)
        entering[arc.end].append(var)
    model.add_exactly_one(leaving[0])
    for row in range(1, num_rows):
        if leaving[row] or entering[row]:
            model.add(sum(leaving[row]) == sum(entering[row]))
    model.add(sum(used) <= problem.max_groups)
    cost = sum(arc.cost * var for arc, var in zip(arcs, used, strict=True))
    model.add(cost < below)
    model.minimize(cost)
    solver = deterministic_solver(problem.seed, DETERMINISTIC_SECONDS)
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return (), below
    proven = solver.best_objective_bound  # -inf if the time was up before there was any
    bound = (
        math.ceil(round(proven, 3)) if math.isfinite(proven) else 0
    )  # costs are integers >= 0; CP-SAT reports a float
    if status == cp_model.UNKNOWN:
        return (), bound
    return tuple(arc for arc, var in zip(arcs, used, strict=True) if solver.boolean_value(var)), bound
