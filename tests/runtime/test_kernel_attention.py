"""Steps of an engine through the generated kernels, in Triton's interpreter, against the reference."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest import mock

import pytest

pytest.importorskip("torch", reason="kernels take torch tensors")
pytest.importorskip("triton", reason="generated kernels are Triton")

from tests import serving_runs as runs
from tests.plans import valid_plan
from tests.serving_runs import Arrival

MIXED = [
    Arrival(0, 1, 9),
    Arrival(0, 40, 6),
    Arrival(1, 70, 3),
    Arrival(1, 17, 1),
    Arrival(2, 33, 4),
    Arrival(5, 64, 2),
]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A worker in which TRITON_INTERPRET was set before triton was imported; what this process imported does not matter."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
            executor.submit(os.getpid).result()
        yield executor


@pytest.mark.parametrize("scorer", ["recent", "key_anchor"])
def test_a_batch_that_changes_from_step_to_step(interpreter: ProcessPoolExecutor, scorer: str) -> None:
    plan = valid_plan(
        num_layers=2,
        num_kv_heads=2,
        gqa_ratio=2,
        head_dim=16,
        page_slots=64,
        rho=[30000, 9000],
        compress_chunk_tokens=16,
        max_new_tokens=32,
    )
    assert interpreter.submit(runs.run_engine, plan, MIXED, scorer=scorer).result() < 1e-5


def test_more_chunks_than_are_compressed_at_once(interpreter: ProcessPoolExecutor) -> None:
    plan = valid_plan(
        num_layers=1,
        num_kv_heads=2,
        gqa_ratio=1,
        head_dim=16,
        page_slots=64,
        rho=[20000],
        compress_chunk_tokens=16,
        max_new_tokens=32,
    )
    arrivals = [Arrival(0, prompt, 1) for prompt in range(20, 30)]
    assert interpreter.submit(runs.run_engine, plan, arrivals).result() < 1e-5


def test_a_preempted_request_computes_its_prompt_chunk_by_chunk_and_its_answer_in_one(
    interpreter: ProcessPoolExecutor,
) -> None:
    plan = valid_plan(
        num_layers=2,
        num_kv_heads=2,
        gqa_ratio=1,
        head_dim=16,
        page_slots=64,
        rho=[20000],
        compress_chunk_tokens=16,
        max_new_tokens=32,
    )
    arrivals = [Arrival(0, 40, 20, preempted_at=52), Arrival(0, 20, 25)]
    assert interpreter.submit(runs.run_engine, plan, arrivals).result() < 1e-5


def test_the_heads_of_the_second_rank(interpreter: ProcessPoolExecutor) -> None:
    plan = valid_plan(
        num_layers=2,
        num_kv_heads=4,
        gqa_ratio=1,
        head_dim=16,
        page_slots=64,
        tensor_parallel=2,
        rho=[30000, 0],
        compress_chunk_tokens=16,
        max_new_tokens=32,
    )
    assert interpreter.submit(runs.run_engine, plan, MIXED[:3], rank=1).result() < 1e-5
