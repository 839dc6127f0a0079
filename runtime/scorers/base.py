"""What a scorer sees of one attention layer, and what it says about each cached token."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

PROBABILITY_BYTES = 8 << 20  # of the largest block of attention probabilities that is alive at once
ALWAYS_KEPT = 1e30  # the score of a token that its scorer keeps whatever the others say


class Phase(StrEnum):
    """The forward pass in which a scorer looks at a layer."""

    PREFILL = "prefill"  # the context is read
    REPEAT = "repeat"  # the model, its context in the cache, reads a request to repeat it, then the context again


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer in one forward pass over one sequence; the queries are its last tokens, and causal.

    Args:
        layer: index of the layer in the model.
        query: [num_q_heads, num_queries, head_dim], after RoPE; q_head q reads KV head q // gqa_ratio.
        key: [num_kv_heads, num_keys, head_dim], after RoPE; num_keys >= num_queries.
        value: [num_kv_heads, num_keys, value_dim].
        scaling: factor on the products of queries and keys.
        softcap: bound c of the logits, as c * tanh(logit / c); None if there is none.
        sinks: [num_q_heads], a logit per q_head that takes part in the softmax without a token; None if there are none.
    """

    layer: int
    query: "Tensor"
    key: "Tensor"
    value: "Tensor"
    scaling: float
    softcap: float | None = None
    sinks: "Tensor | None" = None

    def probabilities(self, query_start: int = 0, mask: "Tensor | None" = None) -> Iterator["Tensor"]:
        """Attention probabilities of the queries from `query_start` on, a bounded block of queries at a time.

        Args:
            query_start: first query.
            mask: bool, [1, 1, num_queries, num_keys]: what a query may see; None if it is all earlier keys.

        Yields:
            float32 [num_kv_heads, gqa_ratio, queries, num_keys]; zero for keys that a query must not see.
        """
        import torch

        num_kv_heads, num_keys, _ = self.key.shape
        num_q_heads, num_queries, head_dim = self.query.shape
        grouped = (num_kv_heads, num_q_heads // num_kv_heads, num_queries, head_dim)
        key = self.key.float().transpose(-1, -2)
        query = self.query.float().reshape(grouped) * self.scaling
        key_positions = torch.arange(num_keys, device=key.device)
        query_positions = key_positions[num_keys - num_queries :]
        step = max(1, PROBABILITY_BYTES // (4 * num_q_heads * num_keys))
        for start in range(query_start, num_queries, step):
            end = min(start + step, num_queries)
            rows = query[:, :, start:end]
            logits = (rows.flatten(1, 2) @ key).view(*rows.shape[:3], num_keys)
            if self.softcap is not None:
                logits = self.softcap * torch.tanh(logits / self.softcap)
            seen = key_positions <= query_positions[start:end, None] if mask is None else mask[..., start:end, :]
            logits.masked_fill_(~seen, -torch.inf)
            yield self._softmax(logits)

    def _softmax(self, logits: "Tensor") -> "Tensor":
        import torch

        if self.sinks is None:
            return logits.softmax(-1)
        sinks = self.sinks.float().view(*logits.shape[:2], 1, 1).expand(*logits.shape[:3], 1)
        return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]


class Scorer(ABC):
    """Says how much each token matters to each KV head; a frozen dataclass whose fields are its settings."""

    name: ClassVar[str]
    phase: ClassVar[Phase]

    @abstractmethod
    def score(self, attention: LayerAttention, num_tokens: int) -> "Tensor":
        """Score the first `num_tokens` keys, the context's, by what one layer does in one pass of `phase`.

        A context may be repeated in pieces, one pass each; a token's score is then its highest over the passes.

        Returns:
            float32 [num_kv_heads, num_tokens]; higher is kept longer, and scores of different KV heads and layers
            compare. A token that is kept in any case has ALWAYS_KEPT.
        """
