"""`cp_sat` against all groupings there are."""

import pytest
from hypothesis import given, settings

from tangram_plan.ir import RHO_ONE
from tangram_plan.solvers.group_cp_sat import CpSatGrouping
from tests.solver_cases import GroupingCase, Scope, check_optimal, make_case
from tests.solver_strategies import small_cases


@settings(deadline=None, max_examples=300, derandomize=True, database=None)
@given(small_cases())
def test_no_grouping_of_all_costs_less(case: GroupingCase) -> None:
    check_optimal(CpSatGrouping(), case)


@pytest.mark.parametrize("scope", ["model", "layer"])
@pytest.mark.parametrize("page_slots", ["auto", 32, 80, 112])
@pytest.mark.parametrize("max_groups", [1, 2, 3, 7])
def test_seven_heads_are_grouped_optimally(page_slots: int, max_groups: int, scope: Scope) -> None:
    rho = [3000, RHO_ONE, 0, 12000, 13000, 30000, 500]
    check_optimal(
        CpSatGrouping(),
        make_case(1, 7, rho, page_slots=page_slots, max_groups=max_groups, scope=scope, contexts=(64, 700)),
    )
