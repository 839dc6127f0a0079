"""A plan that ranks tokens by their keys: an engine computes what a model computes that makes its masks of its own keys."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the masked model is torch")

import torch

from tangram_plan.ir import STATISTICS_FILE, KVHead, Plan, load_artefact
from tests.engine_runs import Query, Run, Served
from tests.engines import SINK_TOKENS, TEXT_TOKENS, Engines
from tests.masked_model import seen_tokens, self_masked_logprobs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def artefact(engines: Engines) -> Path:
    """As `engines.artefact(0.3)`, by another scorer."""
    return engines.artefact(0.3, "scorer=key_anchor")


@pytest.fixture(scope="module")
def served(engines: Engines, artefact: Path) -> Served:
    """A text, with the log-probabilities of its tokens."""
    prompt = engines.tokens()["text"][:TEXT_TOKENS]
    return engines.served("key-anchor", Run(str(engines.model), str(artefact), [[Query(prompt, prompt_logprobs=1)]]))


def masked_logprobs(engines: Engines, artefact: Path, tokens: list[int], *, shift: int = 0) -> torch.Tensor:
    """Of a model whose KV heads keep what is least like their anchor, or that of the KV head `shift` rows on."""
    plan = load_artefact(artefact)
    with np.load(artefact / STATISTICS_FILE) as arrays:
        anchors = torch.from_numpy(arrays["mean_keys"])
    rows = {kv_head: row for row, kv_head in enumerate(plan.model.kv_heads())}
    part_kept = parts_kept(plan)

    def seen(kv_head: KVHead, keys: torch.Tensor) -> torch.Tensor:
        anchor = anchors[(rows[kv_head] + shift) % len(rows)]
        scores = (-torch.nn.functional.cosine_similarity(keys, anchor, dim=-1)).tolist()
        return seen_tokens(scores, TEXT_TOKENS, 64, SINK_TOKENS, 32, part_kept[kv_head])

    return self_masked_logprobs(engines.model, tokens, seen)


def parts_kept(plan: Plan) -> dict[KVHead, float]:
    """Of the tokens that compete, by KV head."""
    return {kv_head: plan.grouping.groups[group].rho / 65536 for _, group, _, kv_head in plan.grouping.columns()}


def errors(served: Served, tokens: list[int], expected: torch.Tensor) -> list[float]:
    """Of the prompt's log-probabilities."""
    found = served.prompt_logprobs[0][0]
    assert len(found) == TEXT_TOKENS - 1
    return [
        abs(position[str(token)] - float(expected[place, token]))
        for place, (position, token) in enumerate(zip(found, tokens[1:], strict=True))
    ]


def test_a_prompt_is_as_probable_as_to_a_model_that_masks_itself(
    engines: Engines, artefact: Path, served: Served
) -> None:
    tokens = engines.tokens()["text"][:TEXT_TOKENS]
    found = errors(served, tokens, masked_logprobs(engines, artefact, tokens))
    assert sum(found) / len(found) < 1e-4
    assert max(found) < 1e-2  # where float32 sums put two tokens of nearly equal score in another order


def test_another_kv_heads_anchors_would_be_seen(engines: Engines, artefact: Path, served: Served) -> None:
    tokens = engines.tokens()["text"][:TEXT_TOKENS]
    found = errors(served, tokens, masked_logprobs(engines, artefact, tokens, shift=1))
    assert sum(found) / len(found) > 1e-2
