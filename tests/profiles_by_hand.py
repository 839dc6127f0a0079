"""Small profiles, built by hand."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tangram_plan.ir import KVHead
from tangram_plan.profiles import Level, Profile, Sample


def make_profile(
    retained: Sequence[Sequence[float]] | npt.NDArray[np.float64],
    *,
    ratios: tuple[float, ...] = (0.3,),
    contexts: Sequence[int] | None = None,
    fingerprint: str = "",
) -> Profile:
    """One layer; the same retained fractions, [samples, kv_heads], at every ratio."""
    samples = np.asarray(retained, dtype=np.float64)
    ids = range(len(samples)) if contexts is None else contexts
    return Profile(
        model="hand",
        model_fingerprint=fingerprint,
        scorer="hand",
        kv_heads=tuple(KVHead(0, head) for head in range(samples.shape[1])),
        ratios=ratios,
        samples=tuple(Sample("hand", context, 0) for context in ids),
        retained={Level.MODEL: np.repeat(samples[:, None], len(ratios), axis=1)},
    )
