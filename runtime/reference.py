"""Ragged decode attention in plain torch: what the generated kernels are compared with, and how decoding runs on a CPU.

The pool is one flat tensor of the KV dtype; what lies where in a page is said in `ir.page_layout`, how many tokens a head
group holds in `ir.page_law`. In shapes, R is the number of requests, G of head groups, D the head dimension.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from tangram_plan.ir import PageLayout, Plan


class PageTable(NamedTuple):
    """Pages of a batch: those of request r and group g are `page_ids[page_indptr[r * G + g] : page_indptr[r * G + g + 1]]`."""

    page_ids: torch.Tensor  # int32 [num_pages_in_use]
    page_indptr: torch.Tensor  # int32 [R * G + 1]

    def pages(self, index: int) -> torch.Tensor:
        """Page ids of (request, group) number `r * G + g`, int64 [num_pages]."""
        start, end = self.page_indptr[index : index + 2].tolist()
        return self.page_ids[start:end].long()


class PageViews(NamedTuple):
    """The parts of every page, as views of the pool: writing to them writes to the pool."""

    keys: torch.Tensor  # KV dtype [num_pages, page_slots, D]
    values: torch.Tensor  # KV dtype [num_pages, page_slots, D]
    positions: torch.Tensor  # int32 [num_pages, page_slots]
    scores: torch.Tensor  # float32 [num_pages, page_slots]


class HeadPlace(NamedTuple):
    """Where a KV head lies."""

    group_id: int
    column: int


def torch_dtype(layout: PageLayout) -> torch.dtype:
    """Element type of the pool."""
    dtype = getattr(torch, str(layout.dtype))
    assert isinstance(dtype, torch.dtype)
    return dtype


def page_views(pool: torch.Tensor, layout: PageLayout) -> PageViews:
    """Splits a flat pool into the parts of its pages.

    Args:
        pool: KV dtype [num_pages * page_elements].
        layout: what a page is.
    """
    slots, size = layout.page_slots, layout.page_slots * layout.head_dim
    pages = pool.view(-1, layout.page_elements)
    tail = pages[:, 2 * size :]
    words = slots * 4 // layout.dtype.itemsize  # of positions, and of scores
    return PageViews(
        pages[:, :size].view(-1, slots, layout.head_dim),
        pages[:, size : 2 * size].view(-1, slots, layout.head_dim),
        tail[:, :words].view(torch.int32),
        tail[:, words:].view(torch.float32),
    )


def local_heads(plan: Plan, rank: int, layer: int) -> tuple[HeadPlace, ...]:
    """Where the KV heads of a layer lie that a rank owns, by head."""
    found = sorted(
        (kv_head.head, HeadPlace(group_id, column))
        for owner, group_id, column, kv_head in plan.grouping.columns()
        if owner == rank and kv_head.layer == layer
    )
    return tuple(place for _, place in found)


def lay_out_pages(
    plan: Plan,
    prompt_tokens: Sequence[int],
    num_tokens: Sequence[int],
    *,
    free_pages: torch.Tensor | None = None,
    groups: Collection[int] | None = None,
) -> PageTable:
    """A page table for a batch, by the plan's page law.

    Args:
        plan: gives the pages of every (request, group).
        prompt_tokens: prompt length of every request.
        num_tokens: tokens so far of every request; 0 for padded rows.
        free_pages: int [at least as many as needed], page ids in the order in which they are taken; by default 0, 1, 2 ...
        groups: head groups that get pages; by default all of them.
    """
    num_groups = len(plan.grouping.groups)
    counts = [
        plan.group_pages(g, prompt, total) if groups is None or g in groups else 0
        for prompt, total in zip(prompt_tokens, num_tokens, strict=True)
        for g in range(num_groups)
    ]
    page_indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
    page_indptr[1:] = torch.tensor(counts, dtype=torch.int32).cumsum(0)
    needed = sum(counts)
    page_ids = torch.arange(needed) if free_pages is None else free_pages[:needed]
    assert page_ids.numel() == needed, f"{page_ids.numel()} free pages, {needed} needed"
    return PageTable(page_ids.to(torch.int32), page_indptr)


def slots_of(
    page_ids: torch.Tensor, column: int, tokens_per_page: int, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(page, slot in the page) of the first `num_tokens` tokens of a column, each int64 [num_tokens]."""
    token = torch.arange(num_tokens)
    return page_ids[token // tokens_per_page], column * tokens_per_page + token % tokens_per_page


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softmax_scale: float,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of some queries over the tokens of one KV head; zeros if there is no token.

    Args:
        q: [num_queries, D].
        keys: [num_tokens, D].
        values: [num_tokens, D].
        softmax_scale: factor on the scores.
        logit_softcap: see `ir.AttentionForm`.
        sinks: [num_queries], logits that join the softmax without a token.
        seen: bool [num_queries, num_tokens], the tokens that a query sees, at least one; by default all.
    """
    logits = q @ keys.T * softmax_scale
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    if seen is not None:
        logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None]], dim=-1)
    weights = torch.softmax(logits, dim=-1)
    return weights[:, : len(keys)] @ values


def decode_attention(
    plan: Plan,
    places: Sequence[HeadPlace],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score: torch.Tensor,
    pool: torch.Tensor,
    page_table: PageTable,
    prompt_tokens: Sequence[int],
    num_tokens: Sequence[int],
    *,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attention of one new token per request over everything that its KV heads hold, of one layer and rank.

    The new token is written to the last slot of its KV heads first: key, value, position and score.

    Args:
        plan: gives lengths, page geometry and the form of attention.
        places: the layer's KV heads, as by `local_heads`.
        q: [R, num_kv_heads * gqa_ratio, D]; query heads of a KV head stand together.
        k: [R, num_kv_heads, D], the new tokens' keys.
        v: [R, num_kv_heads, D], their values.
        score: float32 [R, num_kv_heads], theirs.
        pool: KV dtype, flat; tokens of a head fill its slots in any order (attention does not mind), without gaps. Written.
        page_table: pages of the batch.
        prompt_tokens: prompt length of every request.
        num_tokens: tokens so far, the current one included; 0 for padded rows, whose output is zero.
        sinks: [num_kv_heads * gqa_ratio], logits of the query heads of a model that has them.
        softmax_scale: factor on the scores; by default the model's.
        compute_dtype: what to compute in.

    Returns:
        [R, num_kv_heads * gqa_ratio, D], in the dtype of q.
    """
    form = plan.model.attention
    scale = form.softmax_scale if softmax_scale is None else softmax_scale
    views = page_views(pool, plan.layout)
    num_groups = len(plan.grouping.groups)
    out = torch.zeros(q.shape, dtype=compute_dtype)
    gqa_ratio = q.shape[1] // max(1, len(places))
    for request, (prompt, total) in enumerate(zip(prompt_tokens, num_tokens, strict=True)):
        for head, (group_id, column) in enumerate(places):
            held = plan.group_tokens(group_id, prompt, total)
            if held == 0:
                continue
            tokens_per_page = plan.layout.tokens_per_page(plan.grouping.groups[group_id].num_members)
            pages = page_table.pages(request * num_groups + group_id)
            page, slot = slots_of(pages, column, tokens_per_page, held)
            last = page[-1], slot[-1]
            views.keys[last], views.values[last] = k[request, head], v[request, head]
            views.positions[last], views.scores[last] = total - 1, score[request, head]
            queries = slice(head * gqa_ratio, (head + 1) * gqa_ratio)
            out[request, queries] = attend(
                q[request, queries].to(compute_dtype),
                views.keys[page, slot].to(compute_dtype),
                views.values[page, slot].to(compute_dtype),
                scale,
                form.logit_softcap,
                None if sinks is None else sinks[queries].to(compute_dtype),
            )
    return out.to(q.dtype)
