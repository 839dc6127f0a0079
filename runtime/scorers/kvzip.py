"""KVzip (https://arxiv.org/abs/2505.23416): a token matters as much as the model needs it to repeat the context.

score[head, token] = the highest, over the q_heads of the head's group and the queries of the repeat pass, of
softmax(q k / sqrt(d)), where the softmax runs over all cached keys and the repeat input so far. (The authors' code
normalises over one piece of the context at a time; for contexts of one piece the two are the same.)
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import LayerAttention, Phase, Scorer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KVzip(Scorer):
    """Highest attention probability that a token gets while the context is repeated; needs a second pass."""

    name = "kvzip"
    phase = Phase.REPEAT

    def score(self, attention: LayerAttention, num_tokens: int) -> "Tensor":
        """See `Scorer.score`."""
        best = attention.key.new_zeros((len(attention.key), num_tokens)).float()
        for block in attention.probabilities():
            best = best.maximum(block[..., :num_tokens].amax((1, 2)))
        return best
