"""Attention and compression of engine steps in plain torch: how a plan is served on a CPU."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from tangram_plan.ir import Plan, group_pages_in_row

from .batch import Batch, Chunks
from .eviction_reference import evict
from .prefill_reference import prefill_attention
from .reference import PageTable, decode_attention, local_heads
from .serving_scorers import ServingScorer


class ReferenceStep(NamedTuple):
    """One step, the same for all layers."""

    prompt_tokens: Sequence[int]  # of the requests that decode
    num_tokens: Sequence[int]
    decode_pages: PageTable
    chunks: Chunks
    chunk_pages: PageTable
    positions: torch.Tensor  # int64 [tokens of all chunks]


class ReferenceAttention:
    """Attention and compression for the layers of one rank.

    Args:
        plan: of the artefact.
        rank: whose KV heads.
        scorer: ranks tokens.
    """

    def __init__(self, plan: Plan, rank: int, scorer: ServingScorer) -> None:
        self._plan, self._scorer = plan, scorer
        self._places = {layer: local_heads(plan, rank, layer) for layer in plan.model.planned_layers}

    def begin(self, batch: Batch, rows: torch.Tensor) -> ReferenceStep:
        """Make what all layers of a step need.

        Args:
            batch: its requests.
            rows: int [R, width], pages of every request, in the order of `ir.page_row`.
        """
        decodes = slice(batch.num_decodes)
        chunks = batch.chunks(self._plan)
        positions = [torch.arange(start, start + new) for start, new in zip(chunks.start, chunks.tokens, strict=True)]
        table = [self._groups(batch, rows, request) for request in range(len(batch.num_tokens))]
        return ReferenceStep(
            batch.prompt_tokens[decodes],
            batch.num_tokens[decodes],
            _page_table(table[decodes]),
            chunks,
            _page_table(table[chunks.first_request :]),
            torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64),
        )

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        step: ReferenceStep,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attention of one layer over what is kept; then new tokens are written, and chunks compressed.

        A decoded token is written with a score of 0: no answer is compressed yet.

        Args:
            layer: whose.
            q: [num_tokens, num_kv_heads * gqa_ratio, D], of all requests; rows after the last request's are left alone.
            k: [num_tokens, num_kv_heads, D].
            v: the same.
            pool: KV dtype, flat.
            step: from `begin`.
            out: as q; written.
            sinks: [num_kv_heads * gqa_ratio], logits of the query heads of a model that has them.
        """
        plan, places = self._plan, self._places[layer]
        decodes = slice(len(step.num_tokens))
        if step.num_tokens:
            score = torch.zeros(len(step.num_tokens), len(places))
            lengths = step.prompt_tokens, step.num_tokens
            rows = q[decodes], k[decodes], v[decodes], score
            out[decodes] = decode_attention(plan, places, *rows, pool, step.decode_pages, *lengths, sinks=sinks)
        chunks = step.chunks
        if chunks.tokens:
            tokens = slice(chunks.first_token, chunks.first_token + sum(chunks.tokens))
            q, k, v = q[tokens], k[tokens], v[tokens]
            pages, starts = step.chunk_pages, list(accumulate(chunks.tokens, initial=0))
            out[tokens] = prefill_attention(plan, places, q, k, v, pool, pages, chunks.held, starts, sinks=sinks).to(
                out.dtype
            )
            scores = self._scorer.scores(layer, k, step.positions)
            evict(plan, places, k, v, scores, pool, pages, chunks.held, chunks.kept, chunks.start, chunks.tokens)

    def _groups(self, batch: Batch, rows: torch.Tensor, request: int) -> list[torch.Tensor]:
        """Page ids of every group of a request."""
        places = group_pages_in_row(self._plan, batch.prompt_tokens[request], batch.num_tokens[request])
        return [rows[request, group] for group in places]


def _page_table(requests: Sequence[Sequence[torch.Tensor]]) -> PageTable:
    groups = [group for request in requests for group in request]
    indptr = list(accumulate((len(group) for group in groups), initial=0))
    ids = torch.cat(groups) if groups else torch.empty(0)
    return PageTable(ids.to(torch.int32), torch.tensor(indptr, dtype=torch.int32))
