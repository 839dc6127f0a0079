import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_plan.budgets import (
    FLOOR_PRIOR,
    ROOT_PRIOR,
    BudgetRule,
    OverflowReport,
    assign_budgets,
    budget_rule,
    check_profile_fits,
    equalise_lengths,
    held_out_overflow,
    mean_std,
    round_to_total,
    target,
)
from tangram_plan.config import RetentionConfig
from tangram_plan.ir import RHO_ONE, KVHead, MismatchError, ModelShape, TangramError, verify_budgets
from tangram_plan.profiles import FloatArray, Level
from tests.profiles_by_hand import make_profile
from tests.solver_cases import make_shape

EXTREME_RATIOS = (1e-6, 1 / 65536, 0.001, 0.1, 0.25, 0.3, 1 / 3, 0.5, 0.7, 0.9, 0.999, 1 - 1e-6, 1.0)
every_profile = settings(deadline=None, max_examples=200, derandomize=True, database=None)


def array(*rows: list[float]) -> FloatArray:
    return np.array(rows, dtype=np.float64)


@st.composite
def retained_fractions(draw: st.DrawFn) -> FloatArray:
    """Samples that each retain something, as `check_profile` asks; heads may never be retained."""
    num_heads = draw(st.integers(1, 12))
    part = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 1e-9]))
    sample = st.lists(part, min_size=num_heads, max_size=num_heads).filter(lambda parts: sum(parts) > 1e-6)
    return array(*draw(st.lists(sample, min_size=1, max_size=6)))


# --- mean_std


def test_mean_std_of_numbers_worked_by_hand() -> None:
    # Means 0.3, 0.5 and 0.9; deviations of the population 0.1, 0 and 0.1 (of the sample, 0.1 would be 0.141).
    retained = array([0.2, 0.5, 0.8], [0.4, 0.5, 1.0])
    assert mean_std(retained, 2.0).tolist() == pytest.approx([0.5, 0.5, 1.0])
    assert mean_std(retained, 0.5).tolist() == pytest.approx([0.35, 0.5, 0.95])
    assert mean_std(retained, 0.0).tolist() == pytest.approx([0.3, 0.5, 0.9])


def test_mean_std_of_a_single_sample_is_that_sample() -> None:
    assert mean_std(array([0.2, 0.0, 1.0]), 3.0).tolist() == [0.2, 0.0, 1.0]


def test_mean_std_rounds_up_to_the_fixed_point() -> None:
    config = RetentionConfig(rule="mean_std", ratio=0.3, alpha=0)
    budgets = assign_budgets(make_profile([[0.25, 1 / 3, 0.0, 1.0]]), config)
    assert list(budgets.rho.values()) == [16384, 21846, 0, 65536]  # 65536 / 3 = 21845.33


# --- target


@pytest.mark.parametrize("ratio", EXTREME_RATIOS)
@pytest.mark.parametrize("num_heads", [1, 2, 7, 64])
def test_total_is_met_exactly_in_fixed_point(num_heads: int, ratio: float) -> None:
    retained = np.random.default_rng(num_heads).beta(0.3, 0.7, (5, num_heads))
    profile = make_profile(retained, ratios=(1e-6, 1.0))
    budgets = assign_budgets(profile, RetentionConfig(ratio=ratio))
    verify_budgets(budgets, make_shape(1, num_heads))
    assert sum(budgets.rho.values()) == round(ratio * num_heads * RHO_ONE)


@every_profile
@given(retained_fractions(), st.floats(0.001, 1))
def test_total_is_met_exactly_for_every_profile(retained: FloatArray, ratio: float) -> None:
    num_heads = retained.shape[1]
    budgets = assign_budgets(make_profile(retained, ratios=(0.001, 1.0)), RetentionConfig(ratio=ratio))
    verify_budgets(budgets, make_shape(1, num_heads))
    assert sum(budgets.rho.values()) == round(ratio * num_heads * RHO_ONE)


def test_total_far_below_what_was_retained_is_met() -> None:
    # Equalised, the second head's mean is 1.125: lengths are made equal at the price of shares above 1.
    assert target(array([0.0, 1.0], [1.0, 1.0]), 0.03).sum() == pytest.approx(0.03)


@every_profile
@given(retained_fractions(), st.floats(0.01, 0.99))
def test_one_z_serves_all_heads(retained: FloatArray, ratio: float) -> None:
    # The formula, sample by sample and head by head.
    num_heads, overall = retained.shape[1], float(retained.mean())
    samples = [[x / (sum(sample) / num_heads) * overall for x in sample] for sample in retained.tolist()]
    mean = [sum(column) / len(samples) for column in zip(*samples, strict=True)]
    spread = [
        (sum((x - m) ** 2 for x in column) / len(samples)) ** 0.5
        + ROOT_PRIOR * (m * overall) ** 0.5
        + FLOOR_PRIOR * overall
        for m, column in zip(mean, zip(*samples, strict=True), strict=True)
    ]
    parts = target(retained, ratio * num_heads).tolist()
    assert sum(parts) == pytest.approx(ratio * num_heads)
    z = [(part - m) / d for part, m, d in zip(parts, mean, spread, strict=True)]
    inside = [value for value, part in zip(z, parts, strict=True) if 0 < part < 1]
    assert max(inside, default=0) - min(inside, default=0) <= 1e-6 * (1 + max(map(abs, inside), default=0))
    for value, part in zip(z, parts, strict=True):
        # A head at 1 would get more, and a head at 0 less, if parts had no ends.
        if inside and part == 1:
            assert value <= max(inside) + 1e-6 * (1 + abs(value))
        if inside and part == 0:
            assert value >= min(inside) - 1e-6 * (1 + abs(value))


def test_target_of_one_sample_is_that_sample_where_it_has_the_total() -> None:
    assert target(array([0.1, 0.2, 0.3, 0.4]), 1.0).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_target_gives_what_a_full_head_leaves_to_the_others() -> None:
    # Samples (1, 0.2) and (1, 0.2): the total of 1.4 is reached by the second head alone.
    assert target(array([1.0, 0.2], [1.0, 0.2]), 1.4).tolist() == pytest.approx([1.0, 0.4])


def test_target_gives_more_to_the_head_that_varies() -> None:
    # Equal means; the first head varies by 0.2 between samples that are equally long.
    parts = target(array([0.2, 0.4, 0.6], [0.6, 0.4, 0.2]), 1.8)
    assert parts[0] == pytest.approx(parts[2])
    assert parts[0] > parts[1] > 0.4


@every_profile
@given(retained_fractions(), st.floats(0.01, 1), st.integers(0, 2**32 - 1))
def test_target_depends_on_shares_and_not_on_the_level_of_each_sample(
    retained: FloatArray, ratio: float, seed: int
) -> None:
    # Every sample at another level, with the mean of all kept, so that only shares within a sample count.
    scale = np.random.default_rng(seed).uniform(0.1, 1.0, (len(retained), 1))
    scaled = retained * scale
    scaled *= retained.mean() / scaled.mean()
    total = ratio * retained.shape[1]
    assert target(scaled, total).tolist() == pytest.approx(target(retained, total).tolist(), abs=1e-6)


def test_equalised_samples_have_one_mean_and_their_own_shares() -> None:
    # Means 0.2 and 0.6, together 0.4.
    equalised = equalise_lengths(array([0.1, 0.3], [0.8, 0.4]), mean=0.4)
    assert equalised.tolist() == [pytest.approx([0.2, 0.6]), pytest.approx([0.4 * 4 / 3, 0.4 * 2 / 3])]


@pytest.mark.parametrize("ratio", EXTREME_RATIOS)
@pytest.mark.parametrize("rule", ["target", "mean_std"])
def test_heads_that_are_never_retained_stay_valid(rule: str, ratio: float) -> None:
    retained = array([0.0, 0.6, 0.0, 0.4], [0.0, 0.5, 0.0, 0.5])
    retention = RetentionConfig.model_validate({"rule": rule, "ratio": ratio})
    budgets = assign_budgets(make_profile(retained, ratios=(1e-6, 1.0)), retention)
    verify_budgets(budgets, make_shape(1, 4))
    assert all(budgets.law(rho).kept(100) >= 1 for rho in budgets.rho.values())
    assert budgets.rho[KVHead(0, 0)] == budgets.rho[KVHead(0, 2)] or rule == "target"
    assert budgets.rho[KVHead(0, 0)] <= budgets.rho[KVHead(0, 3)]


@pytest.mark.parametrize("rule", ["target", "mean_std"])
def test_ratio_of_one_keeps_everything_whatever_was_measured(rule: str) -> None:
    retention = RetentionConfig.model_validate({"rule": rule, "ratio": 1.0, "level": Level.LAYER})
    assert set(assign_budgets(make_profile([[0.1, 0.0]]), retention).rho.values()) == {RHO_ONE}


def test_sink_and_window_are_those_of_the_configuration() -> None:
    budgets = assign_budgets(make_profile([[0.1, 0.5]]), RetentionConfig(sink_tokens=3, window_tokens=17))
    assert (budgets.sink_tokens, budgets.window_tokens) == (3, 17)


def test_level_that_was_not_measured_is_refused() -> None:
    with pytest.raises(TangramError, match=r"retention level .* got layer, expected model"):
        assign_budgets(make_profile([[0.1, 0.5]]), RetentionConfig(level=Level.LAYER))


def test_ratio_that_was_not_measured_is_refused() -> None:
    with pytest.raises(TangramError, match=r"got 0.31, expected 0.3"):
        assign_budgets(make_profile([[0.1, 0.5]]), RetentionConfig(ratio=0.31))


# --- rounding


def test_rounding_gives_the_missing_units_to_the_largest_remainders() -> None:
    assert round_to_total(array([1.2, 2.7, 3.6, 0.5])[0], 8).tolist() == [1, 3, 4, 0]


def test_ties_are_rounded_up_from_the_first_on() -> None:
    assert round_to_total(array([1.5, 2.5, 3.5, 4.5])[0], 12).tolist() == [2, 3, 3, 4]


def test_rounding_never_exceeds_one() -> None:
    assert round_to_total(array([RHO_ONE + 1e-7, 9.9999])[0], RHO_ONE + 10).tolist() == [RHO_ONE, 10]


@every_profile
@given(st.lists(st.floats(0, RHO_ONE), min_size=1, max_size=30))
def test_rounding_meets_the_total_within_one_unit_each(values: list[float]) -> None:
    total = round(sum(values))
    rounded = round_to_total(np.array(values), total)
    assert rounded.sum() == total
    assert np.abs(rounded - np.array(values)).max() <= 1
    assert rounded.min() >= 0
    assert rounded.max() <= RHO_ONE


# --- overflow on held-out contexts


def measured_overflow(retained: FloatArray, contexts: list[int], rule: BudgetRule) -> OverflowReport:
    report = held_out_overflow(retained, contexts, rule)
    assert report is not None
    return report


def test_overflow_of_numbers_worked_by_hand() -> None:
    # One sample per context; the budget is the other one. Equalised by the training mean, 0.25 either way:
    # context 0 against budget (0.4, 0.1) overflows in head 1, context 1 against (0.2, 0.3) in head 0.
    report = measured_overflow(array([0.2, 0.3], [0.4, 0.1]), [0, 1], lambda training: training.mean(axis=0))
    assert (report.overflow, report.raw_overflow, report.pairs) == (0.5, 0.5, 4)
    assert report.per_head.tolist() == [0.5, 0.5]


def test_overflow_is_equalised_by_the_training_mean() -> None:
    # Same shares, but context 1 retains twice as much: raw it overflows everywhere, equalised nowhere.
    report = measured_overflow(array([0.1, 0.3], [0.2, 0.6]), [0, 1], lambda training: training.max(axis=0) + 1e-9)
    assert (report.overflow, report.raw_overflow) == (0.0, 0.5)


@pytest.mark.parametrize("contexts", [[0, 0, 1, 1, 2, 2], [5, 9, 5, 9, 5, 9], [3, 2, 1, 3, 2, 1]])
def test_samples_of_one_context_stay_on_one_side(contexts: list[int]) -> None:
    # A sample's first head tells its context; whatever trains a rule must hold none of what the rule is tested on.
    retained = array(*([0.01 * context, 0.5] for context in contexts))
    trained_on: list[set[int]] = []

    def rule(training: FloatArray) -> FloatArray:
        trained_on.append({round(100 * sample[0]) for sample in training})
        return np.ones(2)

    report = measured_overflow(retained, contexts, rule)
    first, second = trained_on
    assert first | second == set(contexts)
    assert not first & second
    assert report.pairs == 2 * len(contexts)  # every sample is held out once


def test_duplicates_of_a_context_do_not_hide_its_overflow() -> None:
    # Each context has a head of its own and occurs twice. With a twin in training, nothing would overflow.
    retained = array([0.8, 0.1], [0.8, 0.1], [0.1, 0.8], [0.1, 0.8])
    report = measured_overflow(retained, [7, 7, 8, 8], lambda training: training.max(axis=0))
    assert report.overflow == report.raw_overflow == 0.5
    leaked = measured_overflow(retained, [7, 8, 7, 8], lambda training: training.max(axis=0))
    assert leaked.raw_overflow == 0


def test_single_context_cannot_be_split() -> None:
    assert held_out_overflow(array([0.1, 0.2], [0.2, 0.3]), [4, 4], lambda training: training.mean(axis=0)) is None


@pytest.mark.parametrize("rule", ["target", "mean_std"])
def test_rule_of_a_configuration_works_on_any_samples(rule: str) -> None:
    retention = RetentionConfig.model_validate({"rule": rule, "ratio": 0.25, "alpha": 1.0})
    retained = array([0.1, 0.4], [0.3, 0.2])
    expected: npt.NDArray[np.float64] = target(retained, 0.5) if rule == "target" else mean_std(retained, 1.0)
    assert budget_rule(retention)(retained).tolist() == expected.tolist()


# --- a profile belongs to a model


def test_profile_of_the_model_itself_fits() -> None:
    shape = make_shape(1, 2)
    check_profile_fits(make_profile([[0.1, 0.2]], fingerprint=shape.fingerprint), shape, force=False)


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        (make_shape(1, 3), "layer 0, head 2 is in the model but was not measured"),
        (make_shape(2, 2), "layer 1, head 0 is in the model but was not measured"),
        (make_shape(1, 1), "layer 0, head 1 was measured but is not in the model"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_profile_of_other_heads_is_refused_even_by_force(shape: ModelShape, fault: str, force: bool) -> None:
    with pytest.raises(MismatchError, match=fault):
        check_profile_fits(make_profile([[0.1, 0.2]]), shape, force=force)


def test_profile_of_a_twin_is_refused_unless_forced() -> None:
    profile, shape = make_profile([[0.1, 0.2]], fingerprint="another"), make_shape(1, 2)
    with pytest.raises(MismatchError, match="--force"):
        check_profile_fits(profile, shape, force=False)
    check_profile_fits(profile, shape, force=True)
