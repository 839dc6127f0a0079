from tangram_plan.bench.tune import Tuning, descend, tuned
from tests.plans import valid_plan

START = Tuning(ctas_per_sm=2, tile_tokens=16, segment_tiles=0, step_tokens=64, num_warps=4, num_stages=3)
CHOICES = {"ctas_per_sm": (1, 2, 3), "step_tokens": (32, 64), "num_stages": (2, 3, 4)}


def test_descent_finds_the_best_of_independent_choices_and_tries_nothing_twice() -> None:
    tried = []

    def cost(tuning: Tuning) -> float:
        tried.append(tuning)
        return abs(tuning.ctas_per_sm - 3) + tuning.step_tokens / 32 + (0 if tuning.num_stages == 4 else float("inf"))

    best = descend(START, CHOICES, cost)
    assert (best.ctas_per_sm, best.step_tokens, best.num_stages) == (3, 32, 4)
    assert (best.tile_tokens, best.segment_tiles, best.num_warps) == (16, 0, 4)
    assert len(tried) == len(set(tried))


def test_a_start_that_nothing_beats_is_kept() -> None:
    assert descend(START, CHOICES, lambda tuning: 0.0 if tuning == START else 1.0) == START


def test_a_tuned_plan_differs_in_its_partition_alone() -> None:
    plan = valid_plan()
    changed = tuned(plan, START, num_sms=100)
    assert changed.partition.num_ctas == 200
    assert (changed.partition.step_tokens, changed.partition.num_stages) == (64, 3)
    assert changed.partition.static_splits == plan.partition.static_splits
    assert (changed.grouping, changed.layout) == (plan.grouping, plan.layout)
