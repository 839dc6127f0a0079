"""What ranks tokens while serving: pointwise functions of one token's key and position, and of statistics from calibration.

To add one: write its class, and add an entry to SERVING_SCORERS and to `SCORER_STATISTICS` of `ir.scorer_statistics`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from tangram_plan.ir import MEAN_KEYS, STATISTICS_FILE, Plan, check_scorer, needed_statistics, verify_statistics

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


Statistics = Mapping[str, Mapping[int, torch.Tensor]]  # name -> layer -> float32 [local KV heads, ...]

SERVING_SCORERS: Mapping[str, Callable[[Statistics], ServingScorer]] = {
    "recent": lambda _: Recent(),
    "key_anchor": lambda statistics: KeyAnchor(statistics[MEAN_KEYS]),
}


def load_scorer(plan: Plan, artefact: Path, rank: int, device: torch.device | str) -> ServingScorer:
    """The scorer that a plan names, with what it needs of the model.

    Args:
        plan: of the artefact.
        artefact: folder that `build` wrote.
        rank: whose KV heads.
        device: where its tensors lie.

    Raises:
        TangramError: the scorer cannot serve, or the artefact lacks what it needs.
    """
    check_scorer(plan, artefact)
    return SERVING_SCORERS[plan.scorer](_local_statistics(plan, artefact, rank, device))


def _local_statistics(plan: Plan, artefact: Path, rank: int, device: torch.device | str) -> Statistics:
    if not needed_statistics(plan):
        return {}
    path, shape = artefact / STATISTICS_FILE, plan.model
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file}
    verify_statistics({name: tuple(rows.shape) for name, rows in arrays.items()}, plan, where=str(path))
    row_of = {kv_head: row for row, kv_head in enumerate(shape.kv_heads())}
    local = {
        layer: [row_of[kv_head] for kv_head in shape.local_kv_heads(layer, rank, plan.tensor_parallel)]
        for layer in shape.planned_layers
    }
    return {
        name: {layer: rows[numbers].to(device) for layer, numbers in local.items()} for name, rows in arrays.items()
    }
