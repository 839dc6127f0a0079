"""Every solver of static splits, on every case; the optimum by trying all splits."""

import math
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from tangram_plan.solvers import SPLIT_SOLVERS, SplitProblem
from tests.solver_cases import all_splits, digest_elsewhere, digest_of_splits, split_problems

PROBLEMS = split_problems()
every_case = pytest.mark.parametrize("case", PROBLEMS)
every_solver = pytest.mark.parametrize("solver", SPLIT_SOLVERS)
every_problem = settings(deadline=None, max_examples=100, derandomize=True, database=None)


@cache
def solve(solver: str, case: str) -> tuple[int, ...]:
    return SPLIT_SOLVERS[solver]().solve(PROBLEMS[case])


def busiest(problem: SplitProblem, splits: tuple[int, ...]) -> int:
    """Tokens of the longest split, counted one by one."""
    return max(len(range(0, tokens, count)) for tokens, count in zip(problem.tokens, splits, strict=True))


@st.composite
def small_problems(draw: st.DrawFn) -> SplitProblem:
    tokens = draw(st.lists(st.one_of(st.integers(0, 12), st.integers(0, 5000)), min_size=1, max_size=4))
    return SplitProblem(tuple(tokens), draw(st.integers(len(tokens), 11)), 0)


@every_case
@every_solver
def test_every_head_has_a_split_and_all_fit(solver: str, case: str) -> None:
    splits = solve(solver, case)
    assert len(splits) == len(PROBLEMS[case].tokens)
    assert min(splits) >= 1
    assert sum(splits) <= PROBLEMS[case].max_splits


@every_problem
@given(small_problems(), st.sampled_from(sorted(SPLIT_SOLVERS)))
def test_every_head_of_any_problem_has_a_split_and_all_fit(problem: SplitProblem, solver: str) -> None:
    splits = SPLIT_SOLVERS[solver]().solve(problem)
    assert len(splits) == len(problem.tokens)
    assert min(splits) >= 1
    assert sum(splits) <= problem.max_splits


@every_case
@every_solver
def test_makespan_is_that_of_the_longest_split(solver: str, case: str) -> None:
    splits = solve(solver, case)
    assert PROBLEMS[case].makespan(splits) == busiest(PROBLEMS[case], splits)


@every_case
@every_solver
def test_second_run_gives_the_same(solver: str, case: str) -> None:
    assert SPLIT_SOLVERS[solver]().solve(PROBLEMS[case]) == solve(solver, case)


@pytest.mark.parametrize("hash_seed", [1, 2])
def test_splits_do_not_depend_on_the_hash_seed(hash_seed: int) -> None:
    assert digest_elsewhere("digest_of_splits", hash_seed) == digest_of_splits()


@every_case
@every_solver
def test_cp_sat_is_never_worse(solver: str, case: str) -> None:
    assert busiest(PROBLEMS[case], solve("cp_sat", case)) <= busiest(PROBLEMS[case], solve(solver, case))


@every_problem
@given(small_problems())
def test_cp_sat_finds_the_least_makespan_with_the_fewest_splits(problem: SplitProblem) -> None:
    candidates = (
        (busiest(problem, splits), sum(splits)) for splits in all_splits(len(problem.tokens), problem.max_splits)
    )
    splits = SPLIT_SOLVERS["cp_sat"]().solve(problem)
    assert (busiest(problem, splits), sum(splits)) == min(candidates)


@every_problem
@given(small_problems())
def test_greedy_finds_the_least_makespan(problem: SplitProblem) -> None:
    candidates = (busiest(problem, splits) for splits in all_splits(len(problem.tokens), problem.max_splits))
    assert busiest(problem, SPLIT_SOLVERS["greedy"]().solve(problem)) == min(candidates)


@every_solver
@pytest.mark.parametrize("tokens", [(5,), (0, 0), (5, 900, 0, 40)])
def test_as_many_splits_as_heads_leave_no_choice(solver: str, tokens: tuple[int, ...]) -> None:
    assert SPLIT_SOLVERS[solver]().solve(SplitProblem(tokens, len(tokens), 0)) == (1,) * len(tokens)


@pytest.mark.parametrize("solver", ["proportional", "cp_sat"])
def test_head_without_tokens_takes_one_split(solver: str) -> None:
    assert SPLIT_SOLVERS[solver]().solve(SplitProblem((0, 700, 0, 300), 12, 0))[::2] == (1, 1)


@pytest.mark.parametrize("tokens", [(0, 0), (1, 0)])
def test_greedy_takes_no_split_that_does_not_help(tokens: tuple[int, ...]) -> None:
    assert SPLIT_SOLVERS["greedy"]().solve(SplitProblem(tokens, 8, 0)) == (1, 1)


def test_even_ignores_what_heads_keep() -> None:
    assert SPLIT_SOLVERS["even"]().solve(SplitProblem((1, 1000, 5), 11, 0)) == (3, 3, 3)


def test_proportional_rounds_shares_as_the_paper_does() -> None:
    # tau = 1000 / 10 = 100 tokens a split: 4.6 -> 5, 3.4 -> 3, 1.8 -> 2, and a share of 0.2 still takes one... 11 in all,
    # one too many, so the head with the most splits gives it back.
    assert SPLIT_SOLVERS["proportional"]().solve(SplitProblem((460, 340, 180, 20), 10, 0)) == (4, 3, 2, 1)
    # tau = 1000 / 12: 5.52 -> 6, 4.08 -> 4, 1.44 -> 1, 0.96 -> 1, which fits.
    assert SPLIT_SOLVERS["proportional"]().solve(SplitProblem((460, 340, 120, 80), 12, 0)) == (6, 4, 1, 1)


@every_problem
@given(small_problems())
def test_proportional_is_the_paper_formula_wherever_that_fits(problem: SplitProblem) -> None:
    total, limit = sum(problem.tokens), problem.max_splits
    # round(L / tau) with tau = sum L / N, in integers; shares that end in exactly a half may round either way.
    shares = [(2 * tokens * limit + total, 2 * total) for tokens in problem.tokens]
    if not total or any(top % bottom == 0 for top, bottom in shares):
        return
    paper = [max(1, top // bottom) for top, bottom in shares]
    splits = SPLIT_SOLVERS["proportional"]().solve(problem)
    if sum(paper) <= limit:
        assert list(splits) == paper
    else:
        assert sum(splits) == limit
        assert all(mine <= theirs for mine, theirs in zip(splits, paper, strict=True))


def test_cp_sat_on_a_case_worked_by_hand() -> None:
    # 7 splits of 100, 60, 30: a makespan of 30 takes 4 + 2 + 1 = 7, and nothing under 30 fits (29: 4 + 3 + 2 = 9).
    assert SPLIT_SOLVERS["cp_sat"]().solve(SplitProblem((100, 60, 30), 7, 0)) == (4, 2, 1)


def makespan_by_hand(tokens: Sequence[int], max_splits: int) -> int:
    """The least T at which sum max(1, ceil(L / T)) is at most N, one T after the other from the least that can do."""
    makespan = max(1, sum(tokens) // max_splits)
    while sum(max(1, math.ceil(length / makespan)) for length in tokens) > max_splits:
        makespan += 1
    return makespan


@settings(deadline=None, max_examples=40, derandomize=True, database=None)
@given(st.lists(st.integers(0, 131072), min_size=8, max_size=8), st.sampled_from([16, 132, 264]))
def test_cp_sat_reaches_the_closed_form_at_real_sizes(tokens: list[int], max_splits: int) -> None:
    problem = SplitProblem(tuple(tokens), max_splits, 0)
    splits = SPLIT_SOLVERS["cp_sat"]().solve(problem)
    makespan = makespan_by_hand(tokens, max_splits)
    if any(tokens):
        assert busiest(problem, splits) == busiest(problem, problem.fewest_splits()) == makespan
    assert sum(splits) == sum(problem.fewest_splits()) == sum(max(1, math.ceil(x / makespan)) for x in tokens)


@every_problem
@given(small_problems())
def test_closed_form_is_the_least_makespan_with_the_fewest_splits(problem: SplitProblem) -> None:
    candidates = (
        (busiest(problem, splits), sum(splits)) for splits in all_splits(len(problem.tokens), problem.max_splits)
    )
    splits = problem.fewest_splits()
    assert (busiest(problem, splits), sum(splits)) == min(candidates)


@pytest.mark.parametrize("status", [None, cp_model.UNKNOWN])
def test_cp_sat_without_time_still_has_the_closed_form(status: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tangram_plan.solvers.split_cp_sat.DETERMINISTIC_SECONDS", 0.0)
    if status is not None:
        monkeypatch.setattr(cp_model.CpSolver, "solve", lambda *_: status)
    problem = SplitProblem((131072, 70000, 9000, 12, 12, 4000, 800, 0), 264, 0)
    assert busiest(problem, SPLIT_SOLVERS["cp_sat"]().solve(problem)) == makespan_by_hand(problem.tokens, 264)
