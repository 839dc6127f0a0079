from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tangram_plan.ir import (
    KEEP_EVERYTHING,
    RHO_ONE,
    HeadGroup,
    HeadOrder,
    KVHead,
    LayerKind,
    LayerShape,
    Plan,
    Schedule,
    StaticSplits,
    VerifyError,
    verify_partition,
    verify_plan,
    verify_saves_memory,
)
from tests.small_plans import GROUPS, RHO, SHAPE, hand_plan

Break = Callable[[Plan], Plan]


def with_layers(*layers: LayerShape) -> Break:
    return lambda plan: replace(plan, model=replace(plan.model, layers=layers))


def with_layer(index: int, layer: LayerShape) -> Break:
    return with_layers(*SHAPE.layers[:index], layer, *SHAPE.layers[index + 1 :])


def with_order(layers: Mapping[int, tuple[int, ...]]) -> Break:
    return lambda plan: replace(plan, head_order=HeadOrder(layers))


def with_budgets(**changes: Any) -> Break:
    return lambda plan: replace(plan, budgets=replace(plan.budgets, **changes))


def with_groups(*groups: HeadGroup) -> Break:
    return lambda plan: replace(plan, grouping=replace(plan.grouping, groups=groups))


def with_page(**changes: Any) -> Break:
    return lambda plan: replace(plan, layout=replace(plan.layout, **changes))


def with_page_slots(page_slots: int) -> Break:
    return lambda plan: replace(
        plan,
        grouping=replace(plan.grouping, page_slots=page_slots),
        layout=replace(plan.layout, page_slots=page_slots),
    )


def with_partition(**changes: Any) -> Break:
    return lambda plan: replace(plan, partition=replace(plan.partition, **changes))


def with_splits(batch: int, *splits: int) -> Break:
    """Other splits of the four KV heads for one batch size."""

    def broken(plan: Plan) -> Plan:
        changed = StaticSplits(batch, dict(zip(RHO, splits, strict=False)))
        kept = (static for static in plan.partition.static_splits if static.batch != batch)
        by_batch = sorted((changed, *kept), key=lambda static: static.batch)
        return replace(plan, partition=replace(plan.partition, static_splits=tuple(by_batch)))

    return broken


LONE, PAIR, LAST = GROUPS[1]
CHOICES = hand_plan().partition.choices
SPLITS = hand_plan().partition.static_splits

BROKEN: dict[str, tuple[Break, tuple[str, ...]]] = {
    # the model
    "no planned layer": (with_layers(SHAPE.layers[1]), ("no layer keeps a full KV cache", "hand")),
    "head_dim 0": (lambda plan: replace(plan, model=replace(plan.model, head_dim=0)), ("head_dim", "got 0")),
    "broken GQA group": (with_layer(2, LayerShape(LayerKind.FULL, 2, 5, 2)), ("layer 2", "5 over 2")),
    "a shared layer behind itself": (with_layer(3, LayerShape(LayerKind.SHARED, 0, 4, 3)), ("layer 3", "owner 3")),
    "a shared layer of no model": (with_layer(3, LayerShape(LayerKind.SHARED, 0, 4, 9)), ("layer 3", "owner 9")),
    "a shared layer before the first": (with_layer(3, LayerShape(LayerKind.SHARED, 0, 4, -4)), ("layer 3", "owner -4")),
    "a shared layer of a shared layer": (
        with_layers(*SHAPE.layers, LayerShape(LayerKind.SHARED, 0, 4, 3)),
        ("layer 4", "owner 3"),
    ),
    "a full layer with another owner": (with_layer(2, LayerShape(LayerKind.FULL, 2, 4, 0)), ("layer 2", "owner 0")),
    # the head order
    "a head named twice": (with_order({2: (1, 1)}), ("layer 2", "[1, 1]")),
    "a head left out": (with_order({2: (0,)}), ("layer 2", "[0]")),
    "an order for a layer without a plan": (with_order({1: (1, 0)}), ("layer 1", "[1, 0]")),
    # budgets
    "a KV head without budget": (
        with_budgets(rho={head: rho for head, rho in RHO.items() if head != KVHead(2, 0)}),
        ("KV head (layer 2, head 0) lacks a budget", "got 3 KV heads", "expected 4"),
    ),
    "a budget for a sliding layer": (
        with_budgets(rho=RHO | {KVHead(1, 0): 1}),
        ("KV head (layer 1, head 0) should not have a budget",),
    ),
    "rho above one": (with_budgets(rho=RHO | {KVHead(0, 1): RHO_ONE + 1}), ("(layer 0, head 1)", "got 65537")),
    "rho below zero": (with_budgets(rho=RHO | {KVHead(0, 1): -1}), ("(layer 0, head 1)", "got -1", "0 to 65536")),
    "negative sink": (with_budgets(sink_tokens=-1), ("budgets", "got -1 and 8")),
    "negative window": (with_budgets(window_tokens=-8), ("budgets", "got 4 and -8")),
    # groups
    "a KV head in no group": (with_groups(LONE, PAIR), ("KV head (layer 2, head 0) lacks a group",)),
    "a KV head in two groups": (
        with_groups(LONE, PAIR, LAST, HeadGroup(RHO_ONE, ((KVHead(0, 1),),))),
        ("group 3: KV head (layer 0, head 1) also in group 1", "exactly one group"),
    ),
    "a KV head twice in a group": (
        with_groups(HeadGroup(RHO_ONE, ((KVHead(0, 0), KVHead(0, 0)),)), PAIR, LAST),
        ("group 0: KV head (layer 0, head 0) also in group 0",),
    ),
    "a KV head of another layer": (
        with_groups(LONE, PAIR, LAST, HeadGroup(RHO_ONE, ((KVHead(1, 0),),))),
        ("group 3", "KV head (layer 1, head 0) has no budget"),
    ),
    "a law below a member's": (
        with_groups(LONE, replace(PAIR, rho=16383), LAST),
        ("group 1", "law is below that of KV head (layer 0, head 1)", "got 16383", "at least 16384"),
    ),
    "a group without members": (with_groups(LONE, PAIR, LAST, HeadGroup(0, ((),))), ("group 3", "got 0 members")),
    "members that do not fit": (with_page_slots(16), ("group 1", "got 2 members, 16 slots")),
    "ranks that are not there": (lambda plan: replace(plan, tensor_parallel=2), ("group 0", "2 equal counts")),
    # the page
    "a page of other slots": (with_page(page_slots=64), ("page layout", "got 64 slots", "expected 32 slots")),
    "a page of another width": (with_page(head_dim=16), ("page layout", "head_dim 16", "head_dim 8")),
    "a page that ends inside a vector": (with_page_slots(33), ("page layout", "page_slots is not aligned", "got 33")),
    # the partition
    "no batch size": (with_partition(static_splits=(), choices=()), ("partition", "batch sizes", "got []")),
    "batch size 0": (with_splits(0, 1, 1, 1, 1), ("partition", "got [0, 1, 4]")),
    "batch sizes that fall": (with_partition(static_splits=SPLITS[::-1]), ("partition", "got [4, 1]")),
    "a batch size twice": (with_partition(static_splits=(SPLITS[0], *SPLITS)), ("partition", "got [1, 1, 4]")),
    "a KV head without split": (with_splits(1, 3, 2, 1), ("KV head (layer 2, head 1) lacks a split",)),
    "a split of 0": (with_splits(4, 1, 1, 1, 0), ("static splits for batch 4", "at least 1")),
    "more splits than CTAs": (with_splits(1, 6, 3, 1, 1), ("batch 1", "layer 0", "got 9", "at most 8")),
    "more splits than CTAs a request": (with_splits(4, 1, 1, 2, 1), ("batch 4", "layer 2", "got 3", "at most 2")),
    "a batch size without choice": (with_partition(choices=CHOICES[:1]), ("schedule choices", "got [(1, 2048)]")),
    "a choice without batch size": (with_partition(static_splits=SPLITS[:1]), ("schedule choices", "(4, 2048)")),
    "a case chosen twice": (with_partition(choices=(CHOICES[0], *CHOICES)), ("schedule choices", "(1, 2048), (1, ")),
    "choices out of order": (with_partition(choices=CHOICES[::-1]), ("schedule choices", "[(4, 2048), (1, 2048)]")),
    "a choice that was not estimated": (
        with_partition(choices=(CHOICES[0], replace(CHOICES[1], schedule=Schedule.TILE_QUEUE, estimates={}))),
        ("batch 4, context 2048", "got tile_queue"),
    ),
}


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_plan_made_by_hand_is_valid(tensor_parallel: int) -> None:
    verify_plan(hand_plan(tensor_parallel))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plan_is_refused_by_name_of_the_place(name: str) -> None:
    break_it, parts = BROKEN[name]
    with pytest.raises(VerifyError) as error:
        verify_plan(break_it(hand_plan()))
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_full_and_sliding_layers_may_have_other_head_counts() -> None:
    verify_plan(with_layer(1, LayerShape(LayerKind.SLIDING, 1, 7, 1))(hand_plan()))


# --- tensor parallelism: head 0 of every layer lives on rank 0, head 1 on rank 1


@pytest.mark.parametrize(
    ("groups", "parts"),
    [
        (
            (
                HeadGroup(32768, ((KVHead(0, 0),), (KVHead(2, 0),))),
                HeadGroup(16384, ((KVHead(2, 1),), (KVHead(0, 1),))),
            ),
            ("group 0", "KV head (layer 2, head 0) is on the wrong rank", "got 1", "expected 0"),
        ),
        (
            (
                HeadGroup(32768, ((KVHead(0, 0), KVHead(2, 0)), (KVHead(2, 1),))),
                HeadGroup(16384, ((), (KVHead(0, 1),))),
            ),
            ("group 0", "ranks differ in columns", "got [2, 1]"),
        ),
        (
            (HeadGroup(32768, ((KVHead(0, 0), KVHead(2, 0)),)), HeadGroup(16384, ((KVHead(2, 1), KVHead(0, 1)),))),
            ("group 0", "ranks differ in columns", "expected 2 equal counts"),
        ),
    ],
    ids=["wrong rank", "uneven columns", "one rank"],
)
def test_groups_are_local_to_their_rank(groups: tuple[HeadGroup, ...], parts: tuple[str, ...]) -> None:
    with pytest.raises(VerifyError) as error:
        verify_plan(with_groups(*groups)(hand_plan(tensor_parallel=2)))
    for part in parts:
        assert part in str(error.value)


def test_ctas_are_counted_per_rank() -> None:
    partition = hand_plan().partition
    eight_each = StaticSplits(1, dict.fromkeys(RHO, 8))
    partition = replace(partition, static_splits=(eight_each,), choices=partition.choices[:1])
    verify_partition(partition, SHAPE, 2)
    with pytest.raises(VerifyError, match="got 16, expected at most 8"):
        verify_partition(partition, SHAPE, 1)


# --- case 22: a plan that evicts must save


def test_a_plan_that_evicts_but_saves_nothing_is_refused() -> None:
    # 65535 / 65536 of the tokens in slots of 40 bytes, where the full cache takes 32.
    plan = with_budgets(rho=dict.fromkeys(RHO, RHO_ONE - 1))(hand_plan())
    plan = with_groups(*(replace(group, rho=RHO_ONE - 1) for group in GROUPS[1]))(plan)
    with pytest.raises(VerifyError, match=r"saves no byte: got 1\.250 of the full cache at 131072 tokens"):
        verify_plan(plan)


def test_a_plan_that_keeps_everything_need_not_save_if_that_is_its_rule() -> None:
    kept = with_budgets(rho=dict.fromkeys(RHO, RHO_ONE))(hand_plan())
    plan = with_groups(*(replace(group, rho=RHO_ONE) for group in GROUPS[1]))(kept)
    verify_plan(replace(plan, provenance=replace(plan.provenance, rule=KEEP_EVERYTHING)))
    with pytest.raises(VerifyError, match="saves no byte"):
        verify_plan(plan)


def test_saving_at_one_reported_context_is_enough() -> None:
    # A window of 32768 tokens leaves nothing to evict up to there; at 131072, 0.27 + 0.73 * (1/2 ... 1/100) are kept.
    verify_saves_memory(with_budgets(window_tokens=32768)(hand_plan()))
    with pytest.raises(VerifyError, match="saves no byte"):
        verify_saves_memory(with_budgets(window_tokens=131072)(hand_plan()))


def test_groups_stand_by_falling_rho() -> None:
    plan = hand_plan()
    swapped = replace(plan, grouping=replace(plan.grouping, groups=plan.grouping.groups[::-1]))
    with pytest.raises(VerifyError, match="groups do not stand by falling rho"):
        verify_plan(swapped)


@pytest.mark.parametrize(
    ("field", "changes"),
    [("compress_chunk_tokens", {"compress_chunk_tokens": 0}), ("max_new_tokens", {"max_new_tokens": 0})],
)
def test_serving_limits_leave_room(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(VerifyError, match=field):
        verify_plan(replace(hand_plan(), **changes))
