"""Where every rank and layer finds its KV heads: the constants of the generated `head_tables.py`."""

from dataclasses import dataclass

from tangram_plan.ir import KVHead, Plan, VerifyError


@dataclass(frozen=True)
class LayerTable:
    """KV heads of one (rank, layer), by local head.

    Args:
        group_ids: their head groups.
        columns: their places in a page.
    """

    group_ids: tuple[int, ...]
    columns: tuple[int, ...]


@dataclass(frozen=True)
class HeadTables:
    """All tables of a plan.

    Args:
        layers: (rank, layer) -> table, by rank, then layer.
        rho: per group, part kept over 65536.
        tokens_per_page: per group.
        splits: (batch, rank, layer) -> static splits per local KV head, by rising batch, rank, layer.
        planned_layers: layers of the plan; a layer's place is its queue.
        tensor_parallel: number of ranks.
        batches: batch sizes that static splits were planned for, rising.
    """

    layers: dict[tuple[int, int], LayerTable]
    rho: tuple[int, ...]
    tokens_per_page: tuple[int, ...]
    splits: dict[tuple[int, int, int], tuple[int, ...]]
    planned_layers: tuple[int, ...]
    tensor_parallel: int
    batches: tuple[int, ...]


def tabulate(plan: Plan) -> HeadTables:
    """The tables of a plan.

    Raises:
        VerifyError: if the KV heads of a layer do not divide over the ranks, or a KV head has no page.
    """
    places = {(rank, kv_head): (group_id, column) for rank, group_id, column, kv_head in plan.grouping.columns()}
    layers: dict[tuple[int, int], LayerTable] = {}
    for rank in range(plan.tensor_parallel):
        for layer in plan.model.planned_layers:
            heads = _local_heads(plan, rank, layer)
            for kv_head in heads:
                if (rank, kv_head) not in places:
                    raise VerifyError(
                        "KV head is in no head group of its rank",
                        where=f"layer {layer}, head {kv_head.head}",
                        expected=f"a group with this head on rank {rank}",
                    )
            found = [places[rank, kv_head] for kv_head in heads]
            layers[rank, layer] = LayerTable(tuple(group for group, _ in found), tuple(column for _, column in found))

    by_batch = sorted(plan.partition.static_splits, key=lambda splits: splits.batch)
    return HeadTables(
        layers=layers,
        rho=tuple(group.rho for group in plan.grouping.groups),
        tokens_per_page=tuple(plan.layout.tokens_per_page(group.num_members) for group in plan.grouping.groups),
        splits={
            (splits.batch, rank, layer): tuple(splits.splits[kv_head] for kv_head in _local_heads(plan, rank, layer))
            for splits in by_batch
            for rank, layer in layers
        },
        planned_layers=plan.model.planned_layers,
        tensor_parallel=plan.tensor_parallel,
        batches=tuple(splits.batch for splits in by_batch),
    )


def _local_heads(plan: Plan, rank: int, layer: int) -> tuple[KVHead, ...]:
    num_heads = plan.model.layers[layer].num_kv_heads
    if num_heads % plan.tensor_parallel:
        raise VerifyError(
            "KV heads do not divide over the ranks",
            where=f"layer {layer}",
            got=num_heads,
            expected=f"a multiple of {plan.tensor_parallel}",
        )
    per_rank = num_heads // plan.tensor_parallel
    return tuple(KVHead(layer, head) for head in range(rank * per_rank, (rank + 1) * per_rank))
