import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_plan.cost_model import estimate, queue_makespan, static_makespan
from tangram_plan.ir import Schedule
from tests.devices import make_device

STATIC, QUEUE = Schedule.STATIC_SPLITS, Schedule.TILE_QUEUE
lengths = st.lists(st.integers(0, 3000), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("tokens", "splits", "batch", "num_ctas", "makespan"),
    [
        ([100, 40], [2, 1], 1, 4, 50),  # one wave: 50 50 40
        ([101, 40], [2, 1], 1, 4, 51),  # the longer half of 101
        ([100, 40], [2, 1], 1, 3, 50),  # as many splits as CTAs
        ([100, 40], [2, 1], 1, 2, 90),  # 50 50, then 40 on the first
        ([100, 40], [2, 1], 2, 2, 140),  # 50 50 40 | 50 50 40: 50+40+50 and 50+50+40
        ([100, 40], [2, 1], 2, 1, 280),  # everything in one CTA
        ([40, 100], [1, 2], 2, 4, 90),  # 40 50 50 40, then 50 on each of those with 40
        ([10, 10, 10, 90], [1, 1, 1, 1], 1, 3, 100),  # in order: the longest comes last, on top of 10
        ([0, 0], [1, 1], 1, 4, 0),
        ([0, 7], [1, 1], 3, 4, 7),  # 0 7 0 7, then 0 and 7 on one with 0
    ],
)
def test_static_makespan_worked_by_hand(
    tokens: list[int], splits: list[int], batch: int, num_ctas: int, makespan: int
) -> None:
    assert static_makespan(tokens * batch, splits * batch, num_ctas) == makespan


@pytest.mark.parametrize(
    ("tokens", "batch", "makespan"),
    [
        ([100, 40], 1, 48),  # 7 + 3 tiles over 4 CTAs: three of 16
        ([100, 40], 2, 80),  # 20 tiles over 4 CTAs
        ([64], 1, 16),  # as many tiles as CTAs
        ([65], 1, 32),  # one tile more than CTAs
        ([16, 1], 1, 16),  # fewer tiles than CTAs
        ([1], 1, 16),
        ([0, 17], 1, 16),
        ([0, 0], 5, 0),
    ],
)
def test_queue_makespan_worked_by_hand(tokens: list[int], batch: int, makespan: int) -> None:
    assert queue_makespan(tokens * batch, make_device()) == makespan


def test_beginning_a_pair_costs_tiles() -> None:
    # 3 + 7 and 3 + 3 tiles over 4 CTAs: four of 16
    assert queue_makespan([100, 40], make_device(segment_tiles=3)) == 64


def test_estimate_of_one_layer_worked_by_hand() -> None:
    # 140 tokens of 1000 bytes: 70 us for the device; the busiest CTA reads 50 (static) or 48 (queue) tokens.
    estimates = estimate([([100, 40], [2, 1])], 1000, make_device())
    assert estimates[STATIC].predicted_us == 10 + 70
    assert estimates[QUEUE].predicted_us == 12 + 70
    assert estimates[STATIC].makespan_over_ideal == round(50 / (140 / 4), 4)
    assert estimates[QUEUE].makespan_over_ideal == round(48 / (10 * 16 / 4), 4)


def test_busiest_cta_decides_when_it_takes_longer_than_all_bytes() -> None:
    estimates = estimate([([100, 40], [1, 1])], 1000, make_device())
    assert estimates[STATIC].predicted_us == 10 + 100
    assert estimates[QUEUE].predicted_us == 12 + 70


def test_layers_add_up_and_the_worst_balance_is_told() -> None:
    layers = [([100, 40], [1, 1]), ([32, 32], [2, 2])]
    # Second layer: 64 tokens, 32 us; static 4 * 16 tokens, queue 4 tiles, both in perfect balance.
    estimates = estimate(layers, 1000, make_device())
    assert estimates[STATIC].predicted_us == (10 + 100) + (10 + 32)
    assert estimates[QUEUE].predicted_us == (12 + 70) + (12 + 32)
    assert estimates[STATIC].makespan_over_ideal == round(100 / 35, 4)
    assert estimate(layers[1:], 1000, make_device())[STATIC].makespan_over_ideal == 1


@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@given(lengths, st.data())
def test_makespans_lie_between_an_equal_share_and_everything(tokens: list[int], data: st.DataObject) -> None:
    splits = [data.draw(st.integers(1, 5)) for _ in tokens]
    batch, device = data.draw(st.integers(1, 5)), make_device()
    static = static_makespan(tokens * batch, splits * batch, device.num_ctas)
    queue = queue_makespan(tokens * batch, device)
    total = batch * sum(tokens)
    assert static * device.num_ctas >= total
    assert queue * device.num_ctas >= total
    rounding = batch * sum(splits)  # a split is longer than its share by less than a token
    longest = max(-(-length // count) for length, count in zip(tokens, splits, strict=True))
    assert static <= (total + rounding) / device.num_ctas + longest  # Graham's bound for list scheduling
    assert queue <= total / device.num_ctas + device.tile_tokens * (1 + batch * len(tokens))


@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@given(lengths, st.data())
def test_makespans_grow_with_lengths_and_batch(tokens: list[int], data: st.DataObject) -> None:
    splits = [data.draw(st.integers(1, 5)) for _ in tokens]
    longer = [length + data.draw(st.integers(0, 100)) for length in tokens]
    batch, device = data.draw(st.integers(1, 5)), make_device()
    assert static_makespan(tokens * batch, splits * batch, 4) <= static_makespan(longer * batch, splits * batch, 4)
    assert static_makespan(tokens * batch, splits * batch, 4) <= static_makespan(
        tokens * (batch + 1), splits * (batch + 1), 4
    )
    assert queue_makespan(tokens * batch, device) <= queue_makespan(longer * batch, device)
    assert queue_makespan(tokens * batch, device) <= queue_makespan(tokens * (batch + 1), device)
