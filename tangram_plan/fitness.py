"""The fitness gate: is retention a property of the model, so that a static plan can be made of this profile?"""

from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr

from tangram_plan.ir import TangramError
from tangram_plan.profiles import FloatArray, Profile

from .config import RetentionConfig

WARN_BELOW = 0.7  # median rank correlation under which a static plan loses part of its point
REFUSE_BELOW = 0.5  # ... and under which it has none


@dataclass(frozen=True)
class Fitness:
    """Rank stability of a profile.

    Args:
        rank_correlations: float64 [samples], Spearman's correlation of each sample's KV heads with the mean of all others.
    """

    rank_correlations: FloatArray

    @property
    def median(self) -> float:
        """Median rank correlation; what the gate looks at."""
        return float(np.median(self.rank_correlations))

    @property
    def verdict(self) -> str:
        """`stable`, `weak` or `unstable`."""
        if self.median < REFUSE_BELOW:
            return "unstable"
        return "weak" if self.median < WARN_BELOW else "stable"


def measure_fitness(retained: FloatArray) -> Fitness:
    """Rank correlation between samples.

    Args:
        retained: float64 [samples, kv_heads]; a single sample, or heads that are all alike, count as unstable (0).
    """
    if len(retained) < 2:
        return Fitness(np.zeros(len(retained)))
    others = [np.delete(retained, index, axis=0).mean(axis=0) for index in range(len(retained))]
    return Fitness(np.array([_spearman(sample, rest) for sample, rest in zip(retained, others, strict=True)]))


def check_fitness(profile: Profile, retention: RetentionConfig, *, force: bool) -> Fitness:
    """Measure fitness at the level and ratio that budgets are made from.

    Raises:
        TangramError: ranks do not agree between samples, and `force` is not set.
    """
    if retention.ratio == 1:
        return Fitness(np.ones(len(profile.samples)))  # everything is kept: nothing depends on ranks
    fitness = measure_fitness(profile.at_ratio(retention.level, retention.ratio))
    if fitness.verdict == "unstable" and not force:
        raise TangramError(
            "KV heads do not keep their rank between samples, so static budgets would be wrong for most inputs",
            where=f"profile of {profile.model} by {profile.scorer}",
            got=f"median rank correlation {fitness.median:.2f}",
            expected=f"at least {REFUSE_BELOW}",
            fix="calibrate with more or longer texts or another scorer, or build with --force",
        )
    return fitness


def _spearman(first: FloatArray, second: FloatArray) -> float:
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(spearmanr(first, second).statistic)
