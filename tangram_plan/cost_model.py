"""What decode attention of one step takes, by schedule, batch and context.

Attention reads memory and little else, so time is bytes over bandwidth, in the layer's busiest CTA or over all of them,
whichever is longer, plus what a layer costs whatever its bytes:

    time  = sum over layers of  overhead + max(bytes / read_bandwidth, makespan_bytes / cta_bandwidth)
    bytes = tokens * 2 * head_dim * itemsize            tokens: of all (request, KV head) pairs of the layer and rank

    static splits   request by request, the splits of its KV heads go to the next free CTA in order; makespan: the last to end
    tile queue      tiles of all pairs laid end to end, each pair behind segment_tiles that stand for beginning it; N = min(CTAs,
                    tiles) equal shares; makespan = ceil(tiles / N) tiles

Constants come from the device description (`device.py`).
"""

import heapq
from collections.abc import Sequence

from tangram_plan.ir import Schedule, ScheduleEstimate

from .device import Device
from .solvers.split_problem import split_tokens


def static_makespan(tokens: Sequence[int], splits: Sequence[int], num_ctas: int) -> int:
    """Tokens of the busiest CTA when splits are dealt in order to the next free CTA.

    Args:
        tokens: per (request, KV head) pair of one layer and rank, in order, tokens that it holds.
        splits: per pair, CTAs that share it.
        num_ctas: CTAs in flight.
    """
    works = [split_tokens(length, count) for length, count in zip(tokens, splits, strict=True) for _ in range(count)]
    if len(works) <= num_ctas:
        return max(works)
    busy = [0] * num_ctas
    for work in works:
        heapq.heapreplace(busy, busy[0] + work)
    return max(busy)


def queued_tiles(tokens: Sequence[int], device: Device) -> int:
    """Tiles of the queue, those that stand for beginning pairs included; `tokens` as in `static_makespan`."""
    return sum(device.segment_tiles - (-length // device.tile_tokens) for length in tokens)


def queue_makespan(tokens: Sequence[int], device: Device) -> int:
    """Tokens of the busiest CTA, and what stands for beginning pairs, when tiles are cut into equal shares."""
    tiles = queued_tiles(tokens, device)
    return -(-tiles // min(device.num_ctas, tiles)) * device.tile_tokens if tiles else 0


def estimate(
    layers: Sequence[tuple[Sequence[int], Sequence[int]]], token_bytes: int, device: Device
) -> dict[Schedule, ScheduleEstimate]:
    """What each schedule takes for all layers of one rank.

    Args:
        layers: per layer, tokens and static splits of each (request, KV head) pair.
        token_bytes: bytes of one token's key and value in one KV head.
        device: its constants.
    """
    time_us = dict.fromkeys(Schedule, 0.0)
    worst = dict.fromkeys(Schedule, 1.0)
    for tokens, splits in layers:
        total = sum(tokens)
        makespans = {
            Schedule.STATIC_SPLITS: static_makespan(tokens, splits, device.num_ctas),
            Schedule.TILE_QUEUE: queue_makespan(tokens, device),
        }
        queued = {
            Schedule.STATIC_SPLITS: total,
            Schedule.TILE_QUEUE: queued_tiles(tokens, device) * device.tile_tokens,
        }
        overheads = {
            Schedule.STATIC_SPLITS: device.static_splits_overhead_us,
            Schedule.TILE_QUEUE: device.tile_queue_overhead_us,
        }
        for schedule, makespan in makespans.items():
            # GB/s are bytes per nanosecond: 1e3 of them per microsecond.
            memory_us = (
                max(total / device.read_bandwidth_gb_s, makespan / device.cta_bandwidth_gb_s) * token_bytes / 1e3
            )
            time_us[schedule] += overheads[schedule] + memory_us
            worst[schedule] = max(worst[schedule], makespan * device.num_ctas / queued[schedule])
    return {schedule: ScheduleEstimate(round(time_us[schedule], 1), round(worst[schedule], 4)) for schedule in Schedule}
