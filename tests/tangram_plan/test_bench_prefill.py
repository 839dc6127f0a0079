import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch", reason="kernels take torch tensors")
pytest.importorskip("triton", reason="generated kernels are Triton")

from rich.console import Console

from tangram_plan.bench import prefill as bench
from tangram_plan.bench.prefill import PATHS, PrefillCase, bench_prefill, prefill_tables, sampled_layers, time_layer
from tangram_plan.ir import AttentionForm, KVDtype, Plan, TangramError
from tests.plans import valid_plan
from tests.prefill_runs import load

PLAN = valid_plan(num_layers=2, num_kv_heads=2, gqa_ratio=2, head_dim=16, dtype=KVDtype.BFLOAT16)
PROMPT_TOKENS, CHUNK_TOKENS = 150, 64


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
            executor.submit(os.getpid).result()
        yield executor


def run_layer(plan: Plan) -> dict[str, Any]:
    """The figures of a checked layer, each launch of which counts as a millisecond."""

    def count(run: Any) -> float:
        run()
        return 1e3

    case = PrefillCase(load(plan), 0, PROMPT_TOKENS, CHUNK_TOKENS)
    case.check()
    with mock.patch.object(bench, "time_graph", count):
        return time_layer(case)


def run_wrong_layer(plan: Plan, path: str) -> None:
    """A check of a layer of which one path spoils its output."""
    case = PrefillCase(load(plan), 0, PROMPT_TOKENS, CHUNK_TOKENS)
    run = case.run

    def run_and_spoil(wanted: str, start: int) -> None:
        run(wanted, start)
        if wanted == path:
            case.out[-1] += 1

    with mock.patch.object(case, "run", run_and_spoil):
        case.check()


def test_every_chunk_is_timed_by_every_path(interpreter: ProcessPoolExecutor) -> None:
    found = interpreter.submit(run_layer, PLAN).result()
    assert [chunk["start"] for chunk in found["chunks"]] == [0, 64, 128]
    assert all(chunk[f"{path}_ms"] == 1.0 for chunk in found["chunks"] for path in PATHS)
    assert [chunk["copy_ms"] for chunk in found["chunks"]] == [0.0, 1.0, 1.0]
    assert found["full_ms"] == found["gather_ms"] == found["paged_ms"] == 3.0
    assert 0 < found["kept"] < 1
    first, last = found["chunks"][0], found["chunks"][-1]
    assert first["full_tflops"] == first["paged_tflops"] == 4 * 4 * 16 * (64 * 65 / 2) / 1e9
    assert last["full_tflops"] == 4 * 4 * 16 * (22 * 128 + 22 * 23 / 2) / 1e9
    assert last["paged_tflops"] == last["gather_tflops"] < last["full_tflops"]


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_output_is_refused(interpreter: ProcessPoolExecutor, path: str) -> None:
    with pytest.raises(TangramError, match=f"layer 0, chunk at 0, token 63: {path} is wrong"):
        interpreter.submit(run_wrong_layer, PLAN, path).result()


def test_layers_that_keep_least_and_most_are_sampled() -> None:
    plan = valid_plan(num_layers=5, num_kv_heads=1, group_sizes=[1, 1, 1, 1, 1], rho=[30000, 20000, 10000, 5000, 1000])
    assert sampled_layers(plan, 4096) == [4, 2, 0]
    assert sampled_layers(valid_plan(num_layers=1), 4096) == [0]


def test_figures_are_readable() -> None:
    chunk = {f"{path}_{unit}": value for path in PATHS for unit, value in (("ms", 10.0), ("tflops", 612.3))}
    layer = {
        "layer": 7, "kept": 0.25, "full_ms": 132.0, "gather_ms": 40.0, "paged_ms": 66.0, "copy_ms": 0.34, "chunks": [chunk],
    }  # fmt: skip
    result = {"gpu": "a GPU", "prompt_tokens": 102400, "chunk_tokens": 8192, "library": "a library", "layers": [layer]}
    console = Console(width=240)
    with console.capture() as captured:
        console.print(prefill_tables(result | {"speedup": {"full": 1.0, "gather": 3.3, "paged": 2.0}}))
    for text in ("102,400", "a library", "25.0%", "3.30", "2.00", "612"):
        assert text in captured.get()


def test_without_a_gpu_the_error_is_one_line(tmp_path: Path) -> None:
    with (
        mock.patch("torch.cuda.is_available", return_value=False),
        pytest.raises(TangramError, match="bench prefill: no CUDA device"),
    ):
        bench_prefill(tmp_path, quiet=True)


def test_a_form_that_only_the_kernel_has_is_timed_without_a_library(interpreter: ProcessPoolExecutor) -> None:
    form = AttentionForm(0.25, logit_softcap=20.0, has_sinks=True)
    plan = replace(PLAN, model=replace(PLAN.model, attention=form))
    with pytest.raises(TangramError, match="no library attention has this form here"):
        interpreter.submit(run_layer, plan).result()


def reason_on_the_cpu(plan: Plan) -> str:
    """What is said of a case whose device FlashAttention 3 does not know."""
    return PrefillCase(load(plan), 0, PROMPT_TOKENS, CHUNK_TOKENS).missing_library()


def test_a_missing_library_is_not_passed_over_in_silence(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(reason_on_the_cpu, PLAN).result().startswith(": no FlashAttention 3, ")
