"""`cp_sat` with a limit on the groups that touch a layer: the limit holds, the bound is true, greedy is never better."""

import itertools
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_plan.ir import KVHead, TangramError, verify_grouping
from tangram_plan.solvers import GroupingSolution
from tangram_plan.solvers.group_cp_sat import CpSatGrouping
from tangram_plan.solvers.group_cp_sat_layers import Run, greedy_groups, least_runs, solve_limited
from tangram_plan.solvers.grouping_problem import COST_SCALE, GroupingProblem, Row, SolverDoesNotApplyError
from tests.solver_cases import (
    GroupingCase,
    Scope,
    best_of_all_groupings,
    budget_tables,
    digest_elsewhere,
    digest_of_limited_groupings,
    limited_cases,
    make_case,
    most_groups_of_a_layer,
)
from tests.solver_strategies import small_limited_cases

CASES = limited_cases()
every_case = pytest.mark.parametrize("case", CASES)


@cache
def solve(case: str) -> GroupingSolution:
    return CpSatGrouping().solve(CASES[case].problem)


def limit_of(problem: GroupingProblem) -> int:
    assert problem.max_groups_per_layer is not None
    return problem.max_groups_per_layer


def assert_limits_hold(case: GroupingCase, solution: GroupingSolution) -> None:
    problem, grouping = case.problem, solution.grouping()
    verify_grouping(grouping, problem.budgets, case.shape, 1)
    assert len(grouping.groups) <= problem.max_groups
    assert most_groups_of_a_layer(group.members_by_rank[0] for group in grouping.groups) <= limit_of(problem)
    assert solution.page_slots in problem.page_slots


def assert_honest(problem: GroupingProblem, solution: GroupingSolution) -> None:
    assert round(solution.objective * COST_SCALE) == problem.solution_cost(solution)
    assert solution.bound is not None
    assert solution.bound <= solution.objective
    assert (solution.status == "optimal") == (solution.bound == solution.objective)


@every_case
def test_limits_hold(case: str) -> None:
    assert_limits_hold(CASES[case], solve(case))


@every_case
def test_objective_is_that_of_the_grouping_and_never_below_the_bound(case: str) -> None:
    assert_honest(CASES[case].problem, solve(case))


@every_case
def test_never_worse_than_greedy(case: str) -> None:
    problem = CASES[case].problem
    assert solve(case).objective <= greedy_groups(problem, limit_of(problem)).objective


@every_case
def test_second_run_gives_the_same(case: str) -> None:
    assert CpSatGrouping().solve(CASES[case].problem) == solve(case)


@pytest.mark.parametrize("hash_seed", [1, 2])
def test_solution_does_not_depend_on_the_hash_seed(hash_seed: int) -> None:
    assert digest_elsewhere("digest_of_limited_groupings", hash_seed) == digest_of_limited_groupings()


@settings(deadline=None, max_examples=300, derandomize=True, database=None)
@given(small_limited_cases())
def test_bound_is_below_the_best_of_all_groupings(case: GroupingCase) -> None:
    best = best_of_all_groupings(case.problem)
    if best is None:
        with pytest.raises(TangramError, match="do not fit"):
            CpSatGrouping().solve(case.problem)
        return
    solution = CpSatGrouping().solve(case.problem)
    assert_limits_hold(case, solution)
    assert_honest(case.problem, solution)
    assert solution.bound is not None
    assert round(solution.bound * COST_SCALE) <= best <= round(solution.objective * COST_SCALE)
    assert solution.objective <= greedy_groups(case.problem, limit_of(case.problem)).objective


def test_limit_that_does_not_bind_changes_nothing() -> None:
    rho = budget_tables(24)["uniform"]
    free = CpSatGrouping().solve(make_case(4, 6, rho).problem)
    limited = CpSatGrouping().solve(make_case(4, 6, rho, max_groups_per_layer=6).problem)
    assert limited.bound is not None
    assert free.objective <= limited.objective
    assert free.bound is not None
    assert limited.bound >= free.bound


@pytest.mark.parametrize(
    ("num_layers", "num_kv_heads", "limit", "max_groups", "page_slots"),
    [
        (2, 16, 1, 24, 128),  # a page holds 8 of a layer's 16
        (4, 8, 2, 24, 32),  # two pages of 2 for 8
        (2, 3, 1, 1, 48),  # one group of 3 for 6
        (3, 2, 1, 2, 48),  # whole layers of 2 in groups of 3: one layer to a group
    ],
)
def test_limits_that_leave_no_room_are_refused_in_one_line(
    num_layers: int, num_kv_heads: int, limit: int, max_groups: int, page_slots: int
) -> None:
    problem, _ = make_case(
        num_layers,
        num_kv_heads,
        [9000] * num_layers * num_kv_heads,
        max_groups=max_groups,
        max_groups_per_layer=limit,
        page_slots=page_slots,
    )
    with pytest.raises(TangramError) as error:
        CpSatGrouping().solve(problem)
    message = str(error.value)
    assert "\n" not in message
    assert "do not fit" in message
    assert "raise grouping.max_groups" in message


@pytest.mark.parametrize(("ranks", "scope"), [(2, "model"), (1, "layer")])
def test_limit_applies_to_one_rank_and_groups_that_span_layers_only(ranks: int, scope: Scope) -> None:
    problem, _ = make_case(2, 4, [9000] * 8, ranks=ranks, scope=scope, max_groups_per_layer=2)
    with pytest.raises(SolverDoesNotApplyError, match="can only be limited"):
        CpSatGrouping().solve(problem)


def test_start_is_kept_where_new_prices_leave_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["4 layers of 8, limit 2"]
    limit = limit_of(case.problem)
    unlimited = CpSatGrouping().solve(make_case(4, 8, budget_tables(32)["uniform"]).problem)
    greedy = greedy_groups(case.problem, limit)

    def only_by_rho(*arguments: object) -> GroupingSolution | None:
        return greedy if arguments[-1] is float else None

    monkeypatch.setattr("tangram_plan.solvers.group_cp_sat_layers._find_groups", only_by_rho)
    assert solve_limited(case.problem, limit, unlimited).objective <= greedy.objective


# --- runs of one layer


def make_run(rho: list[int]) -> Run:
    return tuple(Row((KVHead(0, head),), law) for head, law in enumerate(sorted(rho, reverse=True)))


def runs_by_enumeration(layer: Run, limit: int, largest: int, price: Callable[[int], int]) -> tuple[Run, ...]:
    """Of all cuts: the cheapest, then the fewest runs, then the shortest first."""
    num_rows = len(layer)
    cuts = [
        (*ends, num_rows)
        for count in range(min(limit, num_rows))
        for ends in itertools.combinations(range(1, num_rows), count)
    ]
    plans = [tuple(layer[start:end] for start, end in zip((0, *ends), ends, strict=False)) for ends in cuts]
    fitting = [runs for runs in plans if max(map(len, runs)) <= largest]
    return min(fitting, key=lambda runs: sum(len(run) * price(run[0].rho) for run in runs))


@settings(deadline=None, max_examples=500, derandomize=True, database=None)
@given(st.data())
def test_runs_are_the_cheapest_of_all_cuts(data: st.DataObject) -> None:
    laws = data.draw(st.lists(st.one_of(st.integers(0, 4), st.integers(0, 65536)), min_size=1, max_size=9))
    layer = make_run(laws)
    limit = data.draw(st.integers(1, 10))
    largest = data.draw(st.integers(-(-len(laws) // limit), 10))
    prices = {row.rho: data.draw(st.integers(0, 20)) for row in layer}
    for price in (int, prices.__getitem__):
        assert least_runs(layer, limit, largest, price) == runs_by_enumeration(layer, limit, largest, price)


def test_many_heads_are_cut_at_once() -> None:
    layer = make_run(list(range(200)))
    runs = least_runs(layer, 50, 200, float)
    assert tuple(itertools.chain(*runs)) == layer
    assert {len(run) for run in runs} == {4}
