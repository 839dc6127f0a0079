"""Attention of prefill chunks over a compressed past, in plain torch: what kernels and library attention are compared with.

A query sees every token that its KV head kept, wherever it came from, and the tokens of its own chunk up to itself. In shapes,
R is the number of requests, G of head groups, D the head dimension.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from tangram_plan.ir import Plan

from .reference import HeadPlace, PageTable, attend, page_views, slots_of

BLOCK_TOKENS = 512  # of a chunk that are computed together: bounds the size of the logits


def prefill_attention(
    plan: Plan,
    places: Sequence[HeadPlace],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    page_table: PageTable,
    held: Sequence[Sequence[int]],
    chunk_starts: Sequence[int],
    *,
    sinks: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attention of the chunks of some requests, of one layer and rank.

    Args:
        plan: gives page geometry and the form of attention.
        places: the layer's KV heads, as by `local_heads`.
        q: [num_tokens, num_kv_heads * gqa_ratio, D]; query heads of a KV head stand together.
        k: [num_tokens, num_kv_heads, D], the chunks' keys.
        v: the same, their values.
        pool: KV dtype, flat; the past of a KV head fills its first slots, in any order.
        page_table: pages of the batch.
        held: tokens of the past, per request and group.
        chunk_starts: where among the tokens each request's chunk begins, and where the last ends; R + 1.
        sinks: [num_kv_heads * gqa_ratio], logits of the query heads of a model that has them.
        compute_dtype: what to compute in.

    Returns:
        As q, in `compute_dtype`; zeros for tokens of no chunk.
    """
    form, layout, groups = plan.model.attention, plan.layout, plan.grouping.groups
    views = page_views(pool, layout)
    out = torch.zeros(q.shape, dtype=compute_dtype)
    gqa_ratio = q.shape[1] // max(1, len(places))
    for request, (start, end) in enumerate(pairwise(chunk_starts)):
        for head, (group_id, column) in enumerate(places):
            pages = page_table.pages(request * len(groups) + group_id)
            tokens_per_page, past = layout.tokens_per_page(groups[group_id].num_members), held[request][group_id]
            where = slots_of(pages, column, tokens_per_page, past)
            keys = torch.cat([views.keys[where], k[start:end, head]]).to(compute_dtype)
            values = torch.cat([views.values[where], v[start:end, head]]).to(compute_dtype)
            queries = slice(head * gqa_ratio, (head + 1) * gqa_ratio)
            for first in range(start, end, BLOCK_TOKENS):
                last = min(first + BLOCK_TOKENS, end)
                num_tokens, seen = last - first, past + last - start
                number = torch.arange(seen - num_tokens, seen)  # of a query's own token, among those of its KV head
                causal = torch.arange(seen) <= number[:, None]
                head_out = attend(
                    q[first:last, queries].flatten(0, 1).to(compute_dtype),
                    keys[:seen],
                    values[:seen],
                    form.softmax_scale,
                    form.logit_softcap,
                    None if sinks is None else sinks[queries].repeat(num_tokens).to(compute_dtype),
                    causal.repeat_interleave(gqa_ratio, dim=0),
                )
                out[first:last, queries] = head_out.view(num_tokens, gqa_ratio, -1)
    return out
