"""`cp_sat` when at most s groups may touch a layer: sorted rows no longer suffice, because a layer then shares laws.

For given laws a layer's KV heads, sorted by falling rho, are best cut into at most s *runs* of neighbours, each in one
group. The greedy that this solver has to beat cuts every layer into the s runs with the least sum of size * rho,
whatever the other layers do (for each size of page, runs that fit into a page), and then finds the best path over all
runs, sorted by rho and never torn apart. From there,
runs are priced anew at what a KV head costs in the groups just found, a few times. CP-SAT then chooses runs and groups
together, for the best size of page so far and a list of candidate laws:

    y[i, m] = 1      there is a group with candidate law i and room for m members
    z[l, a, b, i] = 1  the KV heads a to b of layer l are a run in the group with law i >= rho[l, a]

    minimise    sum cost[i, m] * y[i, m]
    subject to  sum_{a <= h < b, i} z[l, a, b, i] = 1                      for every KV head (l, h)
                sum_{a, b, i} z[l, a, b, i] <= s                           for every layer l
                sum_{l, a, b} (b - a) * z[l, a, b, i] <= sum_m m * y[i, m]  for every law i
                sum_m y[i, m] <= 1 for every law i,   sum y <= max_groups

Its bound counts for these laws only, so the one reported is the larger of two that count for all: the optimum without
the limit, and what the runs of every layer take when each KV head is in the group that is cheapest for it alone.
"""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, combinations, pairwise

from ortools.sat.python import cp_model

from tangram_plan.ir import TangramError

from .cp_sat_solver import deterministic_solver
from .grouping_problem import COST_SCALE, Arc, GroupingProblem, GroupingSolution, Row, dominant_sizes
from .path_bounds import bound_paths

DETERMINISTIC_SECONDS = 4.0
PRICE_ROUNDS = 8
TIE_PRICE = 1e-6  # of rho: far below one unit of cost, far above the rounding of floats
LAWS_PER_RUN = 6  # candidate laws at or next above a run's own


@dataclass(frozen=True)
class _StepPrice:
    """What a KV head costs in the first of these groups whose law covers it; where that is the same, a smaller law is better."""

    laws: list[int]  # rising
    prices: list[float]

    def __call__(self, rho: int) -> float:
        return self.prices[bisect_left(self.laws, rho)] + rho * TIE_PRICE


Run = tuple[Row, ...]  # neighbours of one layer, by falling rho, that share a group
Groups = tuple[tuple[Row, ...], ...]


def solve_limited(problem: GroupingProblem, limit: int, unlimited: GroupingSolution) -> GroupingSolution:
    """The best grouping found in which at most `limit` groups touch a layer.

    Args:
        problem: one rank, groups that may span layers.
        limit: s.
        unlimited: the solution without the limit; its bound holds here, too, and its laws are candidates.

    Raises:
        TangramError: as `greedy_groups`.
    """
    layers = _layers(problem)
    start = _reprice(problem, limit, greedy_groups(problem, limit))
    laws = sorted({max(row.rho for row in group) for group in (*start.groups, *unlimited.groups)}, reverse=True)
    groups = _choose_runs_and_groups(problem, layers, limit, laws, start)
    best = min((start, _solution(problem, groups, start.page_slots)), key=lambda found: found.objective)
    assert unlimited.bound is not None
    bound = min(best.objective, max(unlimited.bound, _separate_cost(problem, layers, limit) / COST_SCALE))
    status = "optimal" if bound == best.objective else "feasible"
    return GroupingSolution(best.groups, best.page_slots, best.objective, bound, status)


def greedy_groups(problem: GroupingProblem, limit: int, price: Callable[[int], float] = float) -> GroupingSolution:
    """Each layer cut into the runs with the least sum of size * price(rho); then the best path over all runs by falling rho.

    Args:
        problem: one rank, groups that may span layers.
        limit: most runs of a layer.
        price: of one KV head under a law; by default its rho.

    Raises:
        TangramError: no size of page has room for the runs.
    """
    found = _find_groups(problem, limit, price)
    if found is None:
        raise TangramError(
            "groups of whole runs do not fit",
            where="grouping",
            got=f"{limit} groups per layer, {problem.max_groups} groups",
            expected="room for the KV heads of a layer in so few groups",
            fix="raise grouping.max_groups_per_layer, grouping.max_groups or grouping.page_slots",
        )
    return found


def _find_groups(problem: GroupingProblem, limit: int, price: Callable[[int], float]) -> GroupingSolution | None:
    """As `greedy_groups`; None if no size of page has room for the runs."""
    layers = _layers(problem)
    found = []
    for slots in problem.feasible_page_slots():
        largest = dominant_sizes(slots)[-1]
        if any(len(layer) > limit * largest for layer in layers):
            continue
        runs = [run for layer in layers for run in least_runs(layer, limit, largest, price)]
        runs.sort(key=lambda run: (-run[0].rho, run))
        rows_before = [0, *accumulate(len(run) for run in runs)]
        arcs = [
            Arc(first, last, problem.cost(runs[first][0].rho, rows_before[last] - rows_before[first], slots))
            for first in range(len(runs))
            for last in range(first + 1, bisect_right(rows_before, rows_before[first] + largest))
        ]
        path = bound_paths(arcs, len(runs), problem.max_groups)
        if path is not None:
            groups = tuple(tuple(row for run in runs[arc.start : arc.end] for row in run) for arc in path.path)
            found.append(_solution(problem, groups, slots))
    return min(found, key=lambda solution: solution.objective, default=None)


def _reprice(problem: GroupingProblem, limit: int, start: GroupingSolution) -> GroupingSolution:
    """The best of the start and a few rounds in which runs are priced by the groups of the round before."""
    best = current = start
    for _ in range(PRICE_ROUNDS):
        members = {max(row.rho for row in group): len(group) for group in current.groups}
        laws = sorted(members)
        prices = [problem.cost(law, members[law], current.page_slots) / members[law] for law in laws]
        found = _find_groups(problem, limit, _StepPrice(laws, prices))
        if found is None:  # runs at these prices do not fit
            break
        current = found
        best = min(best, current, key=lambda solution: solution.objective)
    return best


def _choose_runs_and_groups(
    problem: GroupingProblem, layers: Sequence[Run], limit: int, laws: Sequence[int], start: GroupingSolution
) -> Groups:
    """CP-SAT over runs and groups for these laws (falling) and the start's size of page; the start if nothing better is found."""
    model, slots = cp_model.CpModel(), start.page_slots
    rooms = {
        (law, size): model.new_bool_var(f"room for {size} under {law}")
        for law in laws
        for size in dominant_sizes(slots)
    }
    members: dict[int, list[cp_model.LinearExprT]] = defaultdict(list)
    choices: list[tuple[Run, int, cp_model.IntVar]] = []
    rising = laws[::-1]
    for layer in layers:
        covering: list[list[cp_model.IntVar]] = [[] for _ in layer]
        of_layer = []
        for first, last in combinations(range(len(layer) + 1), 2):
            covered = next(index for index, law in enumerate(rising) if law >= layer[first].rho)
            for law in rising[covered : covered + LAWS_PER_RUN]:
                chosen = model.new_bool_var(f"layer {layer[0].layer}, rows {first} to {last} under {law}")
                choices.append((layer[first:last], law, chosen))
                members[law].append((last - first) * chosen)
                of_layer.append(chosen)
                for row in range(first, last):
                    covering[row].append(chosen)
        for chosen_runs in covering:
            model.add_exactly_one(chosen_runs)
        model.add(sum(of_layer) <= limit)
    for law in laws:
        of_law = {size: rooms[law, size] for size in dominant_sizes(slots)}
        model.add_at_most_one(of_law.values())
        model.add(sum(members[law]) <= sum(size * used for size, used in of_law.items()))
    model.add(sum(rooms.values()) <= problem.max_groups)
    model.minimize(sum(problem.cost(law, size, slots) * used for (law, size), used in rooms.items()))
    law_of = {row: max(member.rho for member in group) for group in start.groups for row in group}
    for run, law, chosen in choices:
        whole = law_of[run[0]] == law and all(
            (law_of[row] == law) == (row in run) for row in next(layer for layer in layers if run[0] in layer)
        )
        model.add_hint(chosen, whole)
    solver = deterministic_solver(problem.seed, DETERMINISTIC_SECONDS)
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return start.groups
    groups: dict[int, list[Row]] = defaultdict(list)
    for run, law, chosen in choices:
        if solver.boolean_value(chosen):
            groups[law] += run
    return tuple(
        tuple(sorted(rows, key=lambda row: (-row.rho, row))) for _, rows in sorted(groups.items(), reverse=True)
    )


def _layers(problem: GroupingProblem) -> list[Run]:
    """The rows of every layer, by falling rho."""
    layers: dict[int, list[Row]] = defaultdict(list)
    for row in problem.sorted_rows:
        layers[row.layer].append(row)
    return [tuple(rows) for _, rows in sorted(layers.items())]


def least_runs(layer: Run, limit: int, largest: int, price: Callable[[int], float]) -> tuple[Run, ...]:
    """The runs of a layer's rows with the least sum of size * price(rho of the first row); of several, the fewest, then the shortest first.

    With r runs left for the rows from i on, in O(rows * limit * largest):

        least[r][i] = min over j of (j - i) * price(rho[i]) + least[r - 1][j],    least[0][rows] = 0

    Args:
        layer: rows by falling rho; at most `limit * largest`.
        limit: most runs.
        largest: most rows of a run.
        price: of one row under a law.
    """
    num_rows = len(layer)
    prices = [price(row.rho) for row in layer]
    least: list[list[tuple[float, int]]] = [
        [(math.inf, 0)] * num_rows + [(0.0, num_rows)]
    ]  # cost, end of the first run

    def first_run(start: int, rest: list[tuple[float, int]]) -> tuple[float, int]:
        ends = range(start + 1, min(start + largest, num_rows) + 1)
        return min(((end - start) * prices[start] + rest[end][0], end) for end in ends)

    for _ in range(min(limit, num_rows)):
        rest = least[-1]
        least.append([*(first_run(start, rest) for start in range(num_rows)), (math.inf, num_rows)])
    num_runs = min(range(1, len(least)), key=lambda count: least[count][0][0])
    ends = [0]
    for runs_left in range(num_runs, 0, -1):
        ends.append(least[runs_left][ends[-1]][1])
    return tuple(layer[start:end] for start, end in pairwise(ends))


def _separate_cost(problem: GroupingProblem, layers: Sequence[Run], limit: int) -> int:
    """What the runs of every layer take when each row is in the group that is cheapest for it alone; no grouping costs less."""
    price = cache(problem.least_member_cost)
    largest = dominant_sizes(max(problem.page_slots))[-1]
    runs = (run for layer in layers for run in least_runs(layer, limit, largest, price))
    return math.ceil(round(sum(price(run[0].rho) * len(run) for run in runs), 3))  # costs of groups are integers


def _solution(problem: GroupingProblem, groups: Groups, slots: int) -> GroupingSolution:
    solution = GroupingSolution(groups, slots, 0.0, None, "feasible")
    return GroupingSolution(groups, slots, problem.solution_cost(solution) / COST_SCALE, None, "feasible")
