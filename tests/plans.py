"""Small plans, built by hand."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec

from tangram_plan.ir import (
    KEEP_EVERYTHING,
    ORIGINAL_ORDER,
    BudgetTable,
    CtaPartition,
    HeadGroup,
    HeadGrouping,
    KVDtype,
    KVHead,
    LayerKind,
    LayerShape,
    ModelShape,
    PageLayout,
    Plan,
    Provenance,
    Schedule,
    ScheduleChoice,
    ScheduleEstimate,
    StaticSplits,
    verify_plan,
)

P = ParamSpec("P")
ESTIMATES = {schedule: ScheduleEstimate(predicted_us=10.0, makespan_over_ideal=1.0) for schedule in Schedule}
MANUAL = Provenance(
    profile="hand", profile_hash="", rule=KEEP_EVERYTHING, grouping_solver="hand", partition_solver="hand", seed=0
)


def build_plan(
    *,
    num_layers: int = 3,
    num_kv_heads: int = 4,
    gqa_ratio: int = 3,
    head_dim: int = 64,
    dtype: KVDtype = KVDtype.FLOAT32,
    page_slots: int = 64,
    tensor_parallel: int = 1,
    sink_tokens: int = 4,
    window_tokens: int = 8,
    rho: Sequence[int] = (65536, 20000, 3000, 0),
    group_sizes: Sequence[int] | None = None,
    tile_tokens: int = 32,
    segment_tiles: int = 1,
    step_tokens: int = 32,
    num_ctas: int = 12,
    splits: Sequence[int] = (3, 1, 2),
    batches: Sequence[int] = (1, 4),
    compress_chunk_tokens: int = 8192,
    max_new_tokens: int = 1024,
) -> Plan:
    """A plan whose groups take KV heads in a fixed scattered order, so that they span layers; for any values, valid or not.

    Args:
        rho: part kept of the groups, falling; the last one goes on to all further groups.
        group_sizes: members per rank of each group; by default 1, 2, 3, 1, 2, 3 ... until all KV heads are placed.
        splits: static splits, dealt out to the KV heads in turn; one each for batches that have not so many CTAs.
        batches: batch sizes of the static splits.
        compress_chunk_tokens: of the plan.
        max_new_tokens: of the plan.
    """
    layer_shape = LayerShape(LayerKind.FULL, num_kv_heads, num_kv_heads * gqa_ratio, 0)
    layers = tuple(LayerShape(layer_shape.kind, num_kv_heads, layer_shape.num_q_heads, i) for i in range(num_layers))
    model = ModelShape("hand", layers, head_dim)
    local = num_kv_heads // tensor_parallel
    ranks = []
    for rank in range(tensor_parallel):
        heads = [KVHead(layer, rank * local + head) for head in range(local) for layer in range(num_layers)]
        ranks.append(heads[rank:] + heads[:rank])  # not the same order on every rank
    sizes = list(group_sizes or [])
    while sum(sizes) < num_layers * local:
        sizes.append(min(len(sizes) % 3 + 1, num_layers * local - sum(sizes)))
    groups, start = [], 0
    for i, size in enumerate(sizes):
        members = tuple(tuple(heads[start : start + size]) for heads in ranks)
        groups.append(HeadGroup(rho[min(i, len(rho) - 1)], members))
        start += size
    kv_heads = list(model.kv_heads())
    dealt = {kv_head: splits[i % len(splits)] for i, kv_head in enumerate(kv_heads)}
    busiest = max(
        sum(dealt[kv_head] for kv_head in model.local_kv_heads(layer, rank, tensor_parallel))
        for layer in model.planned_layers
        for rank in range(tensor_parallel)
    )
    return Plan(
        model=model,
        tensor_parallel=tensor_parallel,
        head_order=ORIGINAL_ORDER,
        budgets=BudgetTable(
            sink_tokens, window_tokens, {h: g.rho for g in groups for m in g.members_by_rank for h in m}
        ),
        grouping=HeadGrouping(tuple(groups), page_slots),
        layout=PageLayout(page_slots, head_dim, dtype),
        partition=CtaPartition(
            device="hand",
            num_ctas=num_ctas,
            tile_tokens=tile_tokens,
            segment_tiles=segment_tiles,
            step_tokens=step_tokens,
            num_warps=4,
            num_stages=3,
            static_splits=tuple(
                StaticSplits(batch, dealt if busiest * batch <= num_ctas else dict.fromkeys(kv_heads, 1))
                for batch in batches
            ),
            choices=tuple(ScheduleChoice(batch, 2048, Schedule.TILE_QUEUE, ESTIMATES) for batch in batches),
        ),
        scorer="hand",
        compress_chunk_tokens=compress_chunk_tokens,
        max_new_tokens=max_new_tokens,
        provenance=MANUAL,
    )


def _verified(build: Callable[P, Plan]) -> Callable[P, Plan]:
    @wraps(build)
    def build_verified(*args: P.args, **kwargs: P.kwargs) -> Plan:
        plan = build(*args, **kwargs)
        verify_plan(plan)
        return plan

    return build_verified


valid_plan = _verified(build_plan)
