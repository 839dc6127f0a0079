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
        makespan_over_ideal: tokens of the busiest CTA over an equal share of all tokens, in the worst layer.
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
        tile_tokens: tokens of a tile of the queue, and of a step of the kernels' inner loop.
        static_splits: by rising batch.
        choices: by rising batch, then context.
    """

    device: str
    num_ctas: int
    tile_tokens: int
    static_splits: tuple[StaticSplits, ...]
    choices: tuple[ScheduleChoice, ...]
