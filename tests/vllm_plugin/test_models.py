"""Families of models, and quantised weights: an engine says what stock vLLM says, or a model with the plan's masks."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the masked model is torch")

from tangram_plan.ir import load_artefact
from tests.engine_runs import Query, Run, Served
from tests.engines import Engines
from tests.masked_model import masked_logprobs, seen_tokens
from tests.tiny_models import random_tokens

pytestmark = pytest.mark.slow

MODELS = ("mistral", "qwen2", "qwen2-int8")  # llama: SmolLM2, qwen3: test_tensor_parallel
SINKS, WINDOW, CHUNK = 4, 8, 64
PROMPTS = (300, 64, 17, 1)
SETTINGS = (f"retention.sink_tokens={SINKS}", f"retention.window_tokens={WINDOW}")


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest, engines_folder: Path) -> Engines:
    """Of a tiny model."""
    name, *quantised = str(request.param).split("-")
    return Engines.start_tiny(engines_folder, name, quantised=bool(quantised))


def is_quantised(engines: Engines) -> bool:
    """In int8."""
    return engines.folder.name.endswith("int8")


def served(engines: Engines, ratio: float | None) -> tuple[Path | None, Served]:
    """By a plan of this ratio, or by stock vLLM."""
    artefact = engines.artefact(ratio, *SETTINGS) if ratio else None
    queries = [Query(random_tokens(length, length), prompt_logprobs=1, logprobs=3) for length in PROMPTS]
    run = Run(str(engines.model), str(artefact or ""), [queries], {"max_model_len": 512, "skip_tokenizer_init": True})
    return artefact, engines.served(f"models-{ratio}", run)


def test_a_plan_that_keeps_everything_says_what_stock_says(family: Engines) -> None:
    (_, stock), (_, found) = served(family, None), served(family, 1.0)
    assert found.tokens == stock.tokens
    assert len(set(found.tokens[0][0])) > 3  # or nothing is said
    for position, expected in zip(found.logprobs[0][0], stock.logprobs[0][0], strict=True):
        assert position == pytest.approx(expected, abs=0.1 if is_quantised(family) else 1e-3)  # activations are rounded


def test_a_plan_that_compresses_says_what_a_masked_model_says(family: Engines) -> None:
    artefact, found = served(family, 0.3)
    assert [step.free_pages for step in found.steps] == [step.predicted for step in found.steps]
    if is_quantised(family):
        return  # transformers has no kernels for these weights
    assert artefact
    plan, tokens = load_artefact(artefact), random_tokens(PROMPTS[0], PROMPTS[0])
    part_kept = {kv_head: plan.grouping.groups[group].rho / 65536 for _, group, _, kv_head in plan.grouping.columns()}
    masks = {
        kv_head: seen_tokens(range(len(tokens)), len(tokens), CHUNK, SINKS, WINDOW, part)
        for kv_head, part in part_kept.items()
    }
    expected = masked_logprobs(family.model, tokens, masks)
    errors = [
        abs(position[str(token)] - float(expected[place, token]))
        for place, (position, token) in enumerate(zip(found.prompt_logprobs[0][0], tokens[1:], strict=True))
    ]
    assert len(errors) == PROMPTS[0] - 1
    assert max(errors) < 1e-3
