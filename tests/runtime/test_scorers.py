import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="scorers need torch")

from tangram_plan.runtime.scorers import ALWAYS_KEPT, SCORERS, KVzip, LayerAttention, Scorer, SnapKV, base  # noqa: E402


def _random_attention(num_queries: int = 9, num_keys: int = 17, **kwargs: Any) -> LayerAttention:
    """Two KV heads, three q_heads each."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(6, num_queries, 4, generator=generator)
    key, value = (torch.randn(2, num_keys, 4, generator=generator) for _ in range(2))
    return LayerAttention(0, query, key, value, scaling=0.5, **kwargs)


def _softmax_by_hand(attention: LayerAttention) -> np.ndarray:
    """[q_heads, queries, keys], one scalar at a time."""
    query, key = attention.query.tolist(), attention.key.tolist()
    gqa_ratio, offset = len(query) // len(key), len(key[0]) - len(query[0])
    result = np.zeros((len(query), len(query[0]), len(key[0])))
    for q_head, rows in enumerate(query):
        for i, row in enumerate(rows):
            logits = [
                attention.scaling * sum(a * b for a, b in zip(row, k, strict=True))
                for k in key[q_head // gqa_ratio][: offset + i + 1]
            ]
            if attention.softcap:
                logits = [attention.softcap * math.tanh(logit / attention.softcap) for logit in logits]
            sink = math.exp(float(attention.sinks[q_head])) if attention.sinks is not None else 0.0
            total = sum(map(math.exp, logits)) + sink
            result[q_head, i, : len(logits)] = [math.exp(logit) / total for logit in logits]
    return result


@pytest.mark.parametrize("block_bytes", [1, 4 * 6 * 17 * 2, 1 << 20])
@pytest.mark.parametrize("kwargs", [{}, {"softcap": 0.7}, {"sinks": torch.linspace(-1, 2, 6)}])
def test_probabilities_are_the_causal_softmax_whatever_the_block_size(
    kwargs: dict[str, Any], block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "PROBABILITY_BYTES", block_bytes)
    attention = _random_attention(**kwargs)
    blocks = list(attention.probabilities())
    assert len(blocks) == {1: 9, 4 * 6 * 17 * 2: 5, 1 << 20: 1}[block_bytes]
    found = torch.cat(blocks, 2).flatten(0, 1).numpy()
    np.testing.assert_allclose(found, _softmax_by_hand(attention), atol=1e-6)


def test_probabilities_follow_a_mask() -> None:
    mask = torch.zeros(1, 1, 9, 17, dtype=torch.bool)
    mask[..., 3:5] = True
    (block,) = _random_attention().probabilities(mask=mask)
    assert torch.equal(block != 0, mask.expand(2, 3, 9, 17))
    torch.testing.assert_close(block.sum(-1), torch.ones(2, 3, 9))


def test_kvzip_is_the_highest_probability_over_the_group_and_the_repeat_queries() -> None:
    attention = _random_attention()
    expected = _softmax_by_hand(attention).reshape(2, 3, 9, 17).max((1, 2))[:, :8]
    np.testing.assert_allclose(KVzip().score(attention, 8), expected, atol=1e-6)


def test_kvzip_of_two_tokens_computed_on_paper() -> None:
    # Context keys 0 and ln 2, repeat key 0; q_heads 1 and -1: probabilities (1, 2, 1)/4 and (1, 1/2, 1)/2.5.
    key = torch.tensor([[[0.0], [math.log(2)], [0.0]]])
    query = torch.tensor([[[1.0]], [[-1.0]]])
    scores = KVzip().score(LayerAttention(0, query, key, key, scaling=1.0), 2)
    torch.testing.assert_close(scores, torch.tensor([[0.4, 0.5]]))


def test_snapkv_is_the_pooled_mean_attention_of_the_window() -> None:
    attention = _random_attention(num_queries=17)
    scores = SnapKV(window_tokens=4, kernel_tokens=3).score(attention, 17).numpy()
    votes = _softmax_by_hand(attention).reshape(2, 3, 17, 17)[:, :, -4:, :13].mean((1, 2))
    padded = np.pad(votes, ((0, 0), (1, 1)))
    np.testing.assert_allclose(scores[:, :13], (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3, atol=1e-6)
    assert (scores[:, 13:] == np.float32(ALWAYS_KEPT)).all()


def test_snapkv_keeps_everything_when_the_window_covers_the_prompt() -> None:
    scores = SnapKV().score(_random_attention(num_queries=9, num_keys=9), 9)
    assert scores.shape == (2, 9)
    assert (scores == ALWAYS_KEPT).all()


@pytest.mark.parametrize("scorer", SCORERS.values(), ids=list(SCORERS))
def test_every_scorer_gives_a_finite_float32_score_per_kv_head_and_token(scorer: Scorer) -> None:
    attention = _random_attention(num_queries=50, num_keys=50)
    scores = scorer.score(attention, 50)
    assert (scores.shape, scores.dtype) == ((2, 50), torch.float32)
    assert torch.isfinite(scores).all()
    assert torch.equal(scores, scorer.score(attention, 50))


@pytest.mark.parametrize("scorer", SCORERS.values(), ids=list(SCORERS))
def test_every_scorer_takes_half_precision(scorer: Scorer) -> None:
    full = _random_attention(num_queries=50, num_keys=50)
    half = LayerAttention(0, full.query.bfloat16(), full.key.bfloat16(), full.value.bfloat16(), full.scaling)
    torch.testing.assert_close(scorer.score(half, 50), scorer.score(full, 50), atol=0.03, rtol=0.1)


def test_registry_keys_are_the_scorers_names() -> None:
    assert all(name == scorer.name for name, scorer in SCORERS.items())
