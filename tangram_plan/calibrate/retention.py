"""Scores in, retained fractions out: the pooled top-k.

Of N tokens and H KV heads, a pool keeps the round(ratio * N * H) (token, KV head) pairs with the highest scores (round half
to even). Of equal scores the lower position wins, then the lower KV head. What counts are all N tokens of the sample, the
chat template's prefix and attention sinks included: nothing is protected, unless the scorer itself says so.
"""

import numpy as np
import numpy.typing as npt

from tangram_plan.ir import KVHead
from tangram_plan.profiles import FloatArray, Level


def retained_fractions(
    scores: npt.NDArray[np.float32], kv_heads: tuple[KVHead, ...], ratios: tuple[float, ...], level: Level
) -> FloatArray:
    """Fraction of the tokens that each KV head keeps when one budget is shared over a level.

    Args:
        scores: float32 [kv_heads, tokens].
        kv_heads: what the rows are, by layer, then by head.
        ratios: retention ratios.
        level: which KV heads share a budget.

    Returns:
        float64 [ratios, kv_heads].
    """
    layers = np.array([kv_head.layer for kv_head in kv_heads])
    pools = [layers >= 0] if level is Level.MODEL else [layers == layer for layer in np.unique(layers)]
    retained = np.zeros((len(ratios), len(kv_heads)))
    for pool in pools:
        retained[:, pool] = _pooled_top_k(scores[pool], ratios)
    return retained


def _pooled_top_k(scores: npt.NDArray[np.float32], ratios: tuple[float, ...]) -> FloatArray:
    num_heads, num_tokens = scores.shape
    ranked = np.argsort(-scores.T.reshape(-1), kind="stable") % num_heads  # position-major: ties go to lower positions
    kept = [ranked[: round(ratio * ranked.size)] for ratio in ratios]
    return np.stack([np.bincount(heads, minlength=num_heads) / num_tokens for heads in kept])
