"""What a compressed cache should do, without a cache: one forward pass in which every KV head has a mask of its own.

A query sees the tokens of its own chunk up to itself, and what its KV head kept of those before: here a set of positions, made chunk by
chunk from the rule in words. Keys and values do not depend on who sees them later, so that one pass is exact.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tangram_plan.ir import KVHead


def seen_tokens(
    scores: Sequence[float],
    prompt_tokens: int,
    chunk_tokens: int,
    sink_tokens: int,
    window_tokens: int,
    part_kept: float,
) -> torch.Tensor:
    """Which token a query sees, bool [num_tokens, num_tokens].

    Args:
        scores: of every token of prompt and answer; the highest stay. The token's own number: the most recent ones stay.
        prompt_tokens: of the prompt, which is compressed.
        chunk_tokens: after so many tokens each, and at the prompt's end; one token alone joins those before.
        sink_tokens: first tokens, which stay whatever their score.
        window_tokens: last tokens, which stay on top of the part.
        part_kept: of all other tokens.
    """
    num_tokens, protected = len(scores), sink_tokens + window_tokens
    seen = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    ends = [*range(chunk_tokens, prompt_tokens - 1, chunk_tokens), prompt_tokens]
    kept: list[int] = []
    for start, end in zip([0, *ends], [*ends, num_tokens], strict=True):
        for query in range(start, end):
            seen[query, kept] = True
            seen[query, start : query + 1] = True

        def importance(token: int, end: int = end) -> tuple[bool, float]:
            return token < sink_tokens or token >= end - window_tokens, scores[token]

        budget = min(end, max(1, protected + math.ceil(part_kept * max(0, end - protected))))
        kept = sorted([*kept, *range(start, end)], key=importance, reverse=True)[:budget]
    return seen


def masked_logprobs(folder: Path, tokens: Sequence[int], seen: Mapping[KVHead, torch.Tensor]) -> torch.Tensor:
    """As `self_masked_logprobs`, with masks bool [num_tokens, num_tokens] that are known before."""
    return self_masked_logprobs(folder, tokens, lambda kv_head, _: seen[kv_head])


def self_masked_logprobs(
    folder: Path, tokens: Sequence[int], seen: Callable[[KVHead, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Log-probabilities of the token after each, float32 [num_tokens, vocabulary], of a Hugging Face model.

    Args:
        folder: of the model.
        tokens: the text.
        seen: of a KV head and its keys, float32 [num_tokens, head_dim]: bool [num_tokens, num_tokens].
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, scaling: float, **__: Any
    ) -> tuple[torch.Tensor, None]:
        gqa_ratio = query.shape[1] // key.shape[1]
        mask = torch.stack([seen(KVHead(module.layer_idx, head), keys) for head, keys in enumerate(key[0])])
        key, value, mask = (part.repeat_interleave(gqa_ratio, -3) for part in (key, value, mask))
        logits = (query @ key.transpose(-1, -2) * scaling).masked_fill(~mask, -torch.inf)
        return (logits.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("masked", attention)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="masked")
    with torch.no_grad():
        logits = model(torch.tensor([list(tokens)]), use_cache=False).logits
    return torch.log_softmax(logits[0].float(), -1)
