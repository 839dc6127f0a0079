"""Attention and compression of engine steps by the generated kernels: how a plan is served on a GPU.

A step is: page tables of all requests, and the plan of decode attention, one launch each, before the first layer; then layer by layer
one launch for all requests that decode, and for those with a chunk, attention over past and chunk, scores, and eviction. What decoding
launches has the same addresses at every step and waits for nothing, so that a CUDA graph can hold it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from tangram_plan.ir import Schedule, most_pages

from .batch import Batch
from .batch import Chunks as BatchChunks
from .decode import DecodeStep
from .eviction import Chunks, Eviction, make_chunks
from .generated_kernels import GeneratedKernels
from .page_tables import PageTables
from .prefill import Prefill, PrefillStep, gathered_tokens, make_prefill_step
from .reference import PageTable
from .serving_scorers import KeyAnchor, ServingScorer

MAX_CHUNKS = 8  # that are compressed by the same launches; more are more launches
WARM_UP_TOKENS = 32  # of a chunk


class ChunkStep(NamedTuple):
    """Some requests with a chunk, next to each other in the step."""

    tokens: slice  # of the step's
    page_table: PageTable
    positions: torch.Tensor  # int32 [their tokens]
    prefill: PrefillStep
    eviction: Chunks


class KernelStep(NamedTuple):
    """One step, the same for all layers."""

    rows: torch.Tensor  # int32 [R, width]
    num_decodes: int  # requests, from the first on, that decode; padded rows among them
    chunks: Sequence[ChunkStep]


class KernelAttention:
    """Attention and compression for the layers of one rank.

    Args:
        kernels: of the artefact; buffers lie on their device.
        scorer: ranks tokens.
        rank: whose KV heads.
        max_requests: of a step, at most.
        max_tokens: of prompt and answer of a request, at most.
        max_chunk_tokens: of a request in a step, at most.
    """

    def __init__(
        self,
        kernels: GeneratedKernels,
        scorer: ServingScorer,
        *,
        rank: int,
        max_requests: int,
        max_tokens: int,
        max_chunk_tokens: int,
    ) -> None:
        plan, device, tables = kernels.plan, kernels.device, kernels.tables
        self._plan, self._device, self._scorer = plan, device, scorer
        groups = range(len(plan.grouping.groups))
        shortest_prompt = max(
            1, max_tokens - plan.max_new_tokens
        )  # decoding evicts nothing: the longest answer holds most
        most_held = [plan.group_tokens(group, shortest_prompt, max_tokens) for group in groups]
        self._tables = PageTables(kernels, max_requests, most_pages(plan, max_tokens))
        self._decode = DecodeStep(kernels, Schedule.TILE_QUEUE, max_requests, rank=rank)
        self._prefill = Prefill(kernels, gathered_tokens(tables, rank, most_held, max_chunk_tokens), rank=rank)
        self._eviction = Eviction(kernels, min(MAX_CHUNKS, max_requests), max(most_held) + max_chunk_tokens, rank=rank)
        self._prompt_tokens, self._num_tokens = torch.zeros(2, max_requests, dtype=torch.int32, device=device)
        self._known_prompts: list[int] = []  # what stands in `_prompt_tokens`
        self._num_kv_heads = {layer: len(tables.group_id[rank, layer]) for layer in tables.planned_layers}
        self._no_scores = torch.zeros(
            max_requests * max(self._num_kv_heads.values()), dtype=torch.float32, device=device
        )

    def begin(self, batch: Batch, rows: torch.Tensor) -> KernelStep:
        """Make what all layers of a step need; what is copied to the device is ordered with its launches.

        Args:
            batch: its requests.
            rows: int32 [R, width], pages of every request, in the order of `ir.page_row`; the same memory at every step.
        """
        prompts = list(batch.prompt_tokens)
        if prompts != self._known_prompts:
            self._copy(prompts, self._prompt_tokens)
            self._known_prompts = prompts
        self._copy(batch.num_tokens, self._num_tokens)
        return KernelStep(rows[: len(prompts)], batch.num_decodes, list(self._chunk_steps(batch)))

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        step: KernelStep,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attention of one layer over what is kept; then new tokens are written, and chunks compressed.

        A decoded token is written with a score of 0: no answer is compressed yet.

        Args:
            layer: whose.
            q: [num_tokens, num_kv_heads * gqa_ratio, D], of all requests, heads and elements dense.
            k: [num_tokens, num_kv_heads, D], heads and elements dense.
            v: the same.
            pool: KV dtype, flat.
            step: from `begin`.
            out: as q; written, but for rows after the last request's.
            sinks: float32 [num_kv_heads * gqa_ratio], logits of the query heads of a model that has them.
        """
        decodes = slice(step.num_decodes)
        if layer == self._plan.model.planned_layers[0]:
            requests = slice(len(step.rows))
            self._tables.fill(step.rows, self._prompt_tokens[requests], self._num_tokens[requests])
            if step.num_decodes:
                indptr = self._tables.of_requests().page_indptr
                self._decode.plan(self._prompt_tokens[decodes], self._num_tokens[decodes], indptr)
        if step.num_decodes:
            rows = q[decodes], k[decodes], v[decodes], self._no_scores
            self._decode.attend(layer, *rows, pool, self._tables.of_requests(), out[decodes], sinks=sinks)
        for chunks in step.chunks:
            q_chunk, k_chunk, v_chunk = (part[chunks.tokens] for part in (q, k, v))
            table = chunks.page_table
            self._prefill.attend(
                layer, q_chunk, k_chunk, v_chunk, pool, table, chunks.prefill, out[chunks.tokens], sinks=sinks
            )
            scores = self._scores(layer, k_chunk, chunks.positions)
            self._eviction.evict(layer, k_chunk, v_chunk, scores, pool, table, chunks.eviction)

    def warm_up(self, pool: torch.Tensor) -> None:
        """Compile and load all kernels, with requests on page 0, which nobody has.

        Args:
            pool: KV dtype, flat; at least one page.
        """
        shape, new = self._plan.model, WARM_UP_TOKENS
        for prompt, total, tokens in ((1, 2, 1), (2 * new, 2 * new, new), (new, new, new)):
            step = self.begin(
                Batch([prompt], [total], [0, tokens]),
                torch.zeros(1, self._tables.max_pages, dtype=torch.int32, device=self._device),
            )
            for layer, num_kv_heads in self._num_kv_heads.items():
                heads = (num_kv_heads * shape.layers[layer].gqa_ratio, num_kv_heads, num_kv_heads)
                q, k, v = (pool.new_zeros(tokens, count, self._plan.layout.head_dim) for count in heads)
                sinks = q.new_zeros(q.shape[1], dtype=torch.float32) if shape.attention.has_sinks else None
                self.attend(layer, q, k, v, pool, step, torch.empty_like(q), sinks=sinks)

    def _scores(self, layer: int, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if not isinstance(self._scorer, KeyAnchor):
            return self._scorer.scores(layer, k, positions)
        scores = torch.empty(k.shape[1], k.shape[0], dtype=torch.float32, device=k.device)
        self._eviction.score_key_anchor(k, self._scorer.anchors[layer], scores)
        return scores

    def _chunk_steps(self, batch: Batch) -> Iterator[ChunkStep]:
        chunks = batch.chunks(self._plan)
        token = chunks.first_token
        for first in range(0, len(chunks.tokens), self._eviction.max_chunks):
            part = slice(first, first + self._eviction.max_chunks)
            end = token + sum(chunks.tokens[part])
            yield self._chunk_step(chunks, part, slice(token, end))
            token = end

    def _chunk_step(self, chunks: BatchChunks, part: slice, tokens: slice) -> ChunkStep:
        held, kept, start, new = chunks.held[part], chunks.kept[part], chunks.start[part], chunks.tokens[part]
        spans = zip(start, new, strict=True)
        positions = [torch.arange(at, at + count, dtype=torch.int32, device=self._device) for at, count in spans]
        return ChunkStep(
            tokens,
            self._tables.of_requests(chunks.first_request + part.start),
            torch.cat(positions),
            make_prefill_step(held, new, self._device),
            make_chunks(held, kept, start, new, self._device),
        )

    def _copy(self, values: Sequence[int], buffer: torch.Tensor) -> None:
        """Copy lengths to the device without waiting: pinned memory is not given out again before it has been read."""
        source = torch.tensor(values, dtype=torch.int32, pin_memory=buffer.is_cuda)
        buffer[: len(values)].copy_(source, non_blocking=True)
