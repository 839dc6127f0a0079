"""Decode attention of one step on a GPU: one launch that plans the step of all layers, then one launch per layer."""

import torch

from tangram_plan.ir import Schedule, decode_kernel_name, plan_kernel_name

from .generated_kernels import GeneratedKernels
from .head_tables import HeadTables
from .reference import PageTable

ROW_WORDS = 16  # of a segment


class DecodeStep:
    """Tables and buffers of decode steps of one rank with a fixed number of requests; padded rows are requests of 0 tokens.

    Everything is allocated here, once: at every step the same addresses are used, there is no host work and nothing waits, so
    that a CUDA graph can hold a whole step. Layers share partial results and arrivals: launches must be in order on one stream.

    Args:
        kernels: of the artefact; the buffers lie on their device.
        schedule: how CTAs find their work.
        num_requests: requests of a step, R in shapes.
        rank: whose KV heads.
        tables: head tables other than the artefact's.
        num_ctas: CTAs of the tile queue, by default those of the plan.
    """

    def __init__(
        self,
        kernels: GeneratedKernels,
        schedule: Schedule,
        num_requests: int,
        *,
        rank: int = 0,
        tables: HeadTables | None = None,
        num_ctas: int | None = None,
    ) -> None:
        plan, device = kernels.plan, kernels.device
        tables = tables or kernels.tables
        layers = tables.planned_layers
        self._kernels, self._schedule = kernels, schedule
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._step_tables = tables.step_tables(rank, device)
        self._group_tables = tables.group_tables(device)
        most_pairs = num_requests * max(len(tables.group_id[rank, layer]) for layer in layers)
        if schedule is Schedule.TILE_QUEUE:
            queue_ctas = num_ctas or plan.partition.num_ctas
            self._num_ctas = dict.fromkeys(layers, queue_ctas)
            num_tiles = num_requests * self._step_tables.group_id.numel() + len(layers)
            self._work: tuple[torch.Tensor, ...] = (torch.zeros(num_tiles, dtype=torch.int64, device=device),)
            self._options = {"num_ctas": queue_ctas}
            num_slots = queue_ctas + most_pairs
            num_rows = queue_ctas + num_slots
        else:
            splits = tables.splits_of(rank, num_requests)
            self._num_ctas = {layer: num_requests * sum(splits[layer]) for layer in layers}
            self._work = tables.split_tables(rank, num_requests, device)
            self._options = {}
            num_slots = num_rows = max(self._num_ctas.values())
        self.segments = torch.zeros(len(layers), num_rows, ROW_WORDS, dtype=torch.int32, device=device)

        partial_rows = num_slots * max(shape.gqa_ratio for shape in plan.model.layers if shape.num_kv_heads)
        self._partial_out = torch.zeros(partial_rows, plan.layout.head_dim, dtype=torch.float32, device=device)
        self._partial_lse = torch.zeros(partial_rows, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(num_slots, dtype=torch.int32, device=device)

    def plan(self, prompt_tokens: torch.Tensor, num_tokens: torch.Tensor, page_indptr: torch.Tensor) -> None:
        """Plan the step of all layers: one launch.

        Args:
            prompt_tokens: int32 [R], prompt lengths.
            num_tokens: int32 [R], tokens so far, the new one included; 0 for padded rows.
            page_indptr: int32 [R * num_groups] or more, as in `PageTable`.
        """
        launch = self._kernels.modules[plan_kernel_name(self._schedule)].launch
        inputs = (prompt_tokens, num_tokens, page_indptr, *self._step_tables, *self._group_tables)
        launch(*inputs, *self._work, self.segments, **self._options)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        score: torch.Tensor,
        pool: torch.Tensor,
        page_table: PageTable,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        overlap: bool = False,
    ) -> None:
        """Attention of one layer over everything that its KV heads hold; writes the new tokens to the pool: one launch.

        Args:
            layer: owner of the cache that is read.
            q: [R, num_kv_heads * gqa_ratio, D], heads and elements dense.
            k: [R, num_kv_heads, D], the new tokens' keys.
            v: the same, their values.
            score: float32 [R, num_kv_heads], dense; what their scorer says of them.
            pool: flat.
            page_table: pages of the batch.
            out: as q; written.
            sinks: float32 [num_kv_heads * gqa_ratio], logits of the query heads of a model that has them.
            overlap: start while the kernel before this one ends; see the generated kernel.
        """
        name = decode_kernel_name(self._kernels.plan.layout, q.shape[1] // k.shape[1])
        self._kernels.modules[name].launch(
            q,
            k,
            v,
            score,
            pool,
            page_table.page_ids,
            self.segments[self._places[layer]],
            self._partial_out,
            self._partial_lse,
            self._arrivals,
            *(() if sinks is None else (sinks,)),
            out,
            num_ctas=self._num_ctas[layer],
            overlap=overlap,
        )
