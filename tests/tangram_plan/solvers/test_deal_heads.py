"""Heads dealt to ranks: equal shares of every layer, and rows that no other deal makes smaller."""

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_plan.config import GroupingConfig
from tangram_plan.grouping import grouping_problem, order_heads, reorder_budgets
from tangram_plan.ir import RHO_ONE, BudgetTable, HeadOrder, ModelShape, TangramError, verify_head_order
from tangram_plan.solvers.deal_heads import deal_heads
from tests.solver_cases import (
    Scope,
    budget_tables,
    digest_elsewhere,
    digest_of_dealt_heads,
    make_budgets,
    make_shape,
)


def row_laws(shape: ModelShape, budgets: BudgetTable, order: HeadOrder, ranks: int, scope: Scope) -> list[int]:
    """rho of the rows that clustering gets when heads stand in this order."""
    config = GroupingConfig(scope=scope)
    placed = reorder_budgets(budgets, order)
    problem = grouping_problem(shape, placed, config, (1000,), tensor_parallel=ranks, seed=0)
    return [row.rho for row in problem.sorted_rows]


def block_maxima(rho: Sequence[int], ranks: int) -> list[int]:
    return sorted(rho, reverse=True)[::ranks]


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, ModelShape, BudgetTable]:
    """Ranks, and up to six layers, some with more KV heads than others, that they divide."""
    ranks = draw(st.sampled_from([2, 3, 4, 8]))
    heads = [ranks * draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 6)))]
    layers = tuple(layer for n in heads for layer in make_shape(1, n).layers)
    shape = ModelShape("hand", layers, 64)
    values = st.one_of(st.integers(0, RHO_ONE), st.integers(0, 3))
    return ranks, shape, make_budgets(shape, draw(st.lists(values, min_size=sum(heads), max_size=sum(heads))))


@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@given(tables())
def test_every_rank_owns_as_many_heads_of_every_layer_and_one_of_every_block(
    table: tuple[int, ModelShape, BudgetTable],
) -> None:
    ranks, shape, budgets = table
    order = deal_heads(budgets, ranks)
    assert set(order.layers) == set(shape.planned_layers)
    verify_head_order(order, shape)  # a permutation of every layer: equal shares, as ranks divide it evenly
    assert row_laws(shape, budgets, order, ranks, "model") == block_maxima(list(budgets.rho.values()), ranks)


def all_deals(num_layers: int, num_kv_heads: int, ranks: int) -> Iterator[HeadOrder]:
    """Every way to give each rank equally many heads of each layer."""
    share = num_kv_heads // ranks
    of_a_layer = [
        heads
        for heads in itertools.permutations(range(num_kv_heads))
        if all(heads[i] < heads[i + 1] for i in range(num_kv_heads - 1) if (i + 1) % share)
    ]
    for layers in itertools.product(of_a_layer, repeat=num_layers):
        yield HeadOrder(dict(enumerate(layers)))


@pytest.mark.parametrize(
    ("num_layers", "num_kv_heads", "ranks"), [(1, 6, 2), (2, 4, 2), (2, 3, 3), (4, 2, 2), (1, 6, 3)]
)
@pytest.mark.parametrize("table", budget_tables(2))
def test_no_other_deal_makes_any_row_smaller(table: str, num_layers: int, num_kv_heads: int, ranks: int) -> None:
    shape = make_shape(num_layers, num_kv_heads)
    budgets = make_budgets(shape, budget_tables(num_layers * num_kv_heads)[table])
    best = row_laws(shape, budgets, deal_heads(budgets, ranks), ranks, "model")
    for order in all_deals(num_layers, num_kv_heads, ranks):
        others = row_laws(shape, budgets, order, ranks, "model")
        assert all(mine <= other for mine, other in zip(best, others, strict=True))


def test_rows_of_every_layer_are_best_too() -> None:
    # Layer 0 keeps 4, 3, 5, 2, so its best rows are (5, 4) and (3, 2); layer 1 keeps 1, 2, 5, 0: (5, 2) and (1, 0).
    shape, budgets = make_shape(2, 4), make_budgets(make_shape(2, 4), [4, 3, 5, 2, 1, 2, 5, 0])
    assert row_laws(shape, budgets, deal_heads(budgets, 2), 2, "layer") == [5, 3, 5, 1]


def test_heads_of_one_layer_are_dealt_by_budget() -> None:
    # 60000 and 50000 share a row, and 200 and 100, although the checkpoint has both large heads on rank 0.
    budgets = make_budgets(make_shape(1, 4), [60000, 50000, 200, 100])
    first, second = set(deal_heads(budgets, 2).layers[0][:2]), set(deal_heads(budgets, 2).layers[0][2:])
    assert {frozenset(first), frozenset(second)} in (
        {frozenset({0, 2}), frozenset({1, 3})},
        {frozenset({0, 3}), frozenset({1, 2})},
    )


@pytest.mark.parametrize("hash_seed", [1, 2])
def test_deal_does_not_depend_on_the_hash_seed(hash_seed: int) -> None:
    assert digest_elsewhere("digest_of_dealt_heads", hash_seed) == digest_of_dealt_heads()


def test_a_long_chain_of_blocks_is_dealt() -> None:
    num_layers, num_kv_heads = 80, 64  # every chunk of two heads reaches into two blocks of two
    rho = list(range(num_layers * num_kv_heads, 0, -1))
    shape = make_shape(num_layers, num_kv_heads)
    budgets = make_budgets(shape, rho[1:] + rho[:1])
    assert row_laws(shape, budgets, deal_heads(budgets, 2), 2, "model") == rho[::2]


def test_one_rank_keeps_the_order_of_the_checkpoint() -> None:
    shape = make_shape(1, 3)
    assert order_heads(shape, make_budgets(shape, [1, 2, 3]), 1, reorder=True).layers == {}


def test_order_of_the_checkpoint_stays_unless_asked_for() -> None:
    shape = make_shape(1, 4)
    assert order_heads(shape, make_budgets(shape, [4, 3, 2, 1]), 2, reorder=False).layers == {}


@pytest.mark.parametrize("reorder", [False, True])
def test_heads_that_do_not_divide_over_ranks_are_refused(reorder: bool) -> None:
    shape = make_shape(2, 6)
    with pytest.raises(TangramError, match=r"6 KV heads over 4 ranks, expected tensor_parallel: 1 or 2 or 3 or 6"):
        order_heads(shape, make_budgets(shape, [0] * 12), 4, reorder=reorder)


def test_reordered_budgets_follow_their_heads() -> None:
    budgets = make_budgets(make_shape(2, 3), [10, 11, 12, 20, 21, 22])
    placed = reorder_budgets(budgets, HeadOrder({1: (2, 0, 1)}))
    assert list(placed.rho.values()) == [10, 11, 12, 22, 20, 21]
    assert (placed.sink_tokens, placed.window_tokens) == (4, 8)
