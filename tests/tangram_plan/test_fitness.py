import numpy as np
import pytest

from tangram_plan.config import RetentionConfig
from tangram_plan.fitness import REFUSE_BELOW, WARN_BELOW, Fitness, check_fitness, measure_fitness
from tangram_plan.ir import TangramError
from tests.profiles_by_hand import make_profile

RANKED = [[0.1, 0.2, 0.3, 0.4], [0.0, 0.1, 0.15, 0.9], [0.3, 0.35, 0.36, 0.99]]
REVERSED = [[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]


def test_samples_that_rank_heads_alike_are_stable() -> None:
    fitness = measure_fitness(np.array(RANKED))
    assert fitness.rank_correlations.tolist() == pytest.approx([1, 1, 1])
    assert fitness.verdict == "stable"


def test_samples_in_reverse_order_are_unstable() -> None:
    fitness = measure_fitness(np.array(REVERSED))
    assert fitness.rank_correlations.tolist() == pytest.approx([-1, -1])
    assert fitness.verdict == "unstable"


def test_each_sample_is_ranked_against_the_mean_of_the_others() -> None:
    # The others' means are (0.25, 0.35, 0.6), (0.25, 0.2, 0.6) and (0.1, 0.35, 0.3): ranks 123, 213 and 132, against
    # the samples' 123, 132 and 213. Spearman: 1 - 6 * sum d^2 / (n * (n^2 - 1)) with sum d^2 = 0, 6 and 6, n = 3.
    samples = np.array([[0.1, 0.2, 0.3], [0.1, 0.5, 0.3], [0.4, 0.2, 0.9]])
    assert measure_fitness(samples).rank_correlations.tolist() == pytest.approx([1, -0.5, -0.5])


def test_random_samples_are_unstable() -> None:
    fitness = measure_fitness(np.random.default_rng(0).random((20, 64)))
    assert abs(fitness.median) < 0.3
    assert fitness.verdict == "unstable"


def test_single_sample_proves_nothing() -> None:
    fitness = measure_fitness(np.array([[0.1, 0.5, 0.9]]))
    assert fitness.rank_correlations.tolist() == [0]
    assert fitness.verdict == "unstable"


@pytest.mark.parametrize(
    "retained",
    [
        [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]],
        [[0.25, 0.5, 0.75], [0.5, 0.5, 0.5]],
        [[0.0, 0.0], [1.0, 1.0], [0.5, 0.5]],
        [[0.3], [0.4]],
    ],
)
def test_heads_that_are_all_alike_count_as_unstable(retained: list[list[float]]) -> None:
    fitness = measure_fitness(np.array(retained))
    assert fitness.rank_correlations.tolist() == [0] * len(retained)
    assert fitness.verdict == "unstable"


def test_heads_that_are_alike_in_all_other_samples_count_as_unstable() -> None:
    fitness = measure_fitness(np.array([[0.1, 0.2, 0.3, 0.4], [0.7, 0.7, 0.7, 0.7]]))
    assert fitness.rank_correlations.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("correlations", "verdict"),
    [
        ([REFUSE_BELOW - 1e-9], "unstable"),
        ([REFUSE_BELOW], "weak"),
        ([WARN_BELOW - 1e-9], "weak"),
        ([WARN_BELOW], "stable"),
        ([-1, WARN_BELOW, 1], "stable"),
        ([-1, REFUSE_BELOW - 0.01, 1], "unstable"),
    ],
)
def test_verdict_goes_by_the_median(correlations: list[float], verdict: str) -> None:
    assert Fitness(np.array(correlations, dtype=np.float64)).verdict == verdict


def test_gate_lets_a_stable_profile_through() -> None:
    assert check_fitness(make_profile(RANKED), RetentionConfig(), force=False).verdict == "stable"


@pytest.mark.parametrize("retained", [REVERSED, [[0.1, 0.2, 0.9]], [[0.5, 0.5], [0.5, 0.5]]])
def test_gate_refuses_an_unstable_profile_in_one_line_unless_forced(retained: list[list[float]]) -> None:
    profile = make_profile(retained)
    with pytest.raises(TangramError, match="--force") as error:
        check_fitness(profile, RetentionConfig(), force=False)
    assert "\n" not in str(error.value)
    assert f"median rank correlation {measure_fitness(np.array(retained)).median:.2f}" in str(error.value)
    assert check_fitness(profile, RetentionConfig(), force=True).verdict == "unstable"


def test_gate_lets_a_weak_profile_through() -> None:
    # Ranks 1 2 3 4 and 3 1 2 4: sum d^2 = 4 + 1 + 1 = 6, 1 - 6 * 6 / 60 = 0.4; with 2 1 4 3: 4 -> 0.6.
    weak = make_profile([[0.1, 0.2, 0.3, 0.4], [0.2, 0.1, 0.4, 0.3]])
    fitness = check_fitness(weak, RetentionConfig(), force=False)
    assert fitness.rank_correlations.tolist() == pytest.approx([0.6, 0.6])
    assert fitness.verdict == "weak"


def test_gate_has_nothing_to_ask_when_everything_is_kept() -> None:
    assert check_fitness(make_profile(REVERSED), RetentionConfig(ratio=1.0), force=False).verdict == "stable"
