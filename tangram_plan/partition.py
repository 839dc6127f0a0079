"""Partition: how decode attention of every layer is cut over CTAs, per batch size, and which schedule each case takes."""

from tangram_plan.ir import (
    BudgetTable,
    CtaPartition,
    HeadGrouping,
    KVHead,
    ModelShape,
    PageLayout,
    Schedule,
    ScheduleChoice,
    ScheduleEstimate,
    StaticSplits,
)

from .config import PartitionConfig
from .cost_model import estimate
from .device import Device
from .solvers import SPLIT_SOLVERS, SplitProblem


def partition_work(
    shape: ModelShape,
    budgets: BudgetTable,
    grouping: HeadGrouping,
    layout: PageLayout,
    device: Device,
    config: PartitionConfig,
    *,
    tensor_parallel: int,
    seed: int,
) -> CtaPartition:
    """Static splits for every batch size, and the schedule that the cost model prefers for every batch size and context.

    Args:
        shape: gives layers and their KV heads.
        budgets: sink and window of every law.
        grouping: gives each KV head the law of its group; that is what a kernel reads.
        layout: bytes of a token.
        device: number of CTAs, and the constants of the cost model.
        config: solver, batch sizes, contexts.
        tensor_parallel: ranks, each with CTAs of its own.
        seed: seed of the solver.
    """
    group_rho = {kv_head: grouping.groups[group_id].rho for _, group_id, _, kv_head in grouping.columns()}
    layers = _layers_by_rank(shape, tensor_parallel)

    def held(kv_heads: tuple[KVHead, ...], context: int) -> tuple[int, ...]:
        return tuple(budgets.law(group_rho[kv_head]).kept(context) for kv_head in kv_heads)

    solver = SPLIT_SOLVERS[config.solver]()
    static_splits = []
    for batch in config.batch_sizes:
        splits: dict[KVHead, int] = {}
        for kv_heads in (kv_heads for rank in layers for kv_heads in rank):
            problem = SplitProblem(
                held(kv_heads, config.contexts[-1]), max(len(kv_heads), device.num_ctas // batch), seed
            )
            splits |= zip(kv_heads, solver.solve(problem), strict=True)
        static_splits.append(StaticSplits(batch, splits))

    token_bytes = layout.kv_bytes
    choices = []
    for static in static_splits:
        for context in config.contexts:
            by_rank = [
                estimate(
                    [
                        (held(heads, context) * static.batch, [static.splits[head] for head in heads] * static.batch)
                        for heads in rank
                    ],
                    token_bytes,
                    device,
                )
                for rank in layers
            ]
            choices.append(_choose(static.batch, context, by_rank))
    return CtaPartition(
        device=device.name,
        num_ctas=device.num_ctas,
        tile_tokens=device.tile_tokens,
        segment_tiles=device.segment_tiles,
        step_tokens=device.step_tokens,
        num_warps=device.num_warps,
        num_stages=device.num_stages,
        static_splits=tuple(static_splits),
        choices=tuple(choices),
    )


def _layers_by_rank(shape: ModelShape, tensor_parallel: int) -> list[list[tuple[KVHead, ...]]]:
    """Per rank, per planned layer, the KV heads that the rank owns."""
    return [
        [shape.local_kv_heads(layer, rank, tensor_parallel) for layer in shape.planned_layers]
        for rank in range(tensor_parallel)
    ]


def _choose(batch: int, context: int, by_rank: list[dict[Schedule, ScheduleEstimate]]) -> ScheduleChoice:
    """The schedule whose slowest rank is fastest."""
    estimates = {
        schedule: ScheduleEstimate(
            max(rank[schedule].predicted_us for rank in by_rank),
            max(rank[schedule].makespan_over_ideal for rank in by_rank),
        )
        for schedule in Schedule
    }
    return ScheduleChoice(
        batch, context, min(estimates, key=lambda schedule: estimates[schedule].predicted_us), estimates
    )
