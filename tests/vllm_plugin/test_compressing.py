"""A plan that compresses: an engine holds the pages that the plan says, and computes what a model with masks computes."""

import math

import pytest

pytest.importorskip("torch", reason="the masked model is torch")

import torch

from tangram_plan.ir import KVHead, Plan
from tests.engine_runs import Served
from tests.engines import ALONE, LONG_ANSWER, NUM_SHORT, SINK_TOKENS, TEXT_TOKENS, Engines
from tests.masked_model import masked_logprobs, seen_tokens

pytestmark = pytest.mark.slow

FIRST_ALONE = 2  # loads
TEXT = FIRST_ALONE + len(ALONE)
NEEDLES = TEXT + 1


@pytest.fixture(scope="module")
def text(engines: Engines, compressing: Served) -> list[int]:
    """Prompt and answer."""
    return engines.tokens()["text"][:TEXT_TOKENS] + compressing.tokens[TEXT][0]


@pytest.fixture(scope="module")
def masked(engines: Engines, plan: Plan, text: list[int]) -> torch.Tensor:
    """Log-probabilities of a model whose masks are the plan's, in its own words."""
    part_kept = {kv_head: plan.grouping.groups[group].rho / 65536 for _, group, _, kv_head in plan.grouping.columns()}
    masks = {
        part: seen_tokens(range(len(text)), TEXT_TOKENS, 64, SINK_TOKENS, 32, part) for part in set(part_kept.values())
    }
    return masked_logprobs(engines.model, text, {kv_head: masks[part] for kv_head, part in part_kept.items()})


def test_every_step_holds_the_pages_that_the_plan_says(engines: Engines, compressing: Served) -> None:
    for served in (compressing, engines.under_pressure(0.3)):
        assert len(served.steps) > LONG_ANSWER
        assert [step.free_pages for step in served.steps] == [step.predicted for step in served.steps]


def test_a_finished_load_gives_every_page_back(compressing: Served) -> None:
    assert set(compressing.free_pages) == {compressing.num_pages}


def test_compression_leaves_room_for_more(keeping_all: Served, compressing: Served) -> None:
    fewest = [min(step.free_pages for step in served.steps) / served.num_pages for served in (keeping_all, compressing)]
    assert 1 - fewest[1] < 0.5 * (1 - fewest[0])


def test_preempted_requests_say_what_they_say_without(engines: Engines, compressing: Served) -> None:
    served = engines.under_pressure(0.3)
    assert served.preemptions[0] > 0
    assert len(served.tokens[0]) == NUM_SHORT
    assert served.tokens[0] == compressing.tokens[1]


def test_a_request_alone_says_what_it_says_in_a_batch(compressing: Served) -> None:
    alone = [load[0] for load in compressing.tokens[FIRST_ALONE:TEXT]]
    assert alone == [compressing.tokens[0][number] for number in ALONE]


def test_a_prompt_is_as_probable_as_to_the_masked_model(
    compressing: Served, text: list[int], masked: torch.Tensor
) -> None:
    found = compressing.prompt_logprobs[TEXT][0]
    assert len(found) == TEXT_TOKENS - 1
    errors = [
        abs(position[str(token)] - float(masked[place, token]))
        for place, (position, token) in enumerate(zip(found, text[1:], strict=False))
    ]
    assert sum(errors) / len(errors) < 1e-4
    assert max(errors) < 1e-3


def test_an_answer_is_distributed_as_by_the_masked_model(compressing: Served, masked: torch.Tensor) -> None:
    found = compressing.logprobs[TEXT][0]
    errors, divergences = [], []
    for position, expected in zip(found, masked[TEXT_TOKENS - 1 :], strict=False):
        pairs = [(logprob, float(expected[int(token)])) for token, logprob in position.items()]
        errors += [abs(one - other) for one, other in pairs]
        rest, expected_rest = (1 - sum(math.exp(pair[side]) for pair in pairs) for side in (0, 1))
        divergences.append(
            sum(math.exp(one) * (one - other) for one, other in pairs) + rest * math.log(rest / expected_rest)
        )
    assert len(errors) >= 20 * len(found)
    assert sum(errors) / len(errors) < 1e-4
    assert sum(divergences) / len(divergences) < 1e-6


def test_the_masked_model_would_see_another_selection(
    engines: Engines, plan: Plan, text: list[int], masked: torch.Tensor
) -> None:
    causal = torch.ones(len(text), len(text), dtype=torch.bool).tril()
    full = masked_logprobs(engines.model, text, dict.fromkeys(plan.model.kv_heads(), causal))
    places, next_tokens = torch.arange(len(text) - 1), torch.tensor(text[1:])
    losses = [-float(logprobs[places, next_tokens].mean()) for logprobs in (full, masked)]
    assert float((full - masked).abs().mean()) > 0.01
    assert losses[1] - losses[0] < 0.15  # nats a token: the text stays sane


def test_a_needle_among_the_sinks_or_in_the_window_is_found(engines: Engines, compressing: Served) -> None:
    among_sinks, in_window, nowhere = compressing.tokens[NEEDLES]
    answer = engines.tokens()["answer"]
    assert (among_sinks, in_window) == (answer, answer)
    assert nowhere != answer


def test_selection_in_words_is_what_a_hand_writes() -> None:
    # Chunks of 3; 1 sink, 1 in the window, half of the rest: of 3 tokens stay 3, of 6 stay 4, of 8 stay 5.
    seen = seen_tokens(range(9), 8, 3, 1, 1, 0.5)
    assert ["".join(str(int(one)) for one in row) for row in seen] == [
        "100000000",
        "110000000",
        "111000000",
        "111100000",
        "111110000",
        "111111000",
        "100111100",  # 0, and of 3 to 5 all
        "100111110",
        "100011111",  # 0, 4 to 7
    ]


def test_a_kv_head_is_masked_by_its_own_mask(engines: Engines) -> None:
    tokens = engines.tokens()["text"][:12]
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    blind = causal & (torch.eye(12, dtype=torch.bool) | (torch.arange(12) < 6)[:, None])
    heads = [KVHead(layer, head) for layer in range(30) for head in range(3)]
    plain = masked_logprobs(engines.model, tokens, dict.fromkeys(heads, causal))
    one = masked_logprobs(engines.model, tokens, {**dict.fromkeys(heads, causal), heads[4]: blind})
    assert torch.equal(one[:6], plain[:6])
    assert not torch.allclose(one[6:], plain[6:], atol=1e-3)
