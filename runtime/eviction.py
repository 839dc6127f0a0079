"""Compression after a prefill chunk on a GPU: scores, selection and eviction of one layer, launched from the generated kernels.

What is the same for all layers of a step is put on the device once (`make_chunks`); a layer is then ten launches or less, without
host work that waits, and without allocation, so that a CUDA graph can hold it.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from tangram_plan.ir import EvictionRole, Plan, TangramError, eviction_kernel_name

from .generated_kernels import GeneratedKernels
from .head_tables import HeadTables, int32
from .reference import PageTable

NUM_DIGITS = 7  # of a selection key
NUM_BINS = 256  # values of a digit
MAX_POSITIONS = 1 << 24  # that a selection key can tell apart


class Chunks(NamedTuple):
    """The chunks of one step, the same for all layers; R requests, G head groups, C tokens of all chunks."""

    requests: torch.Tensor  # int32 [num_chunks], the requests that have a chunk
    held: torch.Tensor  # int32 [R, G], tokens in the cache before the chunk
    kept: torch.Tensor  # int32 [R, G], tokens that stay
    chunk_indptr: torch.Tensor  # int32 [R + 1], where among the C tokens each request's chunk begins
    chunk_start: torch.Tensor  # int32 [R], position of each chunk's first token
    max_candidates: int  # tokens held and in the chunk, of the (request, group) that has most
    max_moves: int  # as many as tokens of a (request, KV head) move, or more


def make_chunks(
    held: Sequence[Sequence[int]],
    kept: Sequence[Sequence[int]],
    chunk_start: Sequence[int],
    chunk_tokens: Sequence[int],
    device: torch.device | str,
) -> Chunks:
    """The chunks of a step, on the device.

    Args:
        held: tokens in the cache before the chunk, per request and group.
        kept: tokens that stay, per request and group.
        chunk_start: position of the first token of every request's chunk.
        chunk_tokens: tokens of every request's chunk; requests without one are left alone.
        device: where the tensors lie.

    Raises:
        TangramError: tokens are to stay that are not there, none is to stay, or a position is beyond what keys hold.
    """
    if any(start + tokens > MAX_POSITIONS for start, tokens in zip(chunk_start, chunk_tokens, strict=True)):
        raise TangramError("context is too long for eviction", got=max(chunk_start), expected=f"{MAX_POSITIONS} tokens")
    requests = [request for request, tokens in enumerate(chunk_tokens) if tokens]
    pairs = [
        (request, group_id, before, after, chunk_tokens[request])
        for request in requests
        for group_id, (before, after) in enumerate(zip(held[request], kept[request], strict=True))
    ]
    for request, group_id, before, after, new in pairs:
        if not 1 <= after <= before + new:
            raise TangramError(
                "so many tokens cannot stay",
                where=f"request {request}, group {group_id}",
                got=after,
                expected=f"1 to {before + new}: {before} in the cache and {new} in the chunk",
            )
    num_groups = len(held[0]) if held else 0
    return Chunks(
        int32(requests, device),
        int32([tokens for row in held for tokens in row], device).view(len(held), num_groups),
        int32([tokens for row in kept for tokens in row], device).view(len(kept), num_groups),
        int32(list(accumulate(chunk_tokens, initial=0)), device),
        int32(chunk_start, device),
        max((before + new for _, _, before, _, new in pairs), default=0),
        max((min(after, new + max(0, before - after)) for _, _, before, after, new in pairs), default=0),
    )


def chunks_by_law(
    plan: Plan,
    prompt_tokens: Sequence[int],
    chunk_start: Sequence[int],
    chunk_tokens: Sequence[int],
    device: torch.device | str,
) -> Chunks:
    """The chunks of a step of which the plan's page law says how many tokens stay, as after earlier chunks of the same prompts.

    Args:
        plan: gives the law of every group.
        prompt_tokens: prompt length of every request.
        chunk_start: tokens of every request before its chunk.
        chunk_tokens: tokens of every request's chunk.
        device: where the tensors lie.
    """
    held, kept = (
        [
            [plan.group_tokens(group_id, prompt, total) for group_id in range(len(plan.grouping.groups))]
            for prompt, total in zip(prompt_tokens, totals, strict=True)
        ]
        for totals in (chunk_start, [start + new for start, new in zip(chunk_start, chunk_tokens, strict=True)])
    )
    return make_chunks(held, kept, chunk_start, chunk_tokens, device)


class Eviction:
    """Score, select and evict for the layers of one rank, with buffers for steps of a given size.

    Layers share the buffers: launches must be in order on one stream.

    Args:
        kernels: of the artefact; the buffers lie on their device.
        max_chunks: requests that have a chunk in a step, at most.
        max_candidates: tokens of a KV head's cache and of a chunk together, at most.
        rank: whose KV heads.
        tables: head tables other than the artefact's.
    """

    def __init__(
        self,
        kernels: GeneratedKernels,
        max_chunks: int,
        max_candidates: int,
        *,
        rank: int = 0,
        tables: HeadTables | None = None,
    ) -> None:
        tables, layout, device = tables or kernels.tables, kernels.plan.layout, kernels.device
        self._histogram, self._place, self._copy, self._score_key_anchor = (
            kernels.modules[eviction_kernel_name(role, layout)]
            for role in (
                EvictionRole.HISTOGRAM,
                EvictionRole.PLACE,
                EvictionRole.COPY,
                EvictionRole.SCORE_KEY_ANCHOR,
            )
        )
        self._tokens_per_page = tables.group_tables(device).tokens_per_page
        self._layers = {layer: tables.layer_tables(rank, layer, device) for layer in tables.planned_layers}
        self.max_chunks, self.max_candidates = max_chunks, max_candidates

        num_pairs = max_chunks * max(heads.column.numel() for heads in self._layers.values())
        block_candidates = int(self._place.BLOCK_CANDIDATES.value)
        num_lists = num_pairs * -(-max_candidates // block_candidates)
        self._histograms = torch.zeros(num_pairs * NUM_DIGITS * NUM_BINS, dtype=torch.int32, device=device)
        self._prefixes = torch.zeros(num_pairs * NUM_DIGITS, dtype=torch.int64, device=device)
        self._remaining = torch.zeros(num_pairs * NUM_DIGITS, dtype=torch.int32, device=device)
        self._counts = torch.zeros(num_lists * 2, dtype=torch.int32, device=device)
        self._holes = torch.zeros(num_lists * block_candidates, dtype=torch.int32, device=device)
        self._movers = torch.zeros_like(self._holes)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the buffers."""
        buffers = (self._histograms, self._prefixes, self._remaining, self._counts, self._holes, self._movers)
        return sum(buffer.nbytes for buffer in buffers)

    def score_key_anchor(
        self, k: torch.Tensor, anchors: torch.Tensor, scores: torch.Tensor, *, overlap: bool = False
    ) -> None:
        """Score a step's tokens by their keys: one launch.

        Args:
            k: [C, num_kv_heads, D], heads and elements dense.
            anchors: float32 [num_kv_heads, D], dense.
            scores: float32 [num_kv_heads, C], tokens dense; written.
            overlap: start while the kernel before ends (sm_90 and later).
        """
        self._score_key_anchor.launch(k, anchors, scores, overlap=overlap)

    def evict(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: torch.Tensor,
        pool: torch.Tensor,
        page_table: PageTable,
        chunks: Chunks,
        *,
        overlap: bool = False,
    ) -> None:
        """Keep the best tokens of past and chunk, of all local KV heads of a layer: nine launches.

        Args:
            layer: whose.
            k: [C, num_kv_heads, D], keys of the step's tokens, heads and elements dense.
            v: the same, their values.
            scores: float32 [num_kv_heads, C], tokens dense; NaN is below all other scores.
            pool: KV dtype, flat; written.
            page_table: pages of the batch, for the tokens before as well as for those that stay.
            chunks: of the step.
            overlap: start while the kernel before ends (sm_90 and later).

        Raises:
            TangramError: the step is larger than the buffers.
        """
        if chunks.requests.numel() > self.max_chunks or chunks.max_candidates > self.max_candidates:
            raise TangramError(
                "step is larger than the buffers of eviction",
                got=f"{chunks.requests.numel()} chunks, {chunks.max_candidates} candidates",
                expected=f"at most {self.max_chunks} chunks, {self.max_candidates} candidates",
                fix="make the buffers for the largest step that is scheduled",
            )
        inputs = (
            pool,
            page_table.page_ids,
            page_table.page_indptr,
            *self._layers[layer],
            self._tokens_per_page,
            *chunks[:5],
            scores,
        )
        selection = (self._histograms, self._prefixes, self._remaining)
        lists = (self._counts, self._holes, self._movers)
        size = chunks.max_candidates
        self._histogram.launch(*inputs, *selection, max_candidates=size, overlap=overlap)
        self._place.launch(*inputs, *selection, *lists, max_candidates=size, overlap=overlap)
        self._copy.launch(*inputs, *lists, k, v, max_candidates=size, max_moves=chunks.max_moves, overlap=overlap)
