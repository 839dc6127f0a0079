"""SnapKV (https://arxiv.org/abs/2404.14469): a token matters as much as the prompt's last queries attend to its surroundings.

score[head, token] = avg_pool over positions of the mean, over the last `window_tokens` queries and the q_heads of the
head's group, of softmax(q k / sqrt(d)). The window itself is always kept. Average pooling with kernel 5 is the default of the authors' code.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import ALWAYS_KEPT, LayerAttention, Phase, Scorer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SnapKV(Scorer):
    """Pooled mean attention of the prompt's last queries.

    Args:
        window_tokens: last tokens of the prompt, whose queries vote, and which are kept.
        kernel_tokens: odd width of the pooling over positions.
    """

    name = "snapkv"
    phase = Phase.PREFILL

    window_tokens: int = 32
    kernel_tokens: int = 5

    def score(self, attention: LayerAttention, num_tokens: int) -> "Tensor":
        """See `Scorer.score`."""
        import torch

        num_queries = attention.query.shape[1]
        window = min(self.window_tokens, num_queries)
        blocks = attention.probabilities(query_start=num_queries - window)
        total = sum((block.mean(1).sum(1) for block in blocks), attention.key.new_zeros(()).float())
        votes = total[:, : num_tokens - window] / window
        scores = torch.full((len(attention.key), num_tokens), ALWAYS_KEPT, device=votes.device)
        if votes.shape[1]:
            scores[:, : num_tokens - window] = torch.nn.functional.avg_pool1d(
                votes, self.kernel_tokens, stride=1, padding=self.kernel_tokens // 2
            )
        return scores
