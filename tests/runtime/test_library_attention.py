"""What is asked of FlashAttention 3, by an operator of its own signature that computes in plain torch."""

import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType

import pytest

pytest.importorskip("torch", reason="attention of torch tensors")

import torch

from tangram_plan.ir import AttentionForm
from tangram_plan.runtime.head_tables import int32
from tangram_plan.runtime.library_attention import FlashAttention3, LibraryAttention, TorchAttention
from tangram_plan.runtime.reference import attend
from tests.plans import valid_plan

SCHEMA = (  # as vLLM registers it
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
    "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
    "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
NAMES = re.findall(r"(\w+)[,)]", SCHEMA)
PLAIN, CAPPED = AttentionForm(0.5), AttentionForm(0.5, logit_softcap=2.0)
CAPPED_WITH_SINKS = AttentionForm(0.5, logit_softcap=2.0, has_sinks=True)
HEAD_DIM, NUM_KV_HEADS, GQA_RATIO = 8, 2, 3


def forward(*arguments: object) -> list[torch.Tensor]:
    """Causal attention, aligned to the ends of queries and keys; and its log-sum-exp."""
    given = dict(zip(NAMES, arguments, strict=True))
    q, k, v, out, k_indptr = (given.pop(name) for name in ("q", "k", "v", "out", "cu_seqlens_k"))
    q_indptr, scale, softcap = (given.pop(name) for name in ("cu_seqlens_q", "softmax_scale", "softcap"))
    assert isinstance(q, torch.Tensor)
    assert isinstance(k, torch.Tensor)
    assert isinstance(v, torch.Tensor)
    assert isinstance(out, torch.Tensor)
    assert isinstance(k_indptr, torch.Tensor)
    assert isinstance(scale, float)
    assert isinstance(softcap, float)
    longest = int(k_indptr.diff().max())
    assert given["max_seqlen_q"] == (q.shape[1] if q_indptr is None else longest)
    assert (given["is_causal"], given["window_size_left"], given["window_size_right"]) == (True, -1, -1)
    assert given["max_seqlen_k"] == longest
    assert all(
        value is None for name, value in given.items() if name.startswith(("k_", "q_", "v_", "seq", "s_", "page"))
    )
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), float("nan"))
    for number, (start, end) in enumerate(pairwise(k_indptr.tolist())):
        rows = number if q_indptr is None else slice(*q_indptr[number : number + 2].tolist())
        queries, keys, values = q[rows].transpose(0, 1), k[start:end].transpose(0, 1), v[start:end].transpose(0, 1)
        keys, values = (part.repeat_interleave(len(queries) // len(part), 0) for part in (keys, values))
        logits = queries @ keys.transpose(1, 2) * scale
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        unseen = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1 + logits.shape[2] - logits.shape[1])
        logits = logits.masked_fill(unseen, float("-inf"))
        out[rows] = (logits.softmax(-1) @ values).transpose(0, 1)
        row_lse = lse[number] if q_indptr is None else lse[:, rows]
        row_lse.copy_(logits.logsumexp(-1))
    return [out, lse]


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The operator, and a module that would have registered it."""
    library = torch.library.Library("_vllm_fa3_C", "DEF")  # type: ignore[no-untyped-call]
    library.define(SCHEMA)  # type: ignore[no-untyped-call]
    library.impl("fwd", forward, "CPU")  # type: ignore[no-untyped-call]
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn.flash_attn_interface", ModuleType("flash_attn_interface"))
    yield
    library._destroy()  # type: ignore[no-untyped-call]


def expected_row(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, form: AttentionForm, sink: torch.Tensor | None
) -> torch.Tensor:
    """[D], of one query [D] over keys and values [num_tokens, D]."""
    sinks = None if sink is None else sink[None]
    return attend(q[None], keys, values, form.softmax_scale, form.logit_softcap, sinks)[0]


def assert_chunks_are_right(attention: LibraryAttention, form: AttentionForm) -> None:
    """Chunks of 3, 0 and 4 tokens, before which lie tokens of another request."""
    q = torch.randn(9, NUM_KV_HEADS * GQA_RATIO, HEAD_DIM)
    k, v = torch.randn(2, 9, NUM_KV_HEADS, HEAD_DIM)
    sinks = torch.randn(q.shape[1]) if form.has_sinks else None
    out = torch.full_like(q, float("nan"))
    attention.chunks(q, k, v, int32([2, 5, 5, 9]), [2, 5, 5, 9], sinks, out)
    assert out[:2].isnan().all()
    for token in range(2, 9):
        seen = slice(2 if token < 5 else 5, token + 1)
        for q_head in range(q.shape[1]):
            head, sink = q_head // GQA_RATIO, None if sinks is None else sinks[q_head]
            row = expected_row(q[token, q_head], k[seen, head], v[seen, head], form, sink)
            torch.testing.assert_close(out[token, q_head], row)


def assert_gathered_is_right(attention: LibraryAttention, form: AttentionForm) -> None:
    """KV heads with pasts of 4 and 11 tokens, and a chunk of 9."""
    q = torch.randn(9, NUM_KV_HEADS * GQA_RATIO, HEAD_DIM)
    pasts, starts = (4, 11), (0, 13, 33)
    keys, values = torch.randn(2, starts[-1], 1, HEAD_DIM)
    sinks = torch.randn(q.shape[1]) if form.has_sinks else None
    out = torch.full_like(q, float("nan"))
    by_head = (part.view(9, NUM_KV_HEADS, GQA_RATIO, HEAD_DIM).transpose(0, 1) for part in (q, out))
    q_heads, out_heads = by_head
    attention.gathered(q_heads, keys, values, int32(starts), (13, 20), sinks, out_heads)
    for token in range(9):
        for q_head in range(q.shape[1]):
            head, sink = q_head // GQA_RATIO, None if sinks is None else sinks[q_head]
            seen = slice(starts[head], starts[head] + pasts[head] + token + 1)
            row = expected_row(q[token, q_head], keys[seen, 0], values[seen, 0], form, sink)
            torch.testing.assert_close(out[token, q_head], row)


@pytest.mark.usefixtures("operator")
@pytest.mark.parametrize("form", [PLAIN, CAPPED, CAPPED_WITH_SINKS])
def test_flash_attention_3_gets_what_its_signature_says(form: AttentionForm) -> None:
    layout = valid_plan(num_layers=1, head_dim=HEAD_DIM).layout
    attention = FlashAttention3(layout, form, "cpu")
    assert_chunks_are_right(attention, form)
    assert_gathered_is_right(attention, form)


def test_torch_attends_alike() -> None:
    assert_chunks_are_right(TorchAttention(PLAIN), PLAIN)
    assert_gathered_is_right(TorchAttention(PLAIN), PLAIN)
