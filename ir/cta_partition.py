"""How the work of decode attention is cut over CTAs."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from .model_shape import KVHead


class Schedule(StrEnum):
    """How CTAs find their work."""

    STATIC_SPLITS = "static_splits"  # splits per KV head fixed ahead of time (the paper)
    TILE_QUEUE = "tile_queue"  # tiles of all (request, KV head) pairs end to end, cut into equal shares on the device


@dataclass(frozen=True)
class StaticSplits:
    """Split-KV counts for one batch size.

    Args:
        batch: requests decoded together.
        splits: per KV head, CTAs that share one request's history of it; at least 1.
    """

    batch: int
    splits: Mapping[KVHead, int]


@dataclass(frozen=True)
class ScheduleEstimate:
    """What the cost model says of one schedule.

    Args:
        predicted_us: attention of one decode step over all layers, in microseconds, on the slowest rank.
        makespan_over_ideal: tokens of the busiest CTA over an equal share of all that is dealt out, in the worst layer.
    """

    predicted_us: float
    makespan_over_ideal: float


@dataclass(frozen=True)
class ScheduleChoice:
    """The schedule for one (batch, context), with what every schedule was predicted to take."""

    batch: int
    context: int
    schedule: Schedule
    estimates: Mapping[Schedule, ScheduleEstimate]


@dataclass(frozen=True)
class CtaPartition:
    """Partition for every batch size that was planned.

    Args:
        device: device description that the cost model used.
        num_ctas: CTAs in flight on the device (N_CTA).
        tile_tokens: tokens of a tile of the queue.
        segment_tiles: tiles that stand for what it costs a CTA to begin a (request, KV head) pair.
        step_tokens: tokens that a decode kernel reads at once; like warps and stages, a wish that codegen makes smaller where
            head_dim, dtype or GQA ratio ask for it.
        num_warps: warps of a decode kernel's CTA.
        num_stages: loads in flight of its inner loop.
        static_splits: by rising batch.
        choices: by rising batch, then context.
    """

    device: str
    num_ctas: int
    tile_tokens: int
    segment_tiles: int
    step_tokens: int
    num_warps: int
    num_stages: int
    static_splits: tuple[StaticSplits, ...]
    choices: tuple[ScheduleChoice, ...]
