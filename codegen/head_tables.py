"""Where every rank and layer finds its KV heads: the constants of the generated `head_tables.py`."""

from dataclasses import dataclass

from tangram_plan.ir import Plan


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
        rho: per group, part kept over `RHO_ONE`.
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
    """The tables of a verified plan."""
    local_heads = {
        (rank, layer): plan.model.local_kv_heads(layer, rank, plan.tensor_parallel)
        for rank in range(plan.tensor_parallel)
        for layer in plan.model.planned_layers
    }
    places = {kv_head: (group_id, column) for _, group_id, column, kv_head in plan.grouping.columns()}
    return HeadTables(
        layers={
            key: LayerTable(tuple(places[head][0] for head in heads), tuple(places[head][1] for head in heads))
            for key, heads in local_heads.items()
        },
        rho=tuple(group.rho for group in plan.grouping.groups),
        tokens_per_page=tuple(plan.layout.tokens_per_page(group.num_members) for group in plan.grouping.groups),
        splits={
            (static.batch, *key): tuple(static.splits[head] for head in heads)
            for static in plan.partition.static_splits
            for key, heads in local_heads.items()
        },
        planned_layers=plan.model.planned_layers,
        tensor_parallel=plan.tensor_parallel,
        batches=tuple(static.batch for static in plan.partition.static_splits),
    )
