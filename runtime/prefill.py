"""Attention of prefill chunks over a compressed past on a GPU, layer by layer: by a generated kernel, or by library attention.

The generated kernel reads the past where it lies in the pages: one launch for all requests. The other path copies past and chunk
of every KV head into one run and lets a library attend: one copy and one call for each request with a past, and one call for
those next to each other that have none.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from tangram_plan.ir import TangramError, gather_kernel_name, prefill_kernel_name

from .generated_kernels import GeneratedKernels
from .head_tables import HeadTables, int32
from .library_attention import LibraryAttention, TorchAttention, flash_attention_3
from .reference import PageTable, torch_dtype


class PrefillPath(StrEnum):
    """How a chunk attends to its past."""

    PAGED = "paged"
    GATHER = "gather"


class PrefillStep(NamedTuple):
    """The chunks of one step, the same for all layers; R requests, G head groups."""

    held: torch.Tensor  # int32 [R, G], tokens of the past
    chunk_indptr: torch.Tensor  # int32 [R + 1], where among the step's tokens each chunk begins
    held_tokens: Sequence[Sequence[int]]  # `held` on the host
    chunk_starts: Sequence[int]  # `chunk_indptr` on the host


def make_prefill_step(
    held_tokens: Sequence[Sequence[int]], chunk_tokens: Sequence[int], device: torch.device | str
) -> PrefillStep:
    """The chunks of a step, on the device.

    Args:
        held_tokens: tokens of the past, per request and group.
        chunk_tokens: tokens of every request's chunk; may be 0.
        device: where the tensors lie.
    """
    chunk_starts = list(accumulate(chunk_tokens, initial=0))
    held = int32([tokens for row in held_tokens for tokens in row], device).view(len(chunk_tokens), -1)
    return PrefillStep(held, int32(chunk_starts, device), held_tokens, chunk_starts)


class Gathered(NamedTuple):
    """Past and chunk of one request, KV head after KV head; T tokens over all of them."""

    keys: torch.Tensor  # KV dtype [T, 1, D]
    values: torch.Tensor  # KV dtype [T, 1, D]
    kv_indptr: torch.Tensor  # int32 [num_kv_heads + 1], where each KV head begins
    kv_tokens: Sequence[int]  # of every KV head


class PastGather:
    """Room for what is gathered of one request and layer, and the launch that fills it.

    Args:
        kernels: of the artefact; the buffers lie on their device.
        max_tokens: of past and chunk, over all KV heads of a layer, for one request, at most; see `gathered_tokens`.
        rank: whose KV heads.
        tables: head tables other than the artefact's.
    """

    def __init__(
        self, kernels: GeneratedKernels, max_tokens: int, *, rank: int = 0, tables: HeadTables | None = None
    ) -> None:
        layout, device, tables = kernels.plan.layout, kernels.device, tables or kernels.tables
        self._launch = kernels.modules[gather_kernel_name(layout)].launch
        self._group_ids = {layer: tables.group_id[rank, layer] for layer in tables.planned_layers}
        self._tables = {layer: tables.layer_tables(rank, layer, device) for layer in tables.planned_layers}
        self._tokens_per_page = tables.group_tables(device).tokens_per_page
        size = max_tokens, 1, layout.head_dim
        self._keys, self._values = (torch.zeros(size, dtype=torch_dtype(layout), device=device) for _ in range(2))
        most_heads = max(map(len, self._group_ids.values()))
        self._kv_indptr = torch.zeros(most_heads + 1, dtype=torch.int32, device=device)

    def gather(
        self,
        layer: int,
        request: int,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        page_table: PageTable,
        step: PrefillStep,
    ) -> Gathered:
        """Copies past and chunk of one request: one launch. What was gathered before is overwritten.

        Args:
            layer: owner of the cache that is read.
            request: whose.
            k: [num_tokens, num_kv_heads, D], heads and elements dense; the keys of all chunks.
            v: the same, their values.
            pool: flat.
            page_table: pages of the batch.
            step: its chunks.

        Raises:
            TangramError: if there is more to gather than there is room for.
        """
        start, end = step.chunk_starts[request : request + 2]
        held = [step.held_tokens[request][group_id] for group_id in self._group_ids[layer]]
        kv_tokens = [past + end - start for past in held]
        total = sum(kv_tokens)
        if total > len(self._keys):
            raise TangramError(
                "more tokens to gather than there is room for",
                where=f"layer {layer}, request {request}",
                got=total,
                expected=f"at most {len(self._keys)}",
            )
        gathered = Gathered(self._keys[:total], self._values[:total], self._kv_indptr[: len(kv_tokens) + 1], kv_tokens)
        self._launch(
            k,
            v,
            pool,
            *page_table,
            step.held,
            *self._tables[layer],
            self._tokens_per_page,
            *gathered[:3],
            request=request,
            chunk_start=start,
            chunk_tokens=end - start,
            max_held=max(held),
        )
        return gathered


class Prefill:
    """Attention of chunks, for the layers of one rank.

    Buffers are allocated here, once; layers and requests share them, so launches must be in order on one stream. Nothing waits.

    Args:
        kernels: of the artefact; the buffers lie on their device.
        max_gathered_tokens: tokens of past and chunk over all KV heads of a layer, for one request, at most; see
            `gathered_tokens`. 0 for the paged path.
        path: how chunks attend to their past; by default through FlashAttention 3 if it is there, else by the kernel.
        rank: whose KV heads.
        tables: head tables other than the artefact's.

    Raises:
        TangramError: if library attention is asked for and none has the model's form.
    """

    def __init__(
        self,
        kernels: GeneratedKernels,
        max_gathered_tokens: int,
        *,
        path: PrefillPath | None = None,
        rank: int = 0,
        tables: HeadTables | None = None,
    ) -> None:
        plan, device = kernels.plan, kernels.device
        tables = tables or kernels.tables
        layout, form = plan.layout, plan.model.attention
        flash = None if path is PrefillPath.PAGED else flash_attention_3(layout, form, device)
        self.path = path or (PrefillPath.GATHER if flash else PrefillPath.PAGED)
        self._kernels = kernels
        self._group_ids = {layer: tables.group_id[rank, layer] for layer in tables.planned_layers}
        self._tables = {layer: tables.layer_tables(rank, layer, device) for layer in tables.planned_layers}
        self._tokens_per_page = tables.group_tables(device).tokens_per_page
        if self.path is PrefillPath.GATHER:
            self.library: LibraryAttention = flash or TorchAttention(form)
            self.past = PastGather(kernels, max_gathered_tokens, rank=rank, tables=tables)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        page_table: PageTable,
        step: PrefillStep,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Attention of one layer: every query sees its request's past and, of its chunk, the tokens up to its own.

        Args:
            layer: owner of the cache that is read.
            q: [num_tokens, num_kv_heads * gqa_ratio, D], heads and elements dense; query heads of a KV head stand together.
            k: [num_tokens, num_kv_heads, D], heads and elements dense; the chunks' keys, which need not be in the pool.
            v: the same, their values.
            pool: flat.
            page_table: pages of the batch.
            step: its chunks.
            out: as q; written, but for tokens of no chunk.
            sinks: float32 [num_kv_heads * gqa_ratio], logits of the query heads of a model that has them.

        Raises:
            TangramError: if there is more to gather than buffers were made for.
        """
        if step.chunk_starts[-1] == 0:
            return
        if self.path is PrefillPath.PAGED:
            self._attend_paged(layer, q, k, v, pool, page_table, step, out, sinks)
            return
        for first, end, has_past in self._runs(layer, step):
            if has_past:
                gathered = self.past.gather(layer, first, k, v, pool, page_table, step)
                rows, num_kv_heads = slice(*step.chunk_starts[first : end + 1]), k.shape[1]
                q_heads, out_heads = (_by_kv_head(part[rows], num_kv_heads) for part in (q, out))
                self.library.gathered(q_heads, *gathered, sinks, out_heads)
            else:
                indptr, starts = step.chunk_indptr[first : end + 1], step.chunk_starts[first : end + 1]
                self.library.chunks(q, k, v, indptr, starts, sinks, out)

    def _runs(self, layer: int, step: PrefillStep) -> Iterator[tuple[int, int, bool]]:
        """Requests (first, end, whether there is a past): each with a past alone, others with their neighbours."""
        first = 0
        for request, (start, end) in enumerate(pairwise(step.chunk_starts)):
            held = step.held_tokens[request]
            if start < end and any(held[group_id] for group_id in self._group_ids[layer]):
                if step.chunk_starts[first] < start:
                    yield first, request, False
                yield request, request + 1, True
                first = request + 1
        if step.chunk_starts[first] < step.chunk_starts[-1]:
            yield first, len(step.chunk_starts) - 1, False

    def _attend_paged(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        page_table: PageTable,
        step: PrefillStep,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        name = prefill_kernel_name(self._kernels.plan.layout, q.shape[1] // k.shape[1])
        self._kernels.modules[name].launch(
            q,
            k,
            v,
            pool,
            *page_table,
            step.held,
            step.chunk_indptr,
            *self._tables[layer],
            self._tokens_per_page,
            *(() if sinks is None else (sinks,)),
            out,
            max_chunk_tokens=max(end - start for start, end in pairwise(step.chunk_starts)),
        )


def gathered_tokens(tables: HeadTables, rank: int, held_tokens: Sequence[int], chunk_tokens: int) -> int:
    """Tokens of past and chunk over all KV heads of a rank's layer, of the layer that has most.

    Args:
        tables: of the artefact.
        rank: whose KV heads.
        held_tokens: tokens of the past, per group.
        chunk_tokens: tokens of the chunk.
    """
    return max(
        sum(held_tokens[group_id] + chunk_tokens for group_id in tables.group_id[rank, layer])
        for layer in tables.planned_layers
    )


def _by_kv_head(rows: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[num_tokens, num_q_heads, D] as [num_kv_heads, num_tokens, gqa_ratio, D], without a copy."""
    num_tokens, num_q_heads, head_dim = rows.shape
    return rows.view(num_tokens, num_kv_heads, num_q_heads // num_kv_heads, head_dim).transpose(0, 1)
