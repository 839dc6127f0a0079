"""The peers of `bench decode`: attention of other projects over the same keys and values, one layer of one rank at a time.

Every peer copies what the KV heads hold to a cache of its own form, in pages scattered at random where it knows pages. What it
cannot do, or what is not installed, is said in a `MissingPeer`. In shapes, R is the number of requests, H of the layer's KV heads,
D the head dimension; S is the number of sequences that a peer makes of each request, W of KV heads in each of them.
"""

import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from tangram_plan.ir import AttentionForm, Plan, TangramError

from .timing import time_graph

if TYPE_CHECKING:
    import torch

    from tangram_plan.runtime.reference import PageTable

PAGE_TOKENS = 16
WORKSPACE_BYTES = 512 << 20  # of FlashInfer
FA3_MAX_SPLITS = 32  # what vLLM sets when it captures decode steps
ROTATED_BYTES = 512 << 20  # that repeated launches read before one reads the same again: some times the L2 cache
MAX_COPIES = 8
REPEATS = 8  # launches in a graph, one on each copy
PLANNED = 10  # calls of a planner, of which the median is taken
CHECKED_PAIRS = 16  # (request, KV head) pairs whose outputs are compared with the reference
TOLERANCE = 2e-2  # largest relative error of an output row


@dataclass(frozen=True)
class LayerBatch:
    """Decode attention of one layer and rank.

    Args:
        q: [R, H * gqa_ratio, D]; query heads of a KV head stand together.
        keys: [tokens held, D], first by request, then by KV head; attention does not mind the order of tokens.
        values: [tokens held, D], likewise.
        held_tokens: of every request and KV head, int64 [R, H], on the CPU; one at least.
        group_ids: head group of every KV head.
        full_tokens: of every request, what each KV head would hold without compression.
        form: what the softmax computes.
    """

    q: "torch.Tensor"
    keys: "torch.Tensor"
    values: "torch.Tensor"
    held_tokens: "torch.Tensor"
    group_ids: tuple[int, ...]
    full_tokens: tuple[int, ...]
    form: AttentionForm

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the layer."""
        return len(self.group_ids)

    @property
    def gqa_ratio(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[1] // self.num_kv_heads

    @cached_property
    def _starts(self) -> list[int]:
        counts = self.held_tokens.flatten()
        starts: list[int] = (counts.cumsum(0) - counts).tolist()
        return starts

    def rows(self, request: int, head: int, num_tokens: int) -> tuple["torch.Tensor", "torch.Tensor"]:
        """Keys and values [num_tokens, D] of a KV head; more than it holds: the same ones over again."""
        import torch

        start, held = self._starts[request * self.num_kv_heads + head], int(self.held_tokens[request, head])
        row = start + torch.arange(num_tokens, device=self.q.device) % held
        return self.keys[row], self.values[row]

    def queries(self) -> "torch.Tensor":
        """The query heads by KV head, [R, H, gqa_ratio, D]."""
        return self.q.reshape(len(self.q), self.num_kv_heads, self.gqa_ratio, self.q.shape[-1])

    def token_bytes(self) -> int:
        """Bytes of one token's key and value of one KV head."""
        return 2 * self.q.shape[-1] * self.keys.element_size()


def layer_batch(
    plan: Plan,
    layer: int,
    rank: int,
    q: "torch.Tensor",
    pool: "torch.Tensor",
    page_table: "PageTable",
    prompt_tokens: Sequence[int],
) -> LayerBatch:
    """What a layer's KV heads hold in a pool, for requests that stand at the end of their prompts.

    Args:
        plan: gives lengths and page geometry.
        layer: a planned layer.
        rank: owner of the KV heads.
        q: [R, H * gqa_ratio, D].
        pool: KV dtype, flat.
        page_table: pages of the batch.
        prompt_tokens: of every request.
    """
    import torch

    from tangram_plan.runtime.reference import local_heads, page_views, slots_of

    places, views = local_heads(plan, rank, layer), page_views(pool, plan.layout)
    keys, values, held_tokens = [], [], []
    for request, prompt in enumerate(prompt_tokens):
        for group_id, column in places:
            held = plan.group_tokens(group_id, prompt, prompt)
            pages = page_table.pages(request * len(plan.grouping.groups) + group_id).cpu()
            tokens_per_page = plan.layout.tokens_per_page(plan.grouping.groups[group_id].num_members)
            page, slot = (part.to(pool.device) for part in slots_of(pages, column, tokens_per_page, held))
            keys.append(views.keys[page, slot])
            values.append(views.values[page, slot])
            held_tokens.append(held)
    return LayerBatch(
        q,
        torch.cat(keys),
        torch.cat(values),
        torch.tensor(held_tokens).view(len(prompt_tokens), len(places)),
        tuple(place.group_id for place in places),
        tuple(prompt_tokens),
        plan.model.attention,
    )


@dataclass(frozen=True)
class Peer:
    """One peer on one batch, ready to be captured.

    Args:
        name: how the results call it.
        launches: the call on each copy of its cache; copies keep repeated calls from finding their pages in the L2 cache.
        output: what the last call gave, [R, H * gqa_ratio, D].
        tokens: that it attends to, int64 [R, H]; see `LayerBatch.rows` where these are more than the KV head holds.
        num_bytes: of keys and values that it must read.
        plan_us: time of planning one call on the host, before every step; 0 if it does not plan.
        note: which of its forms was taken.
    """

    name: str
    launches: tuple[Callable[[], object], ...]
    output: Callable[[], "torch.Tensor"]
    tokens: "torch.Tensor"
    num_bytes: int
    plan_us: float = 0.0
    note: str = ""

    def run(self, turn: int = 0) -> None:
        """Launch one call, on the copy whose turn it is."""
        self.launches[turn % len(self.launches)]()


@dataclass(frozen=True)
class MissingPeer:
    """A peer that is not installed, or cannot do this batch."""

    name: str
    note: str


@dataclass(frozen=True)
class Sequences:
    """The batch as a peer sees it: every request is S sequences of W KV heads that hold equally many tokens.

    Args:
        heads: KV heads of every sequence, int64 [S, W]; one of fewer heads repeats its last.
        num_tokens: of every request and sequence, int64 [R, S].
    """

    heads: "torch.Tensor"
    num_tokens: "torch.Tensor"

    @property
    def width(self) -> int:
        """KV heads of a sequence."""
        return self.heads.shape[1]

    def lengths(self) -> "torch.Tensor":
        """Tokens of every sequence of the batch, int32 [R * S]."""
        return self.num_tokens.flatten().int()

    def queries(self, batch: LayerBatch) -> "torch.Tensor":
        """Query heads by sequence, [R * S, W * gqa_ratio, D]."""
        return batch.queries()[:, self.heads.to(batch.q.device)].flatten(2, 3).flatten(0, 1).contiguous()

    def by_request(self, out: "torch.Tensor", batch: LayerBatch) -> "torch.Tensor":
        """The inverse of `queries`, [R, H * gqa_ratio, D]."""
        import torch

        found = torch.empty_like(batch.queries())
        shape = (len(batch.q), *self.heads.shape, batch.gqa_ratio, batch.q.shape[-1])
        found[:, self.heads.to(batch.q.device)] = out.view(shape)
        return found.flatten(1, 2)

    def tokens(self, batch: LayerBatch) -> "torch.Tensor":
        """Tokens that every KV head attends to, int64 [R, H]."""
        import torch

        found = torch.zeros_like(batch.held_tokens)
        found[:, self.heads] = self.num_tokens[:, :, None].expand(-1, -1, self.width)
        return found


def head_sequences(batch: LayerBatch) -> Sequences:
    """Every KV head of a request as a sequence of its own, at its exact length."""
    import torch

    return Sequences(torch.arange(batch.num_kv_heads)[:, None], batch.held_tokens)


def group_sequences(batch: LayerBatch) -> Sequences:
    """The KV heads of a head group as one sequence, as long as the longest of them and as wide as the widest group."""
    import torch

    groups = [[h for h, g in enumerate(batch.group_ids) if g == group] for group in dict.fromkeys(batch.group_ids)]
    width = max(len(heads) for heads in groups)
    heads = torch.tensor([heads + heads[-1:] * (width - len(heads)) for heads in groups])
    return Sequences(heads, batch.held_tokens[:, heads].amax(-1))


def full_sequences(batch: LayerBatch) -> Sequences:
    """A request as one sequence that keeps every token: the cache without compression."""
    import torch

    return Sequences(torch.arange(batch.num_kv_heads)[None], torch.tensor(batch.full_tokens)[:, None])


@dataclass(frozen=True)
class PagedCache:
    """Keys and values of sequences, in scattered pages.

    Args:
        copies: KV dtype [num_pages, 2, PAGE_TOKENS, W, D] each, keys before values; of whatever strides.
        page_ids: int32 [num_pages], pages of one sequence after the other.
        page_indptr: int32 [R * S + 1], on the CPU: pages of sequence n are `page_ids[page_indptr[n] : page_indptr[n + 1]]`.
        last_page_tokens: in the last page of every sequence, int32 [R * S], on the CPU.
    """

    copies: tuple["torch.Tensor", ...]
    page_ids: "torch.Tensor"
    page_indptr: "torch.Tensor"
    last_page_tokens: "torch.Tensor"

    def block_table(self) -> "torch.Tensor":
        """Pages of every sequence, int32 [R * S, pages of the longest]; unused places are 0."""
        import torch

        counts = self.page_indptr.diff()
        used = (torch.arange(int(counts.max()))[None] < counts[:, None]).to(self.page_ids.device)
        table = torch.zeros(used.shape, dtype=torch.int32, device=used.device)
        table[used] = self.page_ids
        return table


def paged_cache(batch: LayerBatch, sequences: Sequences, *, heads_first: bool) -> PagedCache:
    """Copies of what the KV heads hold.

    Args:
        batch: gives keys and values.
        sequences: which KV heads share pages.
        heads_first: whether a page's tokens of one KV head lie together, rather than one token's KV heads.
    """
    import torch

    counts = -(-sequences.num_tokens.flatten() // PAGE_TOKENS)
    num_pages, ends = int(counts.sum()), counts.cumsum(0)
    page_ids = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).to(batch.q.device)
    width, head_dim = sequences.width, batch.q.shape[-1]
    page_shape = (width, PAGE_TOKENS) if heads_first else (PAGE_TOKENS, width)
    stored = torch.zeros(num_pages, 2, *page_shape, head_dim, dtype=batch.keys.dtype, device=batch.q.device)

    def by_token(cache: torch.Tensor) -> torch.Tensor:
        return cache.transpose(2, 3) if heads_first else cache

    for number, num_tokens in enumerate(sequences.num_tokens.flatten().tolist()):
        request, sequence = divmod(number, len(sequences.heads))
        pages = page_ids[ends[number] - counts[number] : ends[number]]
        for column, head in enumerate(sequences.heads[sequence].tolist()):
            for part, rows in enumerate(batch.rows(request, head, num_tokens)):
                padded = rows.new_zeros(len(pages) * PAGE_TOKENS, head_dim)
                padded[:num_tokens] = rows
                by_token(stored)[:, part, :, column][pages] = padded.view(-1, PAGE_TOKENS, head_dim)
    page_indptr = torch.cat([torch.zeros(1, dtype=torch.int32), ends.int()])
    copies = [stored, *(stored.clone() for _ in range(_num_copies(stored.nbytes) - 1))]
    return PagedCache(
        tuple(map(by_token, copies)), page_ids.int(), page_indptr, (sequences.lengths() - 1) % PAGE_TOKENS + 1
    )


def flashinfer_peer(sequences_of: Callable[[LayerBatch], Sequences], name: str, batch: LayerBatch) -> Peer:
    """FlashInfer's `BatchDecodeWithPagedKVCacheWrapper`: on tensor cores or on CUDA cores, whichever is faster.

    Raises:
        ImportError: it is not installed.
    """
    import torch

    flashinfer: Any = importlib.import_module("flashinfer")
    sequences = sequences_of(batch)
    paged, q = paged_cache(batch, sequences, heads_first=True), sequences.queries(batch)
    caches = [cache.transpose(2, 3) for cache in paged.copies]
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)

    def form(*, use_tensor_cores: bool) -> Peer:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=torch.empty_like(paged.page_indptr, device=q.device),
            paged_kv_indices_buffer=torch.empty_like(paged.page_ids),
            paged_kv_last_page_len_buffer=torch.empty_like(paged.last_page_tokens, device=q.device),
        )
        plan = partial(
            wrapper.plan,
            paged.page_indptr,
            paged.page_ids,
            paged.last_page_tokens,
            sequences.width * batch.gqa_ratio,
            sequences.width,
            q.shape[-1],
            PAGE_TOKENS,
            logits_soft_cap=batch.form.logit_softcap,
            q_data_type=q.dtype,
            kv_data_type=batch.keys.dtype,
            sm_scale=batch.form.softmax_scale,
        )
        plan_us, out = _host_us(plan, q), torch.full_like(q, float("nan"))
        launches = [partial(wrapper.run, q, cache, out=out) for cache in caches]
        return _sequence_peer(name, batch, sequences, launches, out, plan_us)

    return _faster(
        {"tensor cores": partial(form, use_tensor_cores=True), "CUDA cores": partial(form, use_tensor_cores=False)}
    )


def fa3_peer(sequences_of: Callable[[LayerBatch], Sequences], name: str, batch: LayerBatch) -> Peer:
    """FlashAttention 3, as vLLM ships it: with splits as it chooses or up to as many as in vLLM's decode graphs.

    Raises:
        ImportError: it is not installed.
    """
    import torch

    fa3: Any = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    if not fa3.FA3_AVAILABLE:
        raise ImportError(fa3.FA3_UNAVAILABLE_REASON)
    sequences = sequences_of(batch)
    paged, q = paged_cache(batch, sequences, heads_first=False), sequences.queries(batch)
    block_table, lengths = paged.block_table(), sequences.lengths().to(q.device)
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    longest = int(sequences.num_tokens.max())

    def form(*, num_splits: int) -> Peer:
        plan = partial(
            fa3.get_scheduler_metadata,
            batch_size=len(q),
            max_seqlen_q=1,
            max_seqlen_k=longest,
            num_heads_q=q.shape[1],
            num_heads_kv=sequences.width,
            headdim=q.shape[-1],
            cache_seqlens=lengths,
            qkv_dtype=q.dtype,
            cu_seqlens_q=starts,
            page_size=PAGE_TOKENS,
            causal=True,
            has_softcap=batch.form.logit_softcap is not None,
            num_splits=num_splits,
        )
        plan_us, scheduler_metadata, out = _host_us(plan, q), plan(), torch.full_like(q, float("nan"))
        launches = [
            partial(
                fa3.flash_attn_varlen_func,
                q,
                cache[:, 0],
                cache[:, 1],
                max_seqlen_q=1,
                cu_seqlens_q=starts,
                max_seqlen_k=longest,
                seqused_k=lengths,
                softmax_scale=batch.form.softmax_scale,
                causal=True,
                softcap=batch.form.logit_softcap or 0.0,
                block_table=block_table,
                out=out,
                scheduler_metadata=scheduler_metadata,
                num_splits=num_splits,
                fa_version=3,
            )
            for cache in paged.copies
        ]
        return _sequence_peer(name, batch, sequences, launches, out, plan_us)

    return _faster(
        {
            "its own splits": partial(form, num_splits=0),
            f"up to {FA3_MAX_SPLITS} splits": partial(form, num_splits=FA3_MAX_SPLITS),
        }
    )


def sdpa_peer(name: str, batch: LayerBatch) -> Peer:
    """`scaled_dot_product_attention` of torch, one call per KV head, padded to the longest request.

    Raises:
        TangramError: the model caps its logits.
    """
    import torch

    if batch.form.logit_softcap is not None:
        raise TangramError("torch cannot cap logits")
    num_requests, head_dim = len(batch.q), batch.q.shape[-1]
    longest = batch.held_tokens.amax(0).tolist()
    heads, masks = [], []
    for head, padded_tokens in enumerate(longest):
        width = -(-padded_tokens // PAGE_TOKENS) * PAGE_TOKENS  # its kernels like masks with rows of aligned lengths
        held = batch.keys.new_zeros(2, num_requests, 1, width, head_dim)
        for request, num_tokens in enumerate(batch.held_tokens[:, head].tolist()):
            for part, rows in enumerate(batch.rows(request, head, num_tokens)):
                held[part, request, 0, :num_tokens] = rows
        mask = torch.arange(width) < batch.held_tokens[:, head, None]
        heads.append(held)
        masks.append(None if bool(mask.all()) else mask[:, None, None].to(batch.q.device))
    num_bytes = sum(held.nbytes for held in heads)
    copies = [heads, *([held.clone() for held in heads] for _ in range(_num_copies(num_bytes) - 1))]
    queries = batch.queries()
    out = torch.full_like(queries, float("nan"))

    def launch(copy: list[torch.Tensor]) -> None:
        found = [
            torch.nn.functional.scaled_dot_product_attention(
                queries[:, head, None], held[0], held[1], attn_mask=mask, scale=batch.form.softmax_scale
            )
            for head, (held, mask) in enumerate(zip(copy, masks, strict=True))
        ]
        torch.cat(found, dim=1, out=out)

    return Peer(
        name,
        tuple(partial(launch, copy) for copy in copies),
        lambda: out.flatten(1, 2),
        batch.held_tokens,
        num_requests * sum(longest) * batch.token_bytes(),
        note=f"{batch.num_kv_heads} calls, {sum(mask is not None for mask in masks)} of them masked",
    )


PEERS: Mapping[str, Callable[[str, LayerBatch], Peer]] = {
    "FlashInfer, heads as requests": partial(flashinfer_peer, head_sequences),
    "FlashInfer, groups as requests": partial(flashinfer_peer, group_sequences),
    "FlashInfer, full cache": partial(flashinfer_peer, full_sequences),
    "FA3, heads as sequences": partial(fa3_peer, head_sequences),
    "FA3, full cache": partial(fa3_peer, full_sequences),
    "torch SDPA, padded": sdpa_peer,
}


def available_peer(name: str, batch: LayerBatch) -> Peer | MissingPeer:
    """One of `PEERS`, whose output agrees with the reference."""
    if batch.form.has_sinks:
        return MissingPeer(name, "attention sinks differ by KV head, which a peer's sequences do not")
    try:
        peer = PEERS[name](name, batch)
        peer.run()
        worst = peer_error(peer, batch)
    except Exception as error:  # whatever another project raises is its answer
        return MissingPeer(name, _reason(error))
    if not worst <= TOLERANCE:
        return MissingPeer(name, f"wrong: relative error {worst:.2g}, at most {TOLERANCE} expected")
    return peer


def available_peers(batch: LayerBatch) -> list[Peer | MissingPeer]:
    """All of `PEERS`, each with its copies of the cache: `bench_peers` holds only one at a time."""
    return [available_peer(name, batch) for name in PEERS]


def bench_peers(batch: LayerBatch, names: Sequence[str] = tuple(PEERS)) -> list[dict[str, Any]]:
    """Time peers on a GPU, one after the other.

    Returns:
        One row per name of {name, us, bytes, plan_us, note}, or {name, note} if the peer is missing.
    """
    import torch

    rows = []
    for name in names:
        rows.append(_row(name, batch))
        if batch.q.is_cuda:
            torch.cuda.empty_cache()
    return rows


def time_peer(peer: Peer) -> float:
    """Microseconds of one call, among calls on other copies of the cache in one CUDA graph."""

    def run() -> None:
        for turn in range(REPEATS):
            peer.run(turn)

    return time_graph(run) / REPEATS


def peer_error(peer: Peer, batch: LayerBatch) -> float:
    """Largest relative error of a peer's last output, over some pairs of request and KV head."""
    from tangram_plan.runtime.kernel_problem import max_error
    from tangram_plan.runtime.reference import attend

    output, num_pairs = peer.output(), batch.held_tokens.numel()
    count = min(CHECKED_PAIRS, num_pairs)
    worst = 0.0
    for request, head in (divmod(sample * num_pairs // count, batch.num_kv_heads) for sample in range(count)):
        queries = slice(head * batch.gqa_ratio, (head + 1) * batch.gqa_ratio)
        keys, values = batch.rows(request, head, int(peer.tokens[request, head]))
        q, form = batch.q[request, queries].float(), batch.form
        expected = attend(q, keys.float(), values.float(), form.softmax_scale, form.logit_softcap)
        worst = max(worst, max_error(output[request, queries], expected))
    return worst


def _row(name: str, batch: LayerBatch) -> dict[str, Any]:
    peer = available_peer(name, batch)
    if isinstance(peer, MissingPeer):
        return {"name": name, "note": peer.note}
    try:
        us = time_peer(peer)
    except Exception as error:  # such as a call that cannot be captured
        return {"name": name, "note": _reason(error)}
    return {"name": name, "us": us, "bytes": peer.num_bytes, "plan_us": peer.plan_us, "note": peer.note}


def _sequence_peer(
    name: str,
    batch: LayerBatch,
    sequences: Sequences,
    launches: Sequence[Callable[[], object]],
    out: "torch.Tensor",
    plan_us: float,
) -> Peer:
    num_bytes = int(sequences.num_tokens.sum()) * sequences.width * batch.token_bytes()
    output = partial(sequences.by_request, out, batch)
    return Peer(name, tuple(launches), output, sequences.tokens(batch), num_bytes, plan_us)


def _faster(forms: Mapping[str, Callable[[], Peer]]) -> Peer:
    """The form of a peer that takes the shortest time; its note has the times of all."""
    times, peers, notes = [], [], []
    for label, form in forms.items():
        try:
            peer = form()
            us = time_peer(peer)
        except Exception as error:  # whatever another project raises is its answer
            notes.append(f"{label}: {_reason(error)}")
            continue
        times.append(us)
        peers.append(replace(peer, note=label))
        notes.append(f"{label}: {us:.1f} us")
    if not peers:
        raise TangramError("no form of it works", got="; ".join(notes))
    best = peers[times.index(min(times))]
    return replace(best, note=f"{best.note} ({', '.join(notes)})")


def _host_us(plan: Callable[[], object], q: "torch.Tensor") -> float:
    """Microseconds that a planner keeps the host busy, after a first call that may compile."""
    import torch

    def wait() -> None:
        if q.is_cuda:
            torch.cuda.synchronize()

    plan()
    times = []
    for _ in range(PLANNED):
        wait()
        start = time.perf_counter()
        plan()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def _num_copies(num_bytes: int) -> int:
    return min(MAX_COPIES, -(-ROTATED_BYTES // num_bytes))


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
