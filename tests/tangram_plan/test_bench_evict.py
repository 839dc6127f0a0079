import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("torch", reason="kernels take torch tensors")
pytest.importorskip("triton", reason="generated kernels are Triton")

from rich.console import Console

from tangram_plan.bench.evict import EvictionCase, bench_evict, case_bytes, evict_tables, timed_chunks
from tangram_plan.ir import KVDtype, Plan, TangramError
from tests.eviction_runs import load
from tests.plans import valid_plan

PLAN = valid_plan(num_layers=2, num_kv_heads=2, head_dim=16, dtype=KVDtype.BFLOAT16)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
            executor.submit(os.getpid).result()
        yield executor


def run_case(plan: Plan, prompt_tokens: int, chunk_start: int, chunk_tokens: int) -> tuple[int, int, int]:
    """(tokens held, tokens moved, bytes) of a case, checked twice."""
    case = EvictionCase(load(plan), prompt_tokens, chunk_start, chunk_tokens)
    for _ in range(2):
        case.check()
    return case.held_tokens, case.moved_tokens(), case.used_bytes()


def run_wrong_case(plan: Plan) -> None:
    """A check of a case whose cache was changed after the reference saw it."""
    case = EvictionCase(load(plan), 200, 100, 50)
    run = case.run

    def run_and_spoil() -> None:
        run()
        case.pool.zero_()

    with mock.patch.object(case, "run", run_and_spoil):
        case.check()


def test_a_case_is_right_however_often_it_runs(interpreter: ProcessPoolExecutor) -> None:
    held, moved, used = interpreter.submit(run_case, PLAN, 200, 100, 50).result()
    assert held == sum(PLAN.group_tokens(group_id, 200, 100) for _, group_id, _, _ in PLAN.grouping.columns())
    assert 0 < moved <= 4 * 50
    assert used == 4 * 50 * 16 * 2 + (held + 4 * 50) * 8 + moved * 2 * PLAN.layout.slot_bytes


def test_a_first_chunk_fills_what_stays(interpreter: ProcessPoolExecutor) -> None:
    held, moved, _ = interpreter.submit(run_case, PLAN, 200, 0, 100).result()
    assert held == 0
    assert moved == sum(PLAN.group_tokens(group_id, 200, 100) for _, group_id, _, _ in PLAN.grouping.columns())


def test_a_wrong_cache_is_refused(interpreter: ProcessPoolExecutor) -> None:
    with pytest.raises(TangramError, match="layer 0, KV head 0: eviction is wrong"):
        interpreter.submit(run_wrong_case, PLAN).result()


def test_first_middle_and_last_chunks_are_timed() -> None:
    assert timed_chunks(102400, 8192) == [("first", 0, 8192), ("middle", 49152, 8192), ("last", 98304, 4096)]
    assert timed_chunks(100, 64) == [("first", 0, 64), ("last", 64, 36)]
    assert timed_chunks(10, 64) == [("first", 0, 10)]


def test_figures_are_readable() -> None:
    case = {
        "chunk": "first", "chunk_start": 0, "chunk_tokens": 8192, "held_tokens": 0.0, "moved_tokens": 9000.5, "score_us": 6.0,
        "us": 60.0, "overlapped_us": 50.0, "bytes": 2e7, "share": 0.25, "overlapped_share": 0.3, "workspace_bytes": 9,
    }  # fmt: skip
    result = {"gpu": "a GPU", "read_bandwidth_gb_s": 4000.0, "prompt_tokens": 102400, "cases": [case]}
    console = Console(width=200)
    with console.capture() as captured:
        console.print(evict_tables(result))
    assert "102,400" in captured.get()
    assert "25%, overlapped 30%" in captured.get()


def test_case_bytes_grow_with_the_context() -> None:
    assert case_bytes(PLAN, 2000, 1900, 100) > case_bytes(PLAN, 2000, 100, 100) > 0


def test_without_a_gpu_the_error_is_one_line(tmp_path: Path) -> None:
    with (
        mock.patch("torch.cuda.is_available", return_value=False),
        pytest.raises(TangramError, match="bench evict: no CUDA device"),
    ):
        bench_evict(tmp_path)
