"""Generated kernels against the reference, in Triton's interpreter; and ahead-of-time compilation without a GPU."""

import json
import os
import tempfile
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

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangram_plan.codegen import emit
from tangram_plan.ir import RHO_ONE, AttentionForm, CheckFailedError, KVDtype, TangramError
from tangram_plan.runtime import kernel_check
from tangram_plan.runtime.decode_problem import Batch, planned_splits
from tangram_plan.runtime.head_tables import load_head_tables
from tangram_plan.runtime.kernel_check import ARCHITECTURES, SHARED_MEMORY_BYTES, check_kernels, compile_report
from tests import kernel_runs as runs
from tests.plans import build_plan, valid_plan

NO_DEADLINE = settings(deadline=None, max_examples=12, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
CHECKED_PLAN = valid_plan(
    num_layers=1,
    num_kv_heads=2,
    gqa_ratio=1,
    head_dim=16,
    page_slots=64,
    group_sizes=[2],
    rho=[20000],
    tile_tokens=16,
    num_ctas=9,
)
UNSPLIT = CHECKED_PLAN.partition.static_splits[-1]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A worker in which TRITON_INTERPRET was set before triton was imported; what this process imported does not matter."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
            executor.submit(os.getpid).result()
        yield executor


@given(data=st.data())
@NO_DEADLINE
def test_kernels_agree_with_the_reference(interpreter: ProcessPoolExecutor, data: st.DataObject) -> None:
    """Random laws, groups, lengths from nothing to past a page, and numbers of CTAs and splits."""
    tensor_parallel = data.draw(st.sampled_from([1, 2]))
    plan = build_plan(  # a random law need not save a byte
        num_layers=2,
        num_kv_heads=2 * tensor_parallel,
        gqa_ratio=data.draw(st.sampled_from([1, 2, 3])),
        head_dim=data.draw(st.sampled_from([16, 24, 64])),
        page_slots=data.draw(st.sampled_from([48, 64, 112])),
        tensor_parallel=tensor_parallel,
        sink_tokens=data.draw(st.integers(0, 5)),
        window_tokens=data.draw(st.integers(0, 20)),
        rho=sorted(data.draw(st.lists(st.integers(0, RHO_ONE), min_size=1, max_size=4)), reverse=True),
        tile_tokens=data.draw(st.sampled_from([16, 32, 48])),
    )
    tokens = st.integers(0, 110)
    batch = data.draw(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=3))
    num_ctas, splits = data.draw(st.integers(1, 20)), data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=2))
    rank, layer = data.draw(st.integers(0, tensor_parallel - 1)), data.draw(st.integers(0, 1))
    errors = interpreter.submit(runs.run_layer, plan, rank, layer, batch, num_ctas, splits).result()
    assert max(errors) < runs.TOLERANCES[KVDtype.FLOAT32]


@given(data=st.data())
@NO_DEADLINE
def test_page_tables_are_the_rows_taken_apart(interpreter: ProcessPoolExecutor, data: st.DataObject) -> None:
    """Random laws and group sizes, prompts and answers of any length."""
    plan = build_plan(
        num_layers=2,
        num_kv_heads=3,
        gqa_ratio=1,
        head_dim=16,
        page_slots=data.draw(st.sampled_from([48, 64, 112])),
        sink_tokens=data.draw(st.integers(0, 5)),
        window_tokens=data.draw(st.integers(0, 20)),
        group_sizes=data.draw(st.sampled_from([[3, 3], [1, 2, 3], [1, 1, 1, 1, 1, 1]])),
        rho=sorted(data.draw(st.lists(st.integers(0, RHO_ONE), min_size=6, max_size=6)), reverse=True),
    )
    lengths = st.one_of(st.just((0, 0)), st.tuples(st.integers(1, 3000), st.integers(1, 3400)))
    batch = data.draw(st.lists(lengths, min_size=1, max_size=4))
    assert interpreter.submit(runs.run_page_table, plan, batch).result() == 0.0


@pytest.mark.parametrize("gqa_ratio", [1, 4, 5, 6, 7, 16, 71])
def test_any_gqa_ratio(interpreter: ProcessPoolExecutor, gqa_ratio: int) -> None:
    plan = valid_plan(num_layers=1, num_kv_heads=1, gqa_ratio=gqa_ratio, head_dim=64, page_slots=32)
    errors = interpreter.submit(runs.run_layer, plan, 0, 0, [(40, 45)], 2, [2]).result()
    assert max(errors) < runs.TOLERANCES[KVDtype.FLOAT32]


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(head_dim, KVDtype.BFLOAT16) for head_dim in (8, 64, 72, 80, 96, 112, 128, 192, 256)]
    + [(head_dim, dtype) for head_dim in (72, 256) for dtype in (KVDtype.FLOAT16, KVDtype.FLOAT32)],
)
def test_any_head_dim_and_dtype(interpreter: ProcessPoolExecutor, head_dim: int, dtype: KVDtype) -> None:
    plan = valid_plan(num_layers=1, num_kv_heads=2, gqa_ratio=2, head_dim=head_dim, dtype=dtype, page_slots=32)
    errors = interpreter.submit(runs.run_layer, plan, 0, 0, [(60, 61), (1, 1)], 2, [2]).result()
    assert max(errors) < runs.TOLERANCES[dtype]


@pytest.mark.parametrize(
    "form",
    [
        AttentionForm(0.5, logit_softcap=3.0),
        AttentionForm(0.25, has_sinks=True),
        AttentionForm(0.5, logit_softcap=3.0, has_sinks=True),
    ],
)
def test_soft_cap_and_sinks(interpreter: ProcessPoolExecutor, form: AttentionForm) -> None:
    plan = valid_plan(num_layers=1, num_kv_heads=2, gqa_ratio=3, page_slots=48)
    plan = replace(plan, model=replace(plan.model, attention=form))
    batch = [(60, 61), (1, 1), (5, 0), (1, 300)]
    errors = interpreter.submit(runs.run_layer, plan, 0, 0, batch, 40, [2, 20]).result()
    assert max(errors) < runs.TOLERANCES[KVDtype.FLOAT32]


@pytest.mark.parametrize(
    ("batch", "num_ctas"),
    [
        pytest.param([(0, 0), (50, 0)], 3, id="no tile"),
        pytest.param([(1, 1)], 50, id="fewer tiles than CTAs"),
        pytest.param([(9, 0), (70, 70), (3, 0), (0, 0), (1, 40), (70, 0)], 4, id="padded rows anywhere"),
        pytest.param([(1, n) for n in (15, 16, 17, 31, 32, 33)], 5, id="edges of pages and tiles"),
        pytest.param([(1, 300)], 1, id="one CTA"),
        pytest.param([(1, 700)], 40, id="more partials than a merge reads at once"),
    ],
)
def test_ragged_batches(interpreter: ProcessPoolExecutor, batch: Batch, num_ctas: int) -> None:
    plan = valid_plan(num_layers=2, num_kv_heads=3, gqa_ratio=2, page_slots=48, tile_tokens=16)
    errors = interpreter.submit(runs.run_layer, plan, 0, 1, batch, num_ctas, [20, 1, 3]).result()
    assert max(errors) < runs.TOLERANCES[KVDtype.FLOAT32]


def test_law_in_the_kernel_is_the_page_law(interpreter: ProcessPoolExecutor) -> None:
    """To the token, also where `rho * P` leaves 32 bits; in the middle of a prompt and of an answer."""
    rho = (65536, 65535, 40000, 32769, 1311, 2, 1, 0)
    plan = build_plan(num_layers=1, num_kv_heads=8, rho=rho, group_sizes=[1] * 8, splits=[1])
    prompts = [0, 1, 11, 12, 13, 32767, 32768, 65535, 65536, 131072, 1000003, 2**20]
    batch = [(prompt, total) for prompt in prompts for total in (0, prompt // 2, prompt, prompt + 1, prompt + 777)]
    found = interpreter.submit(runs.held_in_kernel, plan, batch).result()
    assert found == [[plan.group_tokens(group_id, *request) for group_id in range(8)] for request in batch]


@given(
    laws=st.tuples(st.integers(0, 200), st.integers(0, 4096), st.integers(0, RHO_ONE)),
    batch=st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 2**20)), min_size=1, max_size=50),
)
@NO_DEADLINE
def test_any_law(interpreter: ProcessPoolExecutor, laws: tuple[int, int, int], batch: Batch) -> None:
    sink, window, rho = laws
    plan = build_plan(num_layers=1, num_kv_heads=1, rho=[rho], sink_tokens=sink, window_tokens=window, splits=[1])
    found = interpreter.submit(runs.held_in_kernel, plan, batch).result()
    assert found == [[plan.group_tokens(0, *request)] for request in batch]


def test_page_ids_beyond_16_bits(interpreter: ProcessPoolExecutor) -> None:
    plan = valid_plan(num_layers=1, num_kv_heads=1, head_dim=16, page_slots=16, dtype=KVDtype.FLOAT16)
    errors = interpreter.submit(runs.run_with_page_ids, plan, [65535, 3, 65536, 131072], 131073).result()
    assert max(errors) < runs.TOLERANCES[KVDtype.FLOAT16]


def test_pool_beyond_2_to_31_elements(interpreter: ProcessPoolExecutor) -> None:
    plan = valid_plan(num_layers=1, num_kv_heads=1, head_dim=64, page_slots=256, dtype=KVDtype.FLOAT16)
    num_pages = 2**31 // plan.layout.page_elements + 10
    errors = interpreter.submit(runs.run_with_page_ids, plan, [num_pages - 1, 0, num_pages - 2], num_pages).result()
    assert max(errors) < runs.TOLERANCES[KVDtype.FLOAT16]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("+ tl.exp2(sink - top)", "", id="sinks without weight"),
        pytest.param("tanh * (LOGIT_SOFTCAP * LOG2_E)", "capped * (LOGIT_SOFTCAP * LOG2_E)", id="not capped"),
    ],
)
def test_the_check_sees_a_broken_form_of_attention(interpreter: ProcessPoolExecutor, old: str, new: str) -> None:
    form = AttentionForm(0.5, logit_softcap=2.0, has_sinks=True)
    plan = replace(CHECKED_PLAN, model=replace(CHECKED_PLAN.model, attention=form))
    found = interpreter.submit(runs.run_mutated, plan, "decode_", old, new).result()
    assert float(str(found["decode_attention_d16_gqa1_float32"]["max_error"])) > 1e-3


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        pytest.param("decode_", "mask = valid[:, None] & in_head[None, :]", "mask = in_head[None, :]", id="no mask"),
        pytest.param("decode_", "tl.where(valid[None, :], scores, NOTHING)", "scores", id="scores not masked"),
        pytest.param("decode_", "(column - page) * tokens_per_page", "-page * tokens_per_page", id="column forgotten"),
        pytest.param(
            "decode_", "page_of(following, reciprocal)", "page_of(token, reciprocal)", id="page of the step before"
        ),
        pytest.param("plan_", "(end == held) & (start < end)", "start < end", id="new token in every segment"),
        pytest.param(
            "decode_", "weight * correction + probability\n", "weight * correction\n", id="new token without weight"
        ),
        pytest.param("decode_", "position_word + PAGE_SLOTS, ", "position_word, ", id="score over position"),
        pytest.param("decode_", "new_ptr + PAGE_SLOTS * HEAD_DIM + dims, new_v", "new_ptr + dims, new_v", id="value"),
        pytest.param("decode_", "== expected - 1", "== expected", id="nobody merges"),
        pytest.param("decode_", "tl.store(arrivals_ptr, 0)", "pass", id="arrivals left behind"),
        pytest.param("decode_", "tl.exp2(lses[place] - new_highest)", "1.0", id="weights forgotten"),
        pytest.param(
            "decode_", "num_blocks, MERGE_PARTIALS)", "num_blocks, 1)", id="blocks merged with the wrong slots"
        ),
        pytest.param("plan_tile_queue", "cta + pair, first_cta", "cta, first_cta", id="slots not unique"),
        pytest.param(
            "plan_tile_queue", "tl.minimum(num_ctas.to(tl.int64), num_tiles)", "num_ctas.to(tl.int64)", id="idle CTAs"
        ),
        pytest.param("plan_tile_queue", "tl.minimum(tile_end, pair_end)", "pair_end", id="segment too long"),
        pytest.param(
            "plan_tile_queue", "tl.maximum(tl.cdiv(held, TILE_TOKENS), 1)", "tl.cdiv(held, TILE_TOKENS)", id="no tile"
        ),
        pytest.param("plan_tile_queue", "queued + tl.cumsum", "tl.cumsum", id="sums of a part"),
        pytest.param(
            "plan_tile_queue", "pair_end + SEGMENT_TILES < tile_end", "pair_end < tile_end", id="overhead forgotten"
        ),
        pytest.param("plan_", "+ 65535) // 65536", ") // 65536", id="law rounded down"),
        pytest.param("plan_", "tl.where(has_new, end - 1, end)", "end", id="new token read from its page"),
        pytest.param(
            "plan_", "tl.where(has_new, num_tokens - 1, -1)", "tl.where(has_new, num_tokens, -1)", id="position"
        ),
        pytest.param("plan_static_splits", "(split - head_split) * kv_chunk_size", "split * kv_chunk_size", id="start"),
        pytest.param(
            "plan_static_splits", "tl.cdiv(held, tl.maximum(num_partials, 1))", "held // num_partials", id="tail"
        ),
        pytest.param("plan_static_splits", "tl.minimum(start + kv_chunk_size, held)", "held", id="no end"),
        pytest.param(
            "plan_static_splits", "request * num_splits + head_split", "request * num_splits", id="first slot"
        ),
    ],
)
def test_the_check_sees_a_broken_kernel(interpreter: ProcessPoolExecutor, kernel: str, old: str, new: str) -> None:
    """Even in a plan that splits nothing."""
    plan = replace(CHECKED_PLAN, partition=replace(CHECKED_PLAN.partition, static_splits=(UNSPLIT,)))
    found = interpreter.submit(runs.run_mutated, plan, kernel, old, new).result()
    assert max(float(str(finding.get("max_error", "inf"))) for finding in found.values()) > 1e-3


def test_planned_splits_are_checked_as_planned_up_to_a_limit() -> None:
    assert set(UNSPLIT.splits.values()) == {1}
    plan = valid_plan(num_layers=1, num_kv_heads=2, splits=(9, 3), num_ctas=12, batches=(1, 4))
    with tempfile.TemporaryDirectory() as folder:
        emit(plan, "0" * 64, Path(folder))
        assert planned_splits(load_head_tables(Path(folder)), 0, [0, 1]) == [(5, 3), (1, 1)]


def test_the_check_accepts_kernels_as_generated(interpreter: ProcessPoolExecutor) -> None:
    found = interpreter.submit(runs.run_as_generated, CHECKED_PLAN).result()
    assert len(found) == 10
    for finding in found.values():
        assert finding.keys() == {"max_error"}
        assert float(str(finding["max_error"])) < runs.TOLERANCES[KVDtype.FLOAT32]


@pytest.mark.parametrize(
    ("constant", "other"),
    [("RHO", {"rho": (65536, 100, 0)}), ("BATCHES", {"batches": (1, 5)}), ("SPLITS", {"splits": (2, 2, 1)})],
)
def test_head_tables_of_another_plan_are_refused(tmp_path: Path, constant: str, other: dict[str, Any]) -> None:
    emit(valid_plan(num_layers=1), "0" * 64, tmp_path)
    with pytest.raises(CheckFailedError, match=rf"head_tables.py, {constant}: generated constant is not the plan's"):
        check_kernels(tmp_path, valid_plan(num_layers=1, **other))


def test_missing_kernels_and_packages_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(TangramError, match="no generated kernels"):
        check_kernels(tmp_path, valid_plan())
    with (
        mock.patch("importlib.util.find_spec", return_value=None),
        pytest.raises(CheckFailedError, match=r"no torch and no triton; run `pip install 'tangram-plan\[verify\]'`"),
    ):
        check_kernels(tmp_path, valid_plan())


@pytest.mark.slow
def test_check_kernels_runs_and_compiles_everything(tmp_path: Path) -> None:
    plan = valid_plan(dtype=KVDtype.BFLOAT16, tensor_parallel=2, tile_tokens=128)
    files = emit(plan, "0" * 64, tmp_path)
    results = check_kernels(tmp_path, plan)
    assert [f"{result.name}.py" for result in results] == [
        f.name for f in files if f.suffix == ".py" and f.stem != "head_tables"
    ]
    assert all(result.ok for result in results), results
    assert all(compiled.registers > 8 for result in results for compiled in result.compiled.values())
    assert max(compiled.shared_memory_bytes for result in results for compiled in result.compiled.values()) > 1000
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == files  # the check leaves nothing behind
    report = json.loads(json.dumps(compile_report(results)))
    (kernels,) = report["triton"].values()
    assert set(kernels["plan_tile_queue"]) == {"sm_80", "sm_90", "sm_100"}


@pytest.mark.slow
def test_a_kernel_that_does_not_compile_is_reported(tmp_path: Path) -> None:
    plan = valid_plan(num_layers=1, num_kv_heads=1, gqa_ratio=1)
    (path,) = (path for path in emit(plan, "0" * 64, tmp_path) if "decode_" in path.name)
    path.write_text(path.read_text().replace("tl.max(scores, 1)", "tl.no_such_thing(scores, 1)"))
    (bad,) = (result for result in check_kernels(tmp_path, plan) if not result.ok)
    assert bad.name == path.stem
    assert "sm_80" in bad.error
    assert not bad.compiled


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(KVDtype))
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 112, 128, 192, 256])
def test_decode_kernels_compile_and_fit_everywhere(tmp_path: Path, head_dim: int, dtype: KVDtype) -> None:
    gqa_ratio = {64: 71, 256: 16}.get(head_dim, 5)
    plan = valid_plan(gqa_ratio=gqa_ratio, head_dim=head_dim, dtype=dtype, tile_tokens=128, page_slots=256)
    emit(plan, "0" * 64, tmp_path)
    for path in (tmp_path / "kernels").glob("*.py"):
        if not path.stem.startswith(("decode_", "head_tables")):
            path.unlink()
    (compiled,) = kernel_check.compile_kernels(tmp_path).values()
    for arch in ARCHITECTURES:
        assert compiled[arch].shared_memory_bytes <= SHARED_MEMORY_BYTES[arch]
        assert compiled[arch].spill_bytes <= 256
