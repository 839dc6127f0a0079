"""Bounds on paths of at most K arcs, against all paths."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from tangram_plan.solvers.group_cp_sat import _solve_paths
from tangram_plan.solvers.grouping_problem import Arc
from tangram_plan.solvers.path_bounds import PathBounds, bound_paths
from tests.solver_cases import make_case

Path = tuple[Arc, ...]


class Network(NamedTuple):
    arcs: list[Arc]
    num_rows: int
    max_arcs: int


def paths(arcs: Sequence[Arc], end: int, start: int = 0) -> Iterator[Path]:
    if start == end:
        yield ()
        return
    for arc in arcs:
        if arc.start == start:
            for rest in paths(arcs, end, arc.end):
                yield (arc, *rest)


def cost(path: Path) -> int:
    return sum(arc.cost for arc in path)


def bounds_of(network: Network) -> PathBounds:
    bounds = bound_paths(*network)
    assert bounds is not None, "there is a path of so few arcs"
    return bounds


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Arcs by rising start; a path of at most `max_arcs` exists."""
    num_rows = draw(st.integers(1, 6))
    costs = st.integers(0, draw(st.sampled_from([3, 40, 10**8])))
    pairs = [(start, end) for start in range(num_rows) for end in range(start + 1, num_rows + 1)]
    taken = [pair for pair in pairs if pair[1] == pair[0] + 1 or draw(st.booleans())]
    arcs = [Arc(start, end, draw(costs)) for start, end in taken]
    fewest = min(len(path) for path in paths(arcs, num_rows))
    return Network(arcs, num_rows, draw(st.integers(fewest, num_rows + 1)))


every_network = settings(deadline=None, max_examples=300, derandomize=True, database=None)


@every_network
@given(networks())
def test_optimum_lies_between_the_bound_and_the_path_that_was_met(network: Network) -> None:
    arcs, num_rows, max_arcs = network
    bounds = bounds_of(network)
    allowed = [path for path in paths(arcs, num_rows) if len(path) <= max_arcs]
    assert bounds.path in allowed
    assert bounds.path_cost == cost(bounds.path)
    assert bounds.lower <= min(map(cost, allowed)) <= bounds.path_cost


def test_few_arcs_may_cost_much_more_than_many() -> None:
    # One row at a time costs nothing, so the price of an arc must rise to 1000 until a single arc is the cheapest path.
    bounds = bounds_of(Network([Arc(0, 1, 0), Arc(0, 2, 1000), Arc(1, 2, 0)], 2, 1))
    assert bounds.path == (Arc(0, 2, 1000),)
    assert 999 <= bounds.lower <= 1000


@every_network
@given(networks())
def test_no_bounds_where_no_path_has_so_few_arcs(network: Network) -> None:
    arcs, num_rows, _ = network
    fewest = min(len(path) for path in paths(arcs, num_rows))
    if fewest > 1:
        assert bound_paths(arcs, num_rows, fewest - 1) is None


@every_network
@given(networks())
def test_no_path_through_an_arc_costs_less_than_its_bound(network: Network) -> None:
    arcs, num_rows, max_arcs = network
    through = bounds_of(network).through
    allowed = [path for path in paths(arcs, num_rows) if len(path) <= max_arcs]
    assert len(through) == len(arcs)
    for arc, bound in zip(arcs, through, strict=True):
        assert bound <= min((cost(path) for path in allowed if arc in path), default=bound)


@every_network
@given(networks())
def test_bounds_are_exact_where_the_number_of_arcs_does_not_bind(network: Network) -> None:
    arcs, num_rows, _ = network
    bounds = bounds_of(Network(arcs, num_rows, num_rows))
    every_path = list(paths(arcs, num_rows))
    assert bounds.lower == bounds.path_cost == min(map(cost, every_path))
    for arc, bound in zip(arcs, bounds.through, strict=True):
        assert bound == min(cost(path) for path in every_path if arc in path)


def test_bound_is_the_lagrangian_one() -> None:
    # One row at a time costs 3, one arc 10. With one arc allowed, a price of p gives min(3 + 3 * p, 10 + p) - p, which
    # is 9 at 3 and 10 from 4 on.
    arcs = [Arc(0, 1, 1), Arc(0, 3, 10), Arc(1, 2, 1), Arc(2, 3, 1)]
    bounds = bounds_of(Network(arcs, 3, 1))
    assert 9 <= bounds.lower <= 10
    assert bounds.path == (Arc(0, 3, 10),)


@pytest.mark.parametrize("arcs", [[], [Arc(0, 1, 5)], [Arc(0, 1, 5), Arc(2, 3, 5)], [Arc(1, 3, 0)]])
def test_no_bounds_where_no_path_reaches_the_end(arcs: list[Arc]) -> None:
    assert bound_paths(arcs, 3, 3) is None


def test_arcs_that_no_path_can_use_get_no_finite_bound() -> None:
    arcs = [Arc(0, 1, 1), Arc(0, 2, 1), Arc(2, 3, 1)]  # row 1 leads nowhere
    unused, *used = bounds_of(Network(arcs, 3, 3)).through
    assert unused > 10**18
    assert used == [2, 2]


@every_network
@given(networks())
@example(Network([Arc(0, 1, 5), Arc(0, 2, 9), Arc(1, 2, 5)], 2, 1))
def test_cp_sat_finds_the_cheapest_path_of_so_many_arcs(network: Network) -> None:
    arcs, num_rows, max_arcs = network
    problem, _ = make_case(1, num_rows, [0] * num_rows, max_groups=max_arcs)
    best = min(cost(path) for path in paths(arcs, num_rows) if len(path) <= max_arcs)
    found, _ = _solve_paths(problem, arcs, below=best + 1)
    assert cost(found) == best
    assert len(found) <= max_arcs
    assert _solve_paths(problem, arcs, below=best) == ((), best)


def test_bound_of_cp_sat_is_no_higher_than_the_optimum() -> None:
    pairs = [(0, 1, 2), (0, 3, 25), (1, 2, 34), (1, 3, 5), (2, 3, 1), (2, 5, 5), (3, 4, 9), (4, 5, 28)]
    problem, _ = make_case(1, 5, [0] * 5, max_groups=3)
    found, proven = _solve_paths(problem, [Arc(*pair) for pair in pairs], below=42)
    assert proven <= cost(found) == 41


def test_bound_of_cp_sat_without_time_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tangram_plan.solvers.group_cp_sat.DETERMINISTIC_SECONDS", 0.0)
    problem, _ = make_case(1, 3, [0] * 3)
    arcs = [Arc(start, end, 7) for start in range(3) for end in range(start + 1, 4)]
    found, proven = _solve_paths(problem, arcs, below=100)
    assert proven <= 7
    assert not found or cost(found) >= 7


def test_infinite_bound_of_cp_sat_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp_model.CpSolver, "solve", lambda *_: cp_model.UNKNOWN)
    monkeypatch.setattr(cp_model.CpSolver, "best_objective_bound", -math.inf)
    problem, _ = make_case(1, 1, [0])
    assert _solve_paths(problem, [Arc(0, 1, 7)], below=100) == ((), 0)
