"""`graph` against all groupings there are: this also tests that sorted rows and dominant sizes suffice."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_plan.ir import RHO_ONE, TangramError
from tangram_plan.solvers.group_graph import ShortestPath
from tangram_plan.solvers.grouping_problem import dominant_sizes
from tests.solver_cases import GroupingCase, Scope, check_optimal, make_case
from tests.solver_strategies import small_cases


@settings(deadline=None, max_examples=300, derandomize=True, database=None)
@given(small_cases())
def test_no_grouping_of_all_costs_less(case: GroupingCase) -> None:
    check_optimal(ShortestPath(), case)


@pytest.mark.parametrize("scope", ["model", "layer"])
@pytest.mark.parametrize("page_slots", range(16, 129, 16))
@pytest.mark.parametrize("max_groups", [1, 2, 3, 7])
def test_seven_heads_are_grouped_optimally_for_every_size_of_page(
    page_slots: int, max_groups: int, scope: Scope
) -> None:
    rho = [3000, RHO_ONE, 0, 12000, 13000, 30000, 500]
    check_optimal(
        ShortestPath(),
        make_case(1, 7, rho, page_slots=page_slots, max_groups=max_groups, scope=scope, contexts=(64, 700)),
    )


@pytest.mark.parametrize("scope", ["model", "layer"])
@pytest.mark.parametrize("max_groups", [2, 3, 4])
def test_two_ranks_share_the_best_of_all_columns(max_groups: int, scope: Scope) -> None:
    rho = [3000, 60000, 100, 12000, 13000, 30000, 500, 0]
    check_optimal(ShortestPath(), make_case(2, 4, rho, ranks=2, max_groups=max_groups, scope=scope, contexts=(64, 700)))


def test_large_heads_are_parted_from_small_ones() -> None:
    problem, _ = make_case(1, 4, [100, 60000, 100, 60000], max_groups=2, page_slots=32, contexts=(5000,))
    groups = ShortestPath().solve(problem).groups
    assert [[row.kv_heads[0].head for row in rows] for rows in groups] == [[1, 3], [0, 2]]


def test_limit_on_groups_of_a_layer_is_refused() -> None:
    problem, _ = make_case(2, 2, [0] * 4)
    with pytest.raises(TangramError, match="expected cp_sat"):
        ShortestPath().solve(replace(problem, max_groups_per_layer=1))


@pytest.mark.parametrize(
    ("slots", "sizes"), [(16, (1,)), (48, (1, 3)), (112, (1, 2, 3, 7)), (128, (1, 2, 4, 8)), (160, (1, 2, 3, 5, 10))]
)
def test_dominant_sizes_are_the_largest_for_their_tokens_per_page(slots: int, sizes: tuple[int, ...]) -> None:
    assert dominant_sizes(slots) == sizes


@given(st.integers(1, 64))
def test_every_size_has_a_dominant_one_with_as_many_tokens_per_page(units: int) -> None:
    sizes = dominant_sizes(16 * units)
    for size in range(1, units + 1):
        dominant = next(other for other in sizes if other >= size)
        assert units // dominant == units // size
