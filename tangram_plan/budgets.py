"""Budgets: from measured retention to one law per KV head.

Two rules turn the samples x[s, h] (retained fraction of KV head h in sample s) into a part b[h] that is kept. A sample's
fraction counts all that the scorer kept; sink and window of the law come on top, also where a scorer such as SnapKV had
forced a window of its own into the measurement.

    mean_std   b[h] = min(1, mean_s x[s, h] + alpha * std_s x[s, h])            the paper's rule; overspends
    target     b[h] = clip(m[h] + z * d[h], 0, 1), with one z for all heads such that sum_h b[h] is exactly the total

`target` first divides every sample by its own mean over heads, because that mean is set by the sample's length and not
by its content, and multiplies by the mean g of all samples. m[h] is then the mean over samples, and

    d[h] = std[h] + ROOT_PRIOR * sqrt(m[h] * g) + FLOOR_PRIOR * g

the spread, with a prior: a few samples understate how much a head can vary; the spread of a share grows like the root of
the share, and a head that no sample retained may still be needed once. One z for all heads means that every head
overflows about equally often, which is where the expected overflow for a given total is least (water-filling).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from tangram_plan.ir import RHO_ONE, BudgetTable, MismatchError, ModelShape
from tangram_plan.profiles import FloatArray, Profile

from .config import RetentionConfig

ROOT_PRIOR, FLOOR_PRIOR = 0.1, 0.05


BudgetRule = Callable[[FloatArray], FloatArray]  # float64 [samples, kv_heads] -> parts kept, float64 [kv_heads]


def assign_budgets(profile: Profile, retention: RetentionConfig) -> BudgetTable:
    """The law of every planned KV head.

    Raises:
        TangramError: the profile lacks the level or ratio.
    """
    num_heads = len(profile.kv_heads)
    if retention.ratio == 1:
        rho = np.full(num_heads, RHO_ONE)
    else:
        parts = budget_rule(retention)(profile.at_ratio(retention.level, retention.ratio))
        exact = retention.rule == "target"
        rho = (
            round_to_total(parts * RHO_ONE, round(retention.ratio * num_heads * RHO_ONE))
            if exact
            else np.ceil(parts * RHO_ONE)
        )
    table = {kv_head: int(value) for kv_head, value in zip(profile.kv_heads, rho, strict=True)}
    return BudgetTable(retention.sink_tokens, retention.window_tokens, table)


def budget_rule(retention: RetentionConfig) -> BudgetRule:
    """The rule that a configuration names, as a function of the samples."""
    if retention.rule == "mean_std":
        return lambda retained: mean_std(retained, retention.alpha)
    return lambda retained: target(retained, total=retention.ratio * retained.shape[1])


def check_profile_fits(profile: Profile, shape: ModelShape, *, force: bool) -> None:
    """A profile fits a model if it measured exactly the KV heads that are planned, on the same architecture.

    Raises:
        MismatchError: other KV heads, or (unless `force`) another architecture of the same shape.
    """
    where = f"profile of {profile.model} by {profile.scorer}"
    measured, planned = set(profile.kv_heads), set(shape.kv_heads())
    if measured != planned:
        odd = min(measured ^ planned)
        fault = "was measured but is not in the model" if odd in measured else "is in the model but was not measured"
        raise MismatchError(
            f"profile has another shape than the model: layer {odd.layer}, head {odd.head} {fault}",
            where=where,
            got=f"{len(measured)} KV heads in {len(profile.layers)} layers",
            expected=f"{len(planned)} in {len(shape.planned_layers)}",
            fix="calibrate this model, or name the profile that belongs to it",
        )
    if profile.model_fingerprint != shape.fingerprint and not force:
        raise MismatchError(
            "profile was measured on another model of the same shape",
            where=where,
            got=f"architecture {profile.model_fingerprint[:12]}",
            expected=f"{shape.fingerprint[:12]} ({shape.model_type})",
            fix="calibrate this model, or build with --force",
        )


def mean_std(retained: FloatArray, alpha: float) -> FloatArray:
    """The paper's rule (Tangram, arXiv 2606.06302, budget reservation), standard deviation over the population.

    Args:
        retained: float64 [samples, kv_heads].
        alpha: standard deviations above the mean.

    Returns:
        float64 [kv_heads] in [0, 1].
    """
    parts: FloatArray = np.minimum(1.0, retained.mean(axis=0) + alpha * retained.std(axis=0))
    return parts


def target(retained: FloatArray, total: float) -> FloatArray:
    """Budgets that sum to `total` and overflow least; see the module's formula.

    Args:
        retained: float64 [samples, kv_heads].
        total: sum of the returned parts; above 0 and at most kv_heads.

    Returns:
        float64 [kv_heads] in [0, 1].
    """
    overall = float(retained.mean())
    samples = equalise_lengths(retained, mean=overall)
    mean = samples.mean(axis=0)
    spread = samples.std(axis=0) + ROOT_PRIOR * np.sqrt(mean * overall) + FLOOR_PRIOR * overall

    def parts(z: float) -> FloatArray:
        clipped: FloatArray = np.clip(mean + z * spread, 0.0, 1.0)
        return clipped

    steepest = float(np.max((1 + mean) / spread))  # at +-steepest every part is 1 or 0
    if total >= len(mean):
        return np.ones(len(mean))
    return parts(brentq(lambda z: parts(z).sum() - total, -steepest, steepest, xtol=1e-12))


def equalise_lengths(retained: FloatArray, *, mean: float) -> FloatArray:
    """Each sample divided by its own mean over KV heads and multiplied by `mean`.

    Args:
        retained: float64 [samples, kv_heads].
        mean: mean over KV heads that every sample gets.
    """
    equalised: FloatArray = retained / retained.mean(axis=1, keepdims=True) * mean
    return equalised


def round_to_total(values: FloatArray, total: int) -> FloatArray:
    """Integers next to `values` whose sum is `total`: largest remainder first, lower index on ties.

    Args:
        values: float64 [kv_heads] in [0, RHO_ONE], whose sum is within rounding of `total`.
        total: sum of the returned integers.
    """
    floor = np.floor(np.minimum(values, RHO_ONE))
    missing = int(total - floor.sum())
    order = np.argsort(-(values - floor), kind="stable")
    room = order[floor[order] < RHO_ONE]
    floor[room[:missing]] += 1
    assert floor.sum() == total, "the values do not sum to the total"
    return floor


@dataclass(frozen=True)
class OverflowReport:
    """How often a held-out sample retains more of a KV head than its budget.

    Args:
        overflow: part of (sample, KV head) pairs, lengths equalised: each held-out sample divided by its own mean and
            multiplied by the training mean.
        raw_overflow: the same without equalising.
        per_head: float64 [kv_heads], overflowing part of the samples of each KV head, lengths equalised.
        pairs: number of (sample, KV head) pairs.
    """

    overflow: float
    raw_overflow: float
    per_head: FloatArray
    pairs: int


def held_out_overflow(retained: FloatArray, contexts: Sequence[int], rule: BudgetRule) -> OverflowReport | None:
    """Two-fold cross-validation by context: budgets from one half of the contexts, overflow on the other, both ways.

    Args:
        retained: float64 [samples, kv_heads].
        contexts: per sample, the id of its context; samples of one context stay on one side.
        rule: makes budgets from the training samples.

    Returns:
        None if all samples are of one context, which cannot be split.
    """
    names = np.unique(contexts)
    if len(names) < 2:
        return None
    overflows, raw_overflows = [], []
    for held_out_names in (names[0::2], names[1::2]):
        held_out = np.isin(contexts, held_out_names)
        training, unseen = retained[~held_out], retained[held_out]
        budget = rule(training)
        overflows.append(equalise_lengths(unseen, mean=training.mean()) > budget)
        raw_overflows.append(unseen > budget)
    pairs = np.concatenate(overflows)
    return OverflowReport(
        overflow=float(pairs.mean()),
        raw_overflow=float(np.concatenate(raw_overflows).mean()),
        per_head=pairs.mean(axis=0),
        pairs=pairs.size,
    )
