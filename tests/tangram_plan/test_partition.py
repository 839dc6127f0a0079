from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import pytest

from tangram_plan.config import PartitionConfig
from tangram_plan.device import Device
from tangram_plan.ir import (
    RHO_ONE,
    CtaPartition,
    HeadGroup,
    HeadGrouping,
    KVDtype,
    KVHead,
    ModelShape,
    PageLayout,
    Schedule,
    ScheduleChoice,
    verify_partition,
)
from tangram_plan.partition import partition_work
from tangram_plan.solvers import SPLIT_SOLVERS
from tests.devices import make_device
from tests.solver_cases import make_budgets, make_shape

STATIC, QUEUE = Schedule.STATIC_SPLITS, Schedule.TILE_QUEUE
Solver = Literal["even", "proportional", "greedy", "cp_sat"]
SOLVERS: tuple[Solver, ...] = ("even", "proportional", "greedy", "cp_sat")


class Case(NamedTuple):
    partition: CtaPartition
    shape: ModelShape


def partition(
    rho: Sequence[int],
    *,
    num_layers: int = 1,
    num_kv_heads: int = 2,
    ranks: int = 1,
    solver: Solver = "cp_sat",
    batch_sizes: tuple[int, ...] = (1,),
    contexts: tuple[int, ...] = (100,),
    sink: int = 0,
    window: int = 0,
    group_rho: Sequence[int] | None = None,
    device: Device | None = None,
) -> Case:
    """Every KV head in a group of its own; a token has 1000 bytes (head_dim 250, bfloat16)."""
    shape = make_shape(num_layers, num_kv_heads)
    groups = [HeadGroup(r, ((head,),)) for r, head in zip(group_rho or rho, shape.kv_heads(), strict=True)]
    made = partition_work(
        shape,
        make_budgets(shape, rho, sink=sink, window=window),
        HeadGrouping(tuple(groups), 64),
        PageLayout(64, 250, KVDtype.BFLOAT16),
        device or make_device(),
        PartitionConfig(solver=solver, batch_sizes=batch_sizes, contexts=contexts),
        tensor_parallel=ranks,
        seed=0,
    )
    return Case(made, shape)


def predicted(choice: ScheduleChoice) -> dict[Schedule, float]:
    return {schedule: found.predicted_us for schedule, found in choice.estimates.items()}


def test_every_solver_is_a_choice_of_the_configuration() -> None:
    assert set(SOLVERS) == set(SPLIT_SOLVERS)


def test_partition_of_one_layer_worked_by_hand() -> None:
    # 100 and 40 tokens on 4 CTAs: 3 + 1 splits read at most 40 each; 2 + 1 would read 50, 1 + 3 and 2 + 2 no less.
    made, _ = partition([RHO_ONE, 26214])
    assert made.static_splits[0].splits == {KVHead(0, 0): 3, KVHead(0, 1): 1}
    (choice,) = made.choices
    # 140 us of one CTA's reading are 70 of the device's; no CTA takes longer (40 and 48 tokens).
    assert predicted(choice) == {STATIC: 10 + 70, QUEUE: 12 + 70}
    assert choice.schedule is STATIC
    assert (made.device, made.num_ctas, made.tile_tokens) == ("hand", 4, 16)


def test_static_splits_run_in_waves_when_the_batch_exceeds_the_ctas() -> None:
    # 3 requests on 4 CTAs: 1 split each, 100 40 100 40, then 100 and 40 on the CTAs with 40: 140 on the busiest.
    # All 420 tokens take the device 210 us, which is longer.
    made, _ = partition([RHO_ONE, 26214], batch_sizes=(3,))
    assert set(made.static_splits[0].splits.values()) == {1}
    (choice,) = made.choices
    assert choice.estimates[STATIC].makespan_over_ideal == round(140 / (420 / 4), 4)
    assert choice.estimates[STATIC].predicted_us == 10 + 210


def test_heads_read_the_law_of_their_group() -> None:
    # Both heads are in groups that keep everything, whatever their own budgets are.
    made, _ = partition([0, 100], group_rho=[RHO_ONE, RHO_ONE])
    assert predicted(made.choices[0]) == {STATIC: 10 + 100, QUEUE: 12 + 100}


def test_layers_add_up() -> None:
    one, _ = partition([RHO_ONE, 26214])
    two, _ = partition([RHO_ONE, 26214] * 2, num_layers=2)
    for schedule in Schedule:
        assert predicted(two.choices[0])[schedule] == 2 * predicted(one.choices[0])[schedule]


@pytest.mark.parametrize("large_rank", [0, 1])
def test_slowest_rank_counts(large_rank: int) -> None:
    rho = [26214, RHO_ONE] if large_rank else [RHO_ONE, 26214]
    made, shape = partition(rho, ranks=2)
    verify_partition(made, shape, 2)
    # Each rank has 4 CTAs for its only head: 100 tokens are 50 us for a device, 40 tokens 20.
    assert predicted(made.choices[0]) == {STATIC: 10 + 50, QUEUE: 12 + 50}
    assert made.static_splits[0].splits == {KVHead(0, 0): 4, KVHead(0, 1): 4}


def test_slowest_rank_is_found_for_every_schedule_and_over_all_layers() -> None:
    # Rank 0 reads 100 + 40 tokens in two layers, rank 1 reads 60 + 90, the faster one in layer 0.
    rho = [RHO_ONE, 39321, 26214, 58982]
    made, _ = partition(rho, num_layers=2, ranks=2)
    assert predicted(made.choices[0]) == {STATIC: 20 + 75, QUEUE: 24 + 75}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_partition_is_valid_and_takes_the_fastest_schedule(solver: Solver, ranks: int) -> None:
    rho = [RHO_ONE, 0, 100, 30000, 2000, 2000, 60000, 7]
    made, shape = partition(
        rho,
        num_layers=2,
        num_kv_heads=4,
        ranks=ranks,
        solver=solver,
        batch_sizes=(1, 2, 3, 64),
        contexts=(1, 64, 5000),
        device=make_device(num_sms=7),
    )
    verify_partition(made, shape, ranks)
    assert [(c.batch, c.context) for c in made.choices] == [(b, n) for b in (1, 2, 3, 64) for n in (1, 64, 5000)]
    for choice in made.choices:
        assert predicted(choice)[choice.schedule] == min(predicted(choice).values())


def test_both_schedules_are_taken_where_each_is_faster() -> None:
    # The queue costs 2 us more a layer, and balances what one split each cannot: 1000 and 10 tokens on two CTAs.
    made, _ = partition([RHO_ONE, 655], contexts=(2, 1000), device=make_device(ctas_per_sm=1, read_bandwidth_gb_s=2.0))
    assert [choice.schedule for choice in made.choices] == [STATIC, QUEUE]


@pytest.mark.parametrize("solver", ["even", "greedy", "cp_sat"])
def test_time_grows_with_the_batch(solver: Solver) -> None:
    made, _ = partition(
        [RHO_ONE, 9000, 0, 40000],
        num_kv_heads=4,
        solver=solver,
        batch_sizes=tuple(range(1, 20)),
        contexts=(3000,),
        device=make_device(num_sms=20),
    )
    for smaller, larger in pairwise(made.choices):
        for schedule in Schedule:
            assert predicted(smaller)[schedule] <= predicted(larger)[schedule]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_time_grows_with_the_context(solver: Solver, batch: int) -> None:
    made, _ = partition(
        [RHO_ONE, 9000, 0, 40000],
        num_kv_heads=4,
        solver=solver,
        batch_sizes=(batch,),
        contexts=(1, 10, 100, 500, 501, 1000, 4000),
        device=make_device(num_sms=8),
    )
    for shorter, longer in pairwise(made.choices):
        for schedule in Schedule:
            assert predicted(shorter)[schedule] <= predicted(longer)[schedule]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("context", [1, 131072])
def test_heads_that_keep_nothing_read_their_one_token(solver: Solver, context: int) -> None:
    made, shape = partition([0, 0], solver=solver, batch_sizes=(1, 8), contexts=(context,))
    verify_partition(made, shape, 1)
    for choice in made.choices:
        # One token each: batch * 2 tokens at half a microsecond, or a tile of 16 in every CTA that has one.
        assert choice.estimates[STATIC].predicted_us == 10 + max(choice.batch, -(-choice.batch * 2 // 4))
        assert choice.estimates[QUEUE].predicted_us == 12 + 16 * -(-choice.batch * 2 // 4)
