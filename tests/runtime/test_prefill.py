"""Attention of prefill chunks against its reference, in Triton's interpreter; and ahead-of-time compilation without a GPU."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("torch", reason="kernels take torch tensors")
pytest.importorskip("triton", reason="generated kernels are Triton")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangram_plan.ir import AttentionForm, KVDtype, TangramError
from tangram_plan.runtime.kernel_check import ARCHITECTURES, SHARED_MEMORY_BYTES, TOLERANCES, compile_kernels
from tangram_plan.runtime.library_attention import TorchAttention, flash_attention_3
from tangram_plan.runtime.prefill import PastGather, Prefill, PrefillPath, gathered_tokens, make_prefill_step
from tangram_plan.runtime.prefill_problem import Request
from tangram_plan.runtime.prefill_reference import prefill_attention
from tangram_plan.runtime.reference import PageTable, attend, local_heads
from tests import prefill_runs as runs
from tests.plans import build_plan, valid_plan

NO_DEADLINE = settings(deadline=None, max_examples=8, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
PLAIN_PATHS = tuple(PrefillPath)
MIXED = [Request(0, 40), Request(90, 17), Request(5, 0), Request(30, 1), Request(0, 3)]
CHECKED_PLAN = valid_plan(
    num_layers=1, num_kv_heads=2, gqa_ratio=1, head_dim=16, page_slots=64, group_sizes=[2], rho=[20000]
)
CAPPED_WITH_SINKS = AttentionForm(0.5, logit_softcap=2.0, has_sinks=True)
MAX_SPILL_BYTES = 2048  # per thread; sm_80 has no tensor-core accumulators outside registers
ATTENTION, GATHER = "prefill_attention_d16_gqa1_float32", "gather_past_d16_float32"


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A worker in which TRITON_INTERPRET was set before triton was imported; what this process imported does not matter."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
            executor.submit(os.getpid).result()
        yield executor


@given(data=st.data())
@NO_DEADLINE
def test_both_paths_agree_with_the_reference(interpreter: ProcessPoolExecutor, data: st.DataObject) -> None:
    """Random groups, pages and lengths of past and chunk, whether there is either or not."""
    tensor_parallel = data.draw(st.sampled_from([1, 2]))
    plan = build_plan(  # its law plays no part
        num_layers=2,
        num_kv_heads=tensor_parallel * data.draw(st.integers(1, 3)),
        gqa_ratio=data.draw(st.sampled_from([1, 2, 3, 4])),
        head_dim=data.draw(st.sampled_from([8, 16, 24])),
        page_slots=data.draw(st.sampled_from([48, 64, 112])),
        tensor_parallel=tensor_parallel,
    )
    lengths = st.builds(Request, st.integers(0, 90), st.integers(0, 40))
    requests = data.draw(st.lists(lengths, min_size=1, max_size=4))
    rank, layer = data.draw(st.integers(0, tensor_parallel - 1)), data.draw(st.integers(0, 1))
    error = interpreter.submit(runs.run_step, plan, requests, rank, layer).result()
    assert error < TOLERANCES[KVDtype.FLOAT32]


@pytest.mark.parametrize("gqa_ratio", [1, 4, 5, 7])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims_and_gqa_ratios(interpreter: ProcessPoolExecutor, head_dim: int, gqa_ratio: int) -> None:
    plan = valid_plan(
        num_layers=1, num_kv_heads=2, gqa_ratio=gqa_ratio, head_dim=head_dim, dtype=KVDtype.BFLOAT16, page_slots=96
    )
    error = interpreter.submit(runs.run_step, plan, [Request(33, 18), Request(0, 5)]).result()
    assert error < TOLERANCES[KVDtype.BFLOAT16]


@pytest.mark.parametrize("dtype", list(KVDtype))
def test_dtypes(interpreter: ProcessPoolExecutor, dtype: KVDtype) -> None:
    plan = valid_plan(num_layers=1, num_kv_heads=3, gqa_ratio=2, head_dim=40, dtype=dtype, page_slots=96)
    error = interpreter.submit(runs.run_step, plan, MIXED).result()
    assert error < TOLERANCES[dtype]


def test_a_ratio_that_fills_no_block(interpreter: ProcessPoolExecutor) -> None:
    """More query heads per KV head than rows of a block: a token lies in two of them."""
    plan = valid_plan(num_layers=1, num_kv_heads=1, gqa_ratio=71, head_dim=16, page_slots=32)
    error = interpreter.submit(runs.run_step, plan, [Request(40, 5), Request(0, 2)]).result()
    assert error < TOLERANCES[KVDtype.FLOAT32]


@pytest.mark.parametrize(
    "form",
    [AttentionForm(0.5, logit_softcap=3.0), AttentionForm(0.25, has_sinks=True), CAPPED_WITH_SINKS],
)
def test_soft_cap_and_sinks(interpreter: ProcessPoolExecutor, form: AttentionForm) -> None:
    plan = valid_plan(num_layers=1, num_kv_heads=2, gqa_ratio=3, head_dim=32, page_slots=48)
    plan = replace(plan, model=replace(plan.model, attention=form))
    error = interpreter.submit(runs.run_step, plan, MIXED, paths=[PrefillPath.PAGED]).result()
    assert error < TOLERANCES[KVDtype.FLOAT32]


@pytest.mark.parametrize("form", [AttentionForm(0.25), AttentionForm(0.25, has_sinks=True), CAPPED_WITH_SINKS])
def test_the_gather_path_calls_flash_attention_as_it_should(
    interpreter: ProcessPoolExecutor, form: AttentionForm
) -> None:
    """Strided queries by KV head, lengths, soft cap and sinks; the operator itself is a stand-in here."""
    plan = valid_plan(num_layers=1, num_kv_heads=2, gqa_ratio=3, head_dim=16, page_slots=48)
    plan = replace(plan, model=replace(plan.model, attention=form))
    error = interpreter.submit(runs.run_with_stand_in, plan, [Request(0, 0), *MIXED, Request(0, 4)]).result()
    assert error < TOLERANCES[KVDtype.FLOAT32]


@pytest.mark.parametrize("path", PLAIN_PATHS)
@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([Request(50, 0), Request(0, 0)], id="no chunk"),
        pytest.param([Request(50, 0), Request(0, 0), Request(0, 33)], id="one without a past, at the end"),
        pytest.param([Request(1, 1)], id="one token"),
        pytest.param(
            [Request(7, 4), Request(0, 0), Request(0, 5), Request(0, 6), Request(9, 2)], id="without a past between"
        ),
        pytest.param([Request(past, 18) for past in (15, 16, 17, 31, 32, 33)], id="edges of pages and steps"),
        pytest.param([Request(300, 40)], id="long"),
    ],
)
def test_ragged_steps(interpreter: ProcessPoolExecutor, requests: list[Request], path: PrefillPath) -> None:
    plan = valid_plan(num_layers=2, num_kv_heads=3, gqa_ratio=2, head_dim=16, page_slots=48)
    error = interpreter.submit(runs.run_step, plan, requests, layer=1, paths=[path]).result()
    assert error < TOLERANCES[KVDtype.FLOAT32]


@pytest.mark.parametrize("path", PLAIN_PATHS)
def test_pool_beyond_2_to_31_elements(interpreter: ProcessPoolExecutor, path: PrefillPath) -> None:
    plan = valid_plan(num_layers=1, num_kv_heads=1, gqa_ratio=1, dtype=KVDtype.FLOAT16, page_slots=256)
    error = interpreter.submit(runs.run_beyond_31_bits, plan, Request(800, 5), path).result()
    assert error < TOLERANCES[KVDtype.FLOAT16]


@pytest.mark.parametrize("form", [CHECKED_PLAN.model.attention, CAPPED_WITH_SINKS])
def test_the_check_accepts_kernels_as_generated(interpreter: ProcessPoolExecutor, form: AttentionForm) -> None:
    plan = replace(CHECKED_PLAN, model=replace(CHECKED_PLAN.model, attention=form))
    errors = interpreter.submit(runs.run_check, plan).result()
    assert errors.keys() == {ATTENTION, GATHER}
    assert max(errors.values()) < TOLERANCES[KVDtype.FLOAT32]


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        pytest.param("prefill_", "mask=row_is_valid[:, None] & (dims", "mask=(dims", id="no mask"),
        pytest.param("prefill_", "tl.where(is_seen, scores, NOTHING)", "scores", id="scores not masked"),
        pytest.param("prefill_", "key[None, :] <= token", "key[None, :] < token", id="own token unseen"),
        pytest.param("prefill_", "<= token[:, None]) &", "<= token[:, None] + 1) &", id="next token seen"),
        pytest.param("prefill_", "weight * correction + tl.sum", "weight + tl.sum", id="weights not corrected"),
        pytest.param("prefill_", "out * correction[:, None]", "out", id="values not corrected"),
        pytest.param("prefill_", "tl.where(places == place, heads, 0)", "tl.where(places == place, 0, 0)", id="head"),
        pytest.param("prefill_", "tl.range(full_steps_end, held,", "tl.range(full_steps_end, 0,", id="tail"),
        pytest.param("prefill_", "range(0, full_steps_end", "range(STEP_TOKENS, full_steps_end", id="first step"),
        pytest.param("prefill_", "range(0, seen_by_all_end", "range(STEP_TOKENS, seen_by_all_end", id="first keys"),
        pytest.param("prefill_", "k_ptr += chunk_start * k_stride +", "k_ptr +=", id="another request's keys"),
        pytest.param("prefill_", "page_ids_ptr += tl.load", "page_ids_ptr += 0 * tl.load", id="another's pages"),
        pytest.param("prefill_", "page_of(following, rec", "page_of(past, rec", id="page of the step before"),
        pytest.param("", "(column - page) * tokens_per_page", "-page * tokens_per_page", id="column forgotten"),
        pytest.param("", "_ptr + PAGE_SLOTS * HEAD_DIM", "_ptr", id="keys as values"),
        pytest.param("gather_", "token < held", "token <= held", id="one token too many"),
        pytest.param("gather_", "(chunk_start + token - held)", "(chunk_start + token)", id="chunk in the wrong place"),
        pytest.param("gather_", "heads < head, tokens", "heads <= head, tokens", id="wrong start"),
        pytest.param("gather_", "head + 1, start + end", "head + 1, end", id="wrong kv_indptr"),
        pytest.param("gather_", "values_ptr + to,", "keys_ptr + to,", id="values over keys"),
    ],
)  # fmt: skip
def test_the_check_sees_a_broken_kernel(interpreter: ProcessPoolExecutor, kernel: str, old: str, new: str) -> None:
    errors = interpreter.submit(runs.run_check, CHECKED_PLAN, kernel, old, new).result()
    assert max(errors.values()) > 1e-3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("tl.full([BLOCK_ROWS], 1.0, tl.float32)", "tl.zeros([BLOCK_ROWS], tl.float32)", id="no sinks"),
        pytest.param("sinks_ptr + q_head", "sinks_ptr + head", id="sinks of another head"),
        pytest.param("tanh * (LOGIT_SOFTCAP * LOG2_E)", "capped * (LOGIT_SOFTCAP * LOG2_E)", id="not capped"),
    ],
)
def test_the_check_sees_a_broken_form_of_attention(interpreter: ProcessPoolExecutor, old: str, new: str) -> None:
    plan = valid_plan(num_layers=1, num_kv_heads=2, gqa_ratio=2, head_dim=16, page_slots=64)
    plan = replace(plan, model=replace(plan.model, attention=CAPPED_WITH_SINKS))
    errors = interpreter.submit(runs.run_check, plan, "prefill_", old, new).result()
    assert max(errors.values()) > 1e-3


def test_the_reference_by_hand() -> None:
    """Without a past it is causal attention; a token of the past is one more that every query sees."""
    plan = valid_plan(num_layers=1, num_kv_heads=1, gqa_ratio=1, head_dim=8, page_slots=16)
    q, k, v = torch.randn(3, 3, 1, 8, dtype=torch.float64)
    places = local_heads(plan, 0, 0)
    no_pages = PageTable(torch.zeros(0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    pool = torch.zeros(plan.layout.page_elements)
    inputs = (plan, places, q, k, v, pool)
    scale = plan.model.attention.softmax_scale

    def causal(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        seen = range(len(keys) - 2, len(keys) + 1)
        return torch.stack([attend(q[i], keys[:n], values[:n], scale) for i, n in enumerate(seen)])

    found = prefill_attention(*inputs, no_pages, [[0]], [0, 3], compute_dtype=torch.float64)
    torch.testing.assert_close(found, causal(k[:, 0], v[:, 0]))
    zero = torch.zeros(1, 8, dtype=torch.float64)
    one_page = PageTable(torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32))
    found = prefill_attention(*inputs, one_page, [[1]], [0, 3], compute_dtype=torch.float64)
    torch.testing.assert_close(found, causal(torch.cat([zero, k[:, 0]]), torch.cat([zero, v[:, 0]])))


def test_a_form_that_no_library_has_is_refused() -> None:
    plan = valid_plan(num_layers=1)
    assert flash_attention_3(plan.layout, plan.model.attention, "cpu") is None
    with pytest.raises(TangramError, match="no library attention has this form here"):
        TorchAttention(CAPPED_WITH_SINKS)


def test_without_a_library_the_kernel_is_chosen() -> None:
    kernels = runs.load(valid_plan(num_layers=1))
    assert Prefill(kernels, 0).path is PrefillPath.PAGED


def test_too_much_to_gather_is_refused() -> None:
    kernels = runs.load(CHECKED_PLAN)
    needed = gathered_tokens(kernels.tables, 0, [20], 5)
    assert needed == 2 * 25
    k = torch.zeros(5, 2, 16)
    table = PageTable(torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    step = make_prefill_step([[20]], [5], "cpu")
    with pytest.raises(TangramError, match=r"layer 0, request 0: more tokens to gather .* got 50, expected at most 49"):
        PastGather(kernels, needed - 1).gather(0, 0, k, k, torch.zeros(0), table, step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "gqa_ratio", "dtype", "form"),
    [
        (64, 4, KVDtype.BFLOAT16, CAPPED_WITH_SINKS),
        (80, 5, KVDtype.FLOAT16, AttentionForm(0.1)),
        (128, 4, KVDtype.BFLOAT16, AttentionForm(0.1)),
        (256, 1, KVDtype.BFLOAT16, CAPPED_WITH_SINKS),
        (256, 16, KVDtype.FLOAT32, AttentionForm(0.1)),
    ],
)
def test_kernels_compile_and_fit_everywhere(
    tmp_path: Path, head_dim: int, gqa_ratio: int, dtype: KVDtype, form: AttentionForm
) -> None:
    plan = valid_plan(gqa_ratio=gqa_ratio, head_dim=head_dim, dtype=dtype, page_slots=256)
    runs.write_kernels(replace(plan, model=replace(plan.model, attention=form)), tmp_path)
    compiled = compile_kernels(tmp_path)
    assert len(compiled) == 2
    for found in compiled.values():
        for arch in ARCHITECTURES:
            assert found[arch].shared_memory_bytes <= SHARED_MEMORY_BYTES[arch]
            assert found[arch].spill_bytes <= MAX_SPILL_BYTES
