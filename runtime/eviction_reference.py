"""Scores and eviction after a prefill chunk in plain torch: what the generated kernels are compared with, and the CPU path.

Of the tokens in a KV head's slots and those of the chunk, exactly so many stay as the caller says, by a strict total order:
protected tokens first (the plan's sinks, and the most recent tokens), then higher score, then lower position. NaN is below all
other scores, and -0.0 is 0.0. Survivors in slots that stay do not move; the others, in the order of their slots and then of the
chunk, fill the free slots in rising order. Shapes as in `runtime.reference`; C is the number of tokens of all chunks.
"""

from collections.abc import Sequence

import torch

from tangram_plan.ir import Plan

from .reference import HeadPlace, PageTable, page_views, slots_of

NORM_FLOOR = 1e-8  # of keys and anchors, so that zeros have a cosine, too
ABOVE_FLOATS = 1e300  # infinite scores, in float64: infinity itself is above and below them


def key_anchor_scores(k: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Minus the cosine of a token's key and its KV head's anchor: what points elsewhere than most keys is kept longer.

    Args:
        k: [C, num_kv_heads, D].
        anchors: float32 [num_kv_heads, D].

    Returns:
        float32 [num_kv_heads, C].
    """
    k = k.float()
    norms = k.norm(dim=-1).clamp(min=NORM_FLOOR) * anchors.norm(dim=-1).clamp(min=NORM_FLOOR)
    scores: torch.Tensor = -(k * anchors).sum(-1) / norms
    return scores.T.contiguous()


def survivors(positions: torch.Tensor, scores: torch.Tensor, protected: torch.Tensor, kept: int) -> torch.Tensor:
    """Which tokens stay, bool [num_tokens].

    Args:
        positions: int [num_tokens], all different.
        scores: float32 [num_tokens].
        protected: bool [num_tokens]; these outrank all others, whatever their score.
        kept: how many stay.
    """
    rank = scores.double().clamp(-ABOVE_FLOATS, ABOVE_FLOATS).nan_to_num(nan=-torch.inf)
    rank = torch.where(protected, torch.inf, rank)
    order = positions.argsort()
    order = order[rank[order].argsort(descending=True, stable=True)]
    stays = torch.zeros(len(positions), dtype=torch.bool, device=positions.device)
    stays[order[:kept]] = True
    return stays


def evict(
    plan: Plan,
    places: Sequence[HeadPlace],
    k: torch.Tensor,
    v: torch.Tensor,
    scores: torch.Tensor,
    pool: torch.Tensor,
    page_table: PageTable,
    held: Sequence[Sequence[int]],
    kept: Sequence[Sequence[int]],
    chunk_start: Sequence[int],
    chunk_tokens: Sequence[int],
) -> None:
    """Keep the best tokens of past and chunk, of some KV heads of one layer and rank; writes the pool.

    Args:
        plan: gives page geometry, sinks and window.
        places: where the KV heads lie.
        k: [C, num_kv_heads, D], keys of the chunks, one request after the other.
        v: the same, their values.
        scores: float32 [num_kv_heads, C], theirs.
        pool: KV dtype, flat.
        page_table: pages of the batch, for the tokens before as well as for those that stay.
        held: tokens in the cache before the chunk, per request and group.
        kept: tokens that stay, per request and group; at most those held and the chunk's.
        chunk_start: position of the first token of every request's chunk.
        chunk_tokens: tokens of every request's chunk; requests without one are left alone.
    """
    views, first = page_views(pool, plan.layout), 0
    for request, (start, num_new) in enumerate(zip(chunk_start, chunk_tokens, strict=True)):
        new = torch.arange(first, first + num_new, device=pool.device)
        first += num_new
        for head, (group_id, column) in enumerate(places):
            before, after = held[request][group_id], kept[request][group_id]
            if num_new == 0:
                continue
            tokens_per_page = plan.layout.tokens_per_page(plan.grouping.groups[group_id].num_members)
            page_ids = page_table.pages(request * len(held[request]) + group_id).cpu()
            page, slot = (
                index.to(pool.device) for index in slots_of(page_ids, column, tokens_per_page, max(before, after))
            )
            past = page[:before], slot[:before]
            positions = torch.cat([views.positions[past], start + torch.arange(num_new, device=pool.device)])
            head_scores = torch.cat([views.scores[past], scores[head, new]])
            protected = (positions < plan.budgets.sink_tokens) | (
                positions >= start + num_new - plan.budgets.window_tokens
            )
            stays = survivors(positions, head_scores, protected, after)

            staying = stays.nonzero()[:, 0]  # numbers below `before` are slots, the others the chunk's tokens
            moves = staying[staying >= min(before, after)]
            free = torch.ones(after, dtype=torch.bool, device=pool.device)
            free[staying[staying < min(before, after)]] = False
            target = page[:after][free], slot[:after][free]
            moving, arriving = moves[moves < before], new[moves[moves >= before] - before]
            source = page[moving], slot[moving]
            views.keys[target] = torch.cat([views.keys[source], k[arriving, head]])
            views.values[target] = torch.cat([views.values[source], v[arriving, head]])
            views.positions[target] = positions[moves].to(torch.int32)
            views.scores[target] = head_scores[moves]
