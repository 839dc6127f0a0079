"""Every clustering solver, on every case: valid, within limits, honest about its objective, deterministic, no worse than simpler ones."""

import subprocess
import sys
from fractions import Fraction
from functools import cache

import pytest

from tangram_plan.ir import TangramError, verify_grouping
from tangram_plan.solvers import GROUPING_SOLVERS, GroupingSolution, SolverDoesNotApplyError
from tangram_plan.solvers.grouping_problem import COST_SCALE
from tests.solver_cases import (
    Scope,
    digest_elsewhere,
    digest_of_groupings,
    grouping_cases,
    make_case,
    objective_by_hand,
)

CASES = grouping_cases()
every_case = pytest.mark.parametrize("case", CASES)
every_solver = pytest.mark.parametrize("solver", GROUPING_SOLVERS)


@cache
def solve(solver: str, case: str) -> GroupingSolution:
    return GROUPING_SOLVERS[solver]().solve(CASES[case].problem)


@every_case
@every_solver
def test_grouping_is_valid(solver: str, case: str) -> None:
    problem, shape = CASES[case]
    verify_grouping(solve(solver, case).grouping(), problem.budgets, shape, len(problem.ranks))


@every_case
@every_solver
def test_law_of_a_group_is_the_largest_of_its_members(solver: str, case: str) -> None:
    rho = CASES[case].problem.budgets.rho
    for group in solve(solver, case).grouping().groups:
        assert group.rho == max(rho[kv_head] for members in group.members_by_rank for kv_head in members)


@every_case
@every_solver
def test_limits_hold(solver: str, case: str) -> None:
    problem, solution = CASES[case].problem, solve(solver, case)
    grouping = solution.grouping()
    assert len(grouping.groups) <= problem.max_groups
    assert grouping.page_slots in problem.page_slots
    if problem.within_layers:
        for group in grouping.groups:
            assert len({kv_head.layer for members in group.members_by_rank for kv_head in members}) == 1


@every_case
@every_solver
def test_objective_is_that_of_the_grouping(solver: str, case: str) -> None:
    problem, solution = CASES[case].problem, solve(solver, case)
    expected = objective_by_hand(solution.grouping(), problem.budgets, problem.contexts)
    rounding = Fraction(len(solution.groups), COST_SCALE)  # each group's cost is rounded once
    assert abs(Fraction(solution.objective) - expected) <= rounding
    assert round(solution.objective * COST_SCALE) == problem.solution_cost(solution)


@every_case
@every_solver
def test_never_worse_than_adjacent(solver: str, case: str) -> None:
    assert solve(solver, case).objective <= solve("adjacent", case).objective


@every_case
@pytest.mark.parametrize("solver", ["graph", "cp_sat"])
def test_exact_solvers_are_never_worse_than_sorted(solver: str, case: str) -> None:
    assert solve(solver, case).objective <= solve("sorted", case).objective


@every_case
def test_cp_sat_finds_the_optimum_of_graph(case: str) -> None:
    assert solve("cp_sat", case).objective == solve("graph", case).objective


@every_case
@every_solver
def test_bound_is_below_the_objective_and_below_every_other_solution(solver: str, case: str) -> None:
    solution = solve(solver, case)
    if solution.bound is None:
        assert solution.status == "heuristic"
        assert solution.gap is None
        return
    assert solution.bound <= min(solve(other, case).objective for other in GROUPING_SOLVERS)
    assert solution.gap is not None
    assert 0 <= solution.gap <= 0.01
    assert (solution.status == "optimal") == (solution.bound == solution.objective)


@every_case
@every_solver
def test_second_run_gives_the_same(solver: str, case: str) -> None:
    assert GROUPING_SOLVERS[solver]().solve(CASES[case].problem) == solve(solver, case)


@pytest.mark.parametrize("hash_seed", [1, 2])
def test_solution_does_not_depend_on_the_hash_seed(hash_seed: int) -> None:
    assert digest_elsewhere("digest_of_groupings", hash_seed) == digest_of_groupings()


@every_solver
@pytest.mark.parametrize(
    ("num_layers", "num_kv_heads", "page_slots", "max_groups", "scope", "needed"),
    [
        (1, 1 + 24, 16, 24, "model", 25),
        (2, 4, 32, 3, "model", 4),
        (3, 2, 128, 2, "layer", 3),
        (2, 3, 32, 3, "layer", 4),
    ],
)
def test_too_few_groups_are_refused_in_one_line(
    solver: str, num_layers: int, num_kv_heads: int, page_slots: int, max_groups: int, scope: Scope, needed: int
) -> None:
    problem, _ = make_case(
        num_layers,
        num_kv_heads,
        [9000] * num_layers * num_kv_heads,
        page_slots=page_slots,
        max_groups=max_groups,
        scope=scope,
    )
    with pytest.raises(TangramError) as error:
        GROUPING_SOLVERS[solver]().solve(problem)
    message = str(error.value)
    assert "\n" not in message
    assert f"at least {needed} groups" in message
    assert f"expected at most {max_groups}" in message
    assert "grouping.max_groups" in message


@every_solver
def test_limit_that_is_just_wide_enough_is_met(solver: str) -> None:
    problem, _ = make_case(2, 3, [9000] * 6, page_slots=32, max_groups=4, scope="layer")
    assert len(GROUPING_SOLVERS[solver]().solve(problem).groups) == 4


@pytest.mark.parametrize("solver", [name for name in GROUPING_SOLVERS if name != "cp_sat"])
def test_limit_on_groups_of_a_layer_is_refused_where_it_cannot_be_held(solver: str) -> None:
    problem, _ = make_case(2, 4, [0] * 8, max_groups_per_layer=1)
    with pytest.raises(SolverDoesNotApplyError) as error:
        GROUPING_SOLVERS[solver]().solve(problem)
    assert str(error.value) == (
        f"grouping.solver: solver {solver} cannot limit the groups that touch a layer: got {solver}, expected cp_sat"
    )


def test_importing_the_table_of_solvers_loads_none_of_them() -> None:
    code = "import sys, tangram_plan.solvers; print(sorted({'ortools', 'networkx'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_one_group_costs_its_pages_and_one_table() -> None:
    # 2 KV heads that keep 32 of 100 tokens each (10 + 20 protected, 2 of the other 70), in pages of 2 * 16 tokens.
    problem, _ = make_case(1, 2, [1873, 1873], page_slots=32, contexts=(100,), sink=24)
    assert problem.budgets.law(1873).kept(100) == 24 + 8 + 2
    # ceil(34 / 16) = 3 pages of 32 slots, each priced a quarter of a slot more; the ideal is 2 * 34 slots.
    assert problem.cost(1873, 2, 32) == round(1e8 * 3 * 32.25 / 68) + 20000
