"""Scorers that serve, and what each needs of the model beside tokens: measured by `calibrate`, written by `build`, read by the runtime.

OUT/statistics.npz   every statistic that the plan's scorer needs, under its name: float32 [kv_heads, ...], KV heads by layer, then by
                     place in the plan's head order. Without it, a plan whose scorer needs one can be looked at, but not served.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from .errors import MismatchError, TangramError
from .model_shape import ModelShape
from .plan import Plan

STATISTICS_FILE = "statistics.npz"
MEAN_KEYS = (
    "mean_keys"  # [kv_heads, head_dim], mean over tokens of L2-normalised keys as they are cached, RoPE included
)

STATISTIC_SHAPES: Mapping[str, Callable[[ModelShape], tuple[int, ...]]] = {
    MEAN_KEYS: lambda shape: (shape.num_kv_heads, shape.head_dim),
}
SCORER_STATISTICS: Mapping[str, tuple[str, ...]] = {"recent": (), "key_anchor": (MEAN_KEYS,)}


def needed_statistics(plan: Plan) -> tuple[str, ...]:
    """Statistics that a plan's scorer needs; none are known of a scorer that does not serve."""
    return SCORER_STATISTICS.get(plan.scorer, ())


def missing_statistics(plan: Plan, artefact: Path) -> tuple[str, ...]:
    """Statistics that a plan's scorer needs and its artefact lacks; `build` writes all of them or none."""
    return () if (artefact / STATISTICS_FILE).is_file() else needed_statistics(plan)


def check_scorer(plan: Plan, artefact: Path) -> None:
    """That an artefact has what its plan's scorer needs for serving.

    Raises:
        TangramError: there is no such scorer, or it lacks statistics.
    """
    if plan.scorer not in SCORER_STATISTICS:
        raise TangramError(
            "this scorer does not serve",
            where="plan: scorer",
            got=plan.scorer,
            expected=" or ".join(SCORER_STATISTICS),
            fix="build the plan with one of these as `scorer`",
        )
    if missing := missing_statistics(plan, artefact):
        raise TangramError(
            f"scorer {plan.scorer} lacks {', '.join(missing)}, which the plan's profile does not have",
            where=str(artefact),
            fix="measure the model with `tangram-plan calibrate` and build again, or build with `--set scorer=recent`",
        )


def verify_statistics(shapes: Mapping[str, tuple[int, ...]], plan: Plan, *, where: str) -> None:
    """That the statistics of an artefact are those that its plan's scorer needs.

    Args:
        shapes: name -> shape of the array.
        plan: of the artefact.
        where: what to call them in the error.

    Raises:
        MismatchError: they are not.
    """
    expected = {name: STATISTIC_SHAPES[name](plan.model) for name in needed_statistics(plan)}
    if dict(shapes) != expected:
        raise MismatchError(
            "statistics do not fit the plan",
            where=where,
            got=dict(shapes),
            expected=str(expected),
            fix="calibrate this model and build again",
        )
