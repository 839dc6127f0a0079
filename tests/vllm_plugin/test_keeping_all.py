"""A plan that keeps everything: an engine serves from it what stock vLLM says, however its steps are cut."""

import pytest

from tests.engine_runs import Run, Served
from tests.engines import Engines

pytestmark = pytest.mark.slow


def test_tokens_are_those_of_stock(stock: Served, keeping_all: Served) -> None:
    assert keeping_all.tokens == stock.tokens


@pytest.mark.parametrize("max_num_batched_tokens", [128, 4096])
def test_tokens_do_not_depend_on_the_token_budget_of_a_step(
    engines: Engines, stock: Served, max_num_batched_tokens: int
) -> None:
    arguments = {"max_num_batched_tokens": max_num_batched_tokens}
    run = Run(str(engines.model), str(engines.artefact(1.0)), engines.loads()[:1], arguments)
    assert engines.served(f"budget-{max_num_batched_tokens}", run).tokens == stock.tokens[:1]


def test_an_engine_in_its_own_process_says_the_same(engines: Engines, stock: Served) -> None:
    run = Run(str(engines.model), str(engines.artefact(1.0)), engines.loads()[:1], own_process=True)
    assert engines.served("own-process", run).tokens == stock.tokens[:1]


def test_preempted_requests_say_the_same(engines: Engines, stock: Served) -> None:
    served = engines.under_pressure(1.0)
    assert served.preemptions[0] > 0
    assert served.tokens == stock.tokens[1:]


def test_without_a_plan_the_plugin_changes_nothing(engines: Engines, stock: Served) -> None:
    run = Run(str(engines.model), "", engines.loads()[:1], with_plugin=False)
    bare = engines.served("no-plugin", run)
    assert (bare.tokens, bare.num_pages) == (stock.tokens[:1], stock.num_pages)
