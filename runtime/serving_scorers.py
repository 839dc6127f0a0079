"""What ranks tokens while serving: pointwise functions of one token's key and position, and of statistics from calibration.

To add one: write its class, and add an entry to SERVING_SCORERS.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from tangram_plan.ir import Plan, TangramError

from .eviction_reference import key_anchor_scores


class ServingScorer(Protocol):
    """Scores of the tokens of one layer."""

    def scores(self, layer: int, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Scores of some tokens, float32 [num_kv_heads, num_tokens], dense; higher is kept longer.

        Args:
            layer: whose.
            k: [num_tokens, num_kv_heads, D], keys as they are cached, RoPE included.
            positions: int [num_tokens], of the tokens.
        """
        ...


class Recent:
    """The most recent tokens (StreamingLLM, https://arxiv.org/abs/2309.17453, where the plan keeps sinks, too)."""

    def scores(self, layer: int, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - position says it
        """See `ServingScorer.scores`."""
        return positions.float().expand(k.shape[1], -1).contiguous()


class KeyAnchor:
    """Keys that point elsewhere than most (KeyDiff, https://arxiv.org/abs/2504.15364, with anchors from calibration).

    Args:
        anchors: layer -> float32 [num_kv_heads, D], mean direction of the keys of every local KV head.
    """

    def __init__(self, anchors: Mapping[int, torch.Tensor]) -> None:
        self.anchors = anchors

    def scores(self, layer: int, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - keys say it
        """See `ServingScorer.scores`."""
        return key_anchor_scores(k, self.anchors[layer])


SERVING_SCORERS: dict[str, Callable[[], ServingScorer]] = {"recent": Recent}


def load_scorer(plan: Plan) -> ServingScorer:
    """The scorer that a plan names.

    Raises:
        TangramError: it cannot serve; `key_anchor` needs anchors, which no artefact carries yet.
    """
    if plan.scorer not in SERVING_SCORERS:
        raise TangramError(
            "scorer cannot serve",
            where="the plan",
            got=plan.scorer,
            expected=f"one of {', '.join(SERVING_SCORERS)}",
            fix="build the plan with `--set scorer=recent`",
        )
    return SERVING_SCORERS[plan.scorer]()
