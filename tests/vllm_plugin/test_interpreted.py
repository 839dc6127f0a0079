"""The generated kernels in an engine without a GPU: Triton interprets them, and they say what the reference says."""

from dataclasses import replace

import pytest

from tangram_plan.ir import load_artefact
from tests.engine_runs import Query, Run, Served
from tests.engines import Engines
from tests.tiny_models import random_tokens

pytestmark = pytest.mark.slow

PROMPTS = (300, 148, 89, 65, 46, 44, 1)
ANSWER = 8
MAX_TOKENS = 320
SETTINGS = (
    "retention.sink_tokens=4",
    "retention.window_tokens=8",
    "compress_chunk_tokens=64",
    "max_new_tokens=16",
    "grouping.max_groups=3",
    "grouping.page_slots=64",
)


@pytest.fixture(scope="module")
def run(tiny: Engines) -> Run:
    """All prompts together, in a pool that holds them, but not their answers."""
    artefact = tiny.artefact(0.3, *SETTINGS)
    plan = load_artefact(artefact)
    num_pages = sum(plan.num_pages(prompt, prompt) for prompt in PROMPTS)
    queries = [Query(random_tokens(length, length), ANSWER, logprobs=5) for length in PROMPTS]
    arguments = {
        "max_model_len": MAX_TOKENS,
        "max_num_batched_tokens": 96,
        "kv_cache_memory_bytes": (num_pages + 1) * plan.layout.page_bytes,
    }
    return Run(str(tiny.model), str(artefact), [queries], arguments)


@pytest.fixture(scope="module")
def reference(tiny: Engines, run: Run) -> Served:
    return tiny.served("reference", run)


@pytest.fixture(scope="module")
def interpreted(tiny: Engines, run: Run) -> Served:
    return tiny.served("interpreted", replace(run, interpreted=True))


def test_kernels_in_an_engine_say_what_the_reference_says(reference: Served, interpreted: Served) -> None:
    assert interpreted.tokens == reference.tokens
    pairs = [
        (logprob, expected.get(token))
        for answer, expected_answer in zip(interpreted.logprobs[0], reference.logprobs[0], strict=True)
        for position, expected in zip(answer, expected_answer, strict=True)
        for token, logprob in position.items()
    ]
    errors = [abs(logprob - expected) for logprob, expected in pairs if expected is not None]
    assert len(errors) >= 0.99 * len(pairs) > 0
    assert max(errors) < 1e-4


def test_steps_of_all_kinds_were_tried(interpreted: Served) -> None:
    assert interpreted.preemptions[0] > 0
    assert any(step.decodes and step.chunks for step in interpreted.steps)
    assert any(step.chunks > 1 for step in interpreted.steps)
    assert [step.free_pages for step in interpreted.steps] == [step.predicted for step in interpreted.steps]
