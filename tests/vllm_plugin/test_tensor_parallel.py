"""Two ranks serve one plan: each its own KV heads, all with the pages of one page law, in the plan's order of heads."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the masked model is torch")

import torch

from tangram_plan.ir import Plan, TangramError, load_artefact
from tangram_plan.runtime.engine_args import engine_args
from tests.engine_runs import Query, Run, Served
from tests.engines import Engines
from tests.masked_model import masked_logprobs, seen_tokens
from tests.tiny_models import random_tokens

pytestmark = pytest.mark.slow

PROMPTS = (1, 17, 64, 65, 200, 300)
ANSWER = 8
TEXT_TOKENS = 400  # of a prompt whose log-probabilities are compared
SETTINGS = ("retention.sink_tokens=4", "retention.window_tokens=8", "grouping.max_groups=3")
ORDERS = {"original": (), "reordered": ("grouping.reorder_heads=true",)}
TWO_RANKS = "tensor_parallel=2"

LOADS = [
    [Query(random_tokens(length, length), ANSWER) for length in PROMPTS],
    [Query(random_tokens(TEXT_TOKENS, 0), ANSWER, prompt_logprobs=1)],
]


def ask(tiny: Engines, name: str, model: Path, artefact: Path | None) -> Served:
    return tiny.served(name, Run(str(model), str(artefact or ""), LOADS))


@pytest.fixture(scope="module")
def stock_alone(tiny: Engines) -> Served:
    """On one rank, without a plan."""
    return ask(tiny, "stock", tiny.model, None)


@pytest.fixture(scope="module", params=ORDERS)
def order(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def artefact(tiny: Engines, order: str) -> Path:
    """A plan for two ranks that compresses."""
    return tiny.artefact(0.3, TWO_RANKS, *SETTINGS, *ORDERS[order])


@pytest.fixture(scope="module")
def plan(artefact: Path) -> Plan:
    return load_artefact(artefact)


@pytest.fixture(scope="module")
def compressing(tiny: Engines, artefact: Path, order: str) -> Served:
    model = tiny.model if order == "original" else tiny.reordered(artefact)
    return ask(tiny, f"two-ranks-{order}", model, artefact)


def test_two_ranks_that_keep_everything_say_what_stock_says_on_one(tiny: Engines, stock_alone: Served) -> None:
    artefact = tiny.artefact(1.0, TWO_RANKS)
    assert ask(tiny, "two-ranks-keeping-all", tiny.model, artefact).tokens == stock_alone.tokens


def test_the_order_of_heads_is_another(plan: Plan, order: str) -> None:
    moved = {kv_head for kv_head in plan.model.kv_heads() if plan.head_order.original(kv_head) != kv_head}
    assert {kv_head.layer for kv_head in moved} == ({0, 1} if order == "reordered" else set())


def test_a_prompt_is_as_probable_as_to_the_masked_model(tiny: Engines, plan: Plan, compressing: Served) -> None:
    text = LOADS[1][0].prompt
    part_kept = {
        plan.head_order.original(kv_head): plan.grouping.groups[group].rho / 65536
        for _, group, _, kv_head in plan.grouping.columns()
    }
    lengths = TEXT_TOKENS, plan.compress_chunk_tokens, plan.budgets.sink_tokens, plan.budgets.window_tokens
    masks = {part: seen_tokens(range(len(text)), *lengths, part) for part in set(part_kept.values())}
    assert len(masks) > 2
    masked, swapped = (
        masked_logprobs(tiny.model, text, {kv_head: masks[part] for kv_head, part in parts.items()})
        for parts in (part_kept, dict(zip(part_kept, reversed(part_kept.values()), strict=True)))
    )
    found = compressing.prompt_logprobs[1][0]
    assert len(found) == TEXT_TOKENS - 1
    errors, errors_of_swapped = (
        torch.tensor(
            [
                abs(position[str(token)] - float(expected[place, token]))
                for place, (position, token) in enumerate(zip(found, text[1:], strict=True))
            ]
        )
        for expected in (masked, swapped)
    )
    assert errors.mean() < 1e-4
    assert errors.max() < 1e-3
    assert errors_of_swapped.mean() > 1e-2  # it matters which KV head keeps how much


def test_every_step_holds_the_pages_that_the_plan_says(compressing: Served) -> None:
    assert any(step.decodes and step.chunks for step in compressing.steps)
    assert [step.free_pages for step in compressing.steps] == [step.predicted for step in compressing.steps]
    assert set(compressing.free_pages) == {compressing.num_pages}


@pytest.mark.parametrize(("planned", "given"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_is_refused_in_one_line(tiny: Engines, planned: int, given: int) -> None:
    artefact = tiny.artefact(0.3, f"tensor_parallel={planned}", *SETTINGS)
    with pytest.raises(TangramError) as error:
        engine_args(artefact, model=str(tiny.model), tensor_parallel_size=given)
    assert str(error.value) == (
        f"--tensor-parallel-size: the plan is for another number of ranks: got {given}, expected {planned};"
        f" give --tensor-parallel-size {planned}, or build the plan for these ranks"
    )
