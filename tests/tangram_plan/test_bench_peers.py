import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tangram_plan.bench import peers
from tangram_plan.bench.peers import (
    PEERS,
    LayerBatch,
    MissingPeer,
    Peer,
    available_peer,
    available_peers,
    bench_peers,
    full_sequences,
    group_sequences,
    head_sequences,
    layer_batch,
    paged_cache,
)
from tangram_plan.bench.plots import plot_shares, regime_shares
from tangram_plan.ir import AttentionForm, TangramError
from tangram_plan.runtime.reference import attend, decode_attention, lay_out_pages, local_heads
from tests.plans import valid_plan

GQA, DIM = 3, 16
HELD = [[5, 40, 40, 17], [1, 16, 33, 16]]
SDPA = "torch SDPA, padded"


def make_batch(held: list[list[int]] | None = None, form: AttentionForm | None = None) -> LayerBatch:
    """Two requests, four KV heads; KV heads 1 and 2 share a group, the others have their own."""
    held_tokens = torch.tensor(held or HELD)
    num_tokens = int(held_tokens.sum())
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(num_tokens, DIM, generator=generator) for _ in range(2))
    q = torch.randn(2, 4 * GQA, DIM, generator=generator)
    return LayerBatch(q, keys, values, held_tokens, (7, 2, 2, 5), (50, 40), form or AttentionForm.plain(DIM))


class FakeWrapper:
    """FlashInfer's decode wrapper in plain torch: the same arguments, the same layouts."""

    def __init__(self, workspace: torch.Tensor, layout: str, *, use_tensor_cores: bool, **buffers: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert layout == "HND"
        assert buffers.pop("use_cuda_graph")
        self.buffers = buffers
        if not use_tensor_cores:
            raise RuntimeError("unsupported group size\nand a trace")

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, *shape: int, **options: Any
    ) -> None:
        assert all(tensor.dtype == torch.int32 for tensor in (indptr, indices, last))
        assert indptr.device.type == last.device.type == "cpu"
        self.buffers["paged_kv_indptr_buffer"].copy_(indptr)
        self.buffers["paged_kv_indices_buffer"].copy_(indices)
        self.buffers["paged_kv_last_page_len_buffer"].copy_(last)
        self.shape, self.options = shape, options

    def run(self, q: torch.Tensor, cache: torch.Tensor, *, out: torch.Tensor) -> None:
        num_q_heads, num_kv_heads, head_dim, page_tokens = self.shape
        assert q.shape == out.shape == (len(self.buffers["paged_kv_last_page_len_buffer"]), num_q_heads, head_dim)
        assert cache.shape[1:] == (2, num_kv_heads, page_tokens, head_dim)
        assert cache.is_contiguous()
        indptr, indices = self.buffers["paged_kv_indptr_buffer"], self.buffers["paged_kv_indices_buffer"]
        gqa_ratio = num_q_heads // num_kv_heads
        for number, last in enumerate(self.buffers["paged_kv_last_page_len_buffer"].tolist()):
            pages = cache[indices[indptr[number] : indptr[number + 1]].long()]
            num_tokens = (len(pages) - 1) * page_tokens + last
            for head in range(num_kv_heads):
                keys, values = (pages[:, part, head].reshape(-1, head_dim)[:num_tokens] for part in range(2))
                queries = slice(head * gqa_ratio, (head + 1) * gqa_ratio)
                options = self.options["sm_scale"], self.options["logits_soft_cap"]
                out[number, queries] = attend(q[number, queries], keys, values, *options)


def fake_fa3(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    out: torch.Tensor,
    softmax_scale: float,
    softcap: float,
    **options: Any,
) -> None:
    """vLLM's call of FlashAttention 3 in plain torch."""
    assert options["cu_seqlens_q"].tolist() == list(range(len(q) + 1))
    assert options["scheduler_metadata"] == options["num_splits"]
    assert options["max_seqlen_k"] == int(seqused_k.max())
    assert options["fa_version"] == 3
    gqa_ratio = q.shape[1] // k.shape[2]
    for number, num_tokens in enumerate(seqused_k.tolist()):
        pages = block_table[number, : -(-num_tokens // k.shape[1])].long()
        for head in range(k.shape[2]):
            keys, values = (part[pages, :, head].reshape(-1, q.shape[-1])[:num_tokens] for part in (k, v))
            queries = slice(head * gqa_ratio, (head + 1) * gqa_ratio)
            out[number, queries] = attend(q[number, queries], keys, values, softmax_scale, softcap or None)


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setitem(sys.modules, "vllm", None)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the packages, and for a clock."""
    fa3 = SimpleNamespace(
        FA3_AVAILABLE=True,
        get_scheduler_metadata=lambda **options: options["num_splits"],
        flash_attn_varlen_func=fake_fa3,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeWrapper))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn.flash_attn_interface", fa3)
    monkeypatch.setattr(peers, "WORKSPACE_BYTES", 64)
    monkeypatch.setattr(peers, "PLANNED", 1)
    monkeypatch.setattr(peers, "time_graph", lambda _: 80.0)


def found(name: str, batch: LayerBatch) -> Peer:
    peer = available_peer(name, batch)
    assert isinstance(peer, Peer), peer.note
    return peer


def expected(batch: LayerBatch, tokens: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(batch.q)
    for request in range(len(batch.q)):
        for head in range(batch.num_kv_heads):
            queries = slice(head * GQA, (head + 1) * GQA)
            held = batch.rows(request, head, int(tokens[request, head]))
            q, form = batch.q[request, queries], batch.form
            out[request, queries] = attend(q, *held, form.softmax_scale, form.logit_softcap)
    return out


def test_sdpa_agrees_with_the_reference_of_decoding() -> None:
    plan, prompts = valid_plan(), (60, 1, 33)
    table = lay_out_pages(plan, prompts, prompts)
    pool = torch.randn(len(table.page_ids) * plan.layout.page_elements)
    places = local_heads(plan, 0, 1)
    q, k, v = (torch.randn(3, heads, plan.layout.head_dim) for heads in (len(places) * GQA, len(places), len(places)))
    reference = decode_attention(plan, places, q, k, v, torch.zeros(3, len(places)), pool, table, prompts, prompts)
    batch = layer_batch(plan, 1, 0, q, pool, table, prompts)  # the new token is in the pool by now
    peer = found(SDPA, batch)
    peer.run(3)
    torch.testing.assert_close(peer.output(), reference, rtol=1e-4, atol=1e-4)
    assert batch.group_ids == tuple(place.group_id for place in places)
    assert batch.held_tokens[2].tolist() == [plan.group_tokens(place.group_id, 33, 33) for place in places]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_every_peer_agrees_with_the_reference_on_every_copy(name: str, softcap: float | None) -> None:
    batch = make_batch(form=AttentionForm(0.3, softcap))
    if name == SDPA and softcap is not None:
        assert available_peer(name, batch) == MissingPeer(name, "TangramError: torch cannot cap logits")
        return
    peer = found(name, batch)
    assert len(peer.launches) == peers.MAX_COPIES
    for turn in (0, peers.MAX_COPIES + 5):
        peer.run(turn)
        torch.testing.assert_close(peer.output(), expected(batch, peer.tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("installed")
def test_bytes_count_exact_lengths_or_padding() -> None:
    token_bytes = 2 * DIM * 4
    counted = {
        peer.name: peer.num_bytes // token_bytes for peer in available_peers(make_batch()) if isinstance(peer, Peer)
    }
    assert counted == {
        "FlashInfer, heads as requests": 168,
        "FlashInfer, groups as requests": 2 * (5 + 40 + 17 + 1 + 33 + 16),  # as wide as the group of two
        "FlashInfer, full cache": 4 * 90,
        "FA3, heads as sequences": 168,
        "FA3, full cache": 4 * 90,
        SDPA: 2 * (5 + 40 + 40 + 17),
    }


def test_sequences_share_the_longest_length_of_a_group() -> None:
    batch = make_batch()
    assert head_sequences(batch).tokens(batch).tolist() == HELD
    assert group_sequences(batch).tokens(batch).tolist() == [[5, 40, 40, 17], [1, 33, 33, 16]]
    assert group_sequences(batch).heads.tolist() == [[0, 0], [1, 2], [3, 3]]
    assert full_sequences(batch).tokens(batch).tolist() == [[50] * 4, [40] * 4]


def test_pages_are_scattered_and_none_is_shared() -> None:
    batch = make_batch()
    paged = paged_cache(batch, head_sequences(batch), heads_first=True)
    assert sorted(paged.page_ids.tolist()) == list(range(len(paged.copies[0])))
    assert paged.page_ids.tolist() != list(range(len(paged.copies[0])))
    assert paged.last_page_tokens.tolist() == [5, 8, 8, 1, 1, 16, 1, 16]
    table = paged.block_table()
    assert table[1].tolist() == paged.page_ids[1:4].tolist()
    assert table[0].tolist() == [int(paged.page_ids[0]), 0, 0]


@pytest.mark.usefixtures("missing")
def test_a_missing_package_is_a_note() -> None:
    answers = {answer.name: answer for answer in available_peers(make_batch())}
    assert list(answers) == list(PEERS)
    for name, answer in answers.items():
        assert isinstance(answer, Peer) == (name == SDPA)
        if isinstance(answer, MissingPeer):
            assert "flashinfer" in answer.note or "vllm" in answer.note


@pytest.mark.usefixtures("installed")
def test_the_faster_form_is_taken_and_the_other_one_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([90.0, 70.0])
    monkeypatch.setattr(peers, "time_peer", lambda _: next(times))
    peer = found("FA3, full cache", make_batch())
    assert peer.note == "up to 32 splits (its own splits: 90.0 us, up to 32 splits: 70.0 us)"
    monkeypatch.setattr(peers, "time_peer", lambda _: 50.0)
    note = found("FlashInfer, full cache", make_batch()).note
    assert note == "tensor cores (tensor cores: 50.0 us, CUDA cores: RuntimeError: unsupported group size)"


@pytest.mark.usefixtures("installed")
def test_wrong_output_failing_captures_and_sinks_are_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> float:
        raise RuntimeError("operation not permitted when stream is capturing")

    (row,) = bench_peers(make_batch(), [SDPA])
    assert (row["us"], row["plan_us"]) == (10.0, 0.0)
    monkeypatch.setattr(peers, "time_graph", fail)
    (row,) = bench_peers(make_batch(), [SDPA])
    assert row == {"name": SDPA, "note": "RuntimeError: operation not permitted when stream is capturing"}
    (row,) = bench_peers(make_batch(), ["FA3, full cache"])
    assert "no form of it works" in row["note"]
    wrong = replace(
        found(SDPA, make_batch()), launches=(lambda: None,), output=lambda: torch.full((2, 12, DIM), torch.nan)
    )
    monkeypatch.setattr(peers, "PEERS", {SDPA: lambda *_: wrong})
    assert available_peer(SDPA, make_batch()) == MissingPeer(SDPA, "wrong: relative error inf, at most 0.02 expected")
    sinks = make_batch(form=AttentionForm(0.3, None, has_sinks=True))
    assert [row["note"] for row in bench_peers(sinks, [SDPA])] == [
        "attention sinks differ by KV head, which a peer's sequences do not"
    ]


def test_a_plot_takes_what_it_finds(tmp_path: Path) -> None:
    layers = [
        {"layer": 0, "bytes": 4000, "tile_queue_us": 2.0, "static_splits_us": 4.0, "peers": {"FlashInfer": 8.0}},
        {"layer": 1, "bytes": 8000, "tile_queue_us": 6.0, "peers": {"FlashInfer": None}},
    ]
    assert regime_shares(layers, 2.0) == {"tile queue": 0.75, "static splits": 0.5, "FlashInfer": 0.25}
    regimes = [{"name": "32x32K", "layers": layers}, {"name": "1x128K", "layers": layers[1:]}, {"name": "empty"}]
    path = plot_shares({"regimes": regimes, "read_bandwidth_gb_s": 2.0}, tmp_path / "shares.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(TangramError, match="cannot be written"):
        plot_shares({"regimes": regimes, "read_bandwidth_gb_s": 2.0}, tmp_path / "nowhere" / "shares.png")
    with pytest.raises(TangramError, match="no times to plot"):
        plot_shares({"read_bandwidth_gb_s": 2.0}, path)
