"""`bench tune`: measures what a device description says of a GPU, and writes one.

Kernels of every choice of CTAs, tile, step, warps and stages are generated from the user's plan and timed as `bench decode` does,
one choice changed at a time. The constants of the cost model are what the best choice then takes.
"""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from tangram_plan.cost_model import static_makespan
from tangram_plan.device import Device
from tangram_plan.ir import Plan, Schedule, TangramError, load_artefact
from tangram_plan.terminal import log, new_table

from .decode import layer_work
from .decode_case import REGIMES, DecodeCase, DecodeInputs
from .timing import read_bandwidth, require_gpu, time_graph


@dataclass(frozen=True)
class Tuning:
    """One choice of what a device description says of the decode kernels; fields as in `Device`."""

    ctas_per_sm: int
    tile_tokens: int
    segment_tiles: int
    step_tokens: int
    num_warps: int
    num_stages: int


CHOICES: Mapping[str, Sequence[int]] = {
    "ctas_per_sm": (1, 2, 3, 4, 6),
    "step_tokens": (16, 32, 64, 128),
    "num_stages": (2, 3, 4),
    "num_warps": (2, 4, 8),
    "segment_tiles": (0, 4, 8, 12, 16),
    "tile_tokens": (16, 32, 64),
}


def bench_tune(artefact: Path, output: Path, *, quiet: bool) -> dict[str, Any]:
    """Find the tuning whose slowest regime comes nearest to the read bandwidth, and write the GPU's description.

    Returns:
        `description`, and `tried` = list of {tuning, shares}: per regime, bytes over bandwidth over time.

    Raises:
        TangramError: no CUDA device, an output is wrong, or the file cannot be written.
    """
    torch = require_gpu("bench tune")
    plan = load_artefact(artefact)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    bandwidth = read_bandwidth()
    cases = [DecodeInputs(plan, regime, "cuda") for regime in REGIMES]
    ideal_us = [inputs.read_bytes / (bandwidth * 1e3) for inputs in cases]
    tried = []

    def cost(tuning: Tuning) -> float:
        try:
            times = time_tuning(plan, tuning, cases, num_sms, Schedule.TILE_QUEUE)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a choice that does not compile or fit is no choice
            log(f"{tuning}: {type(error).__name__}", quiet=quiet)
            return float("inf")
        shares = [ideal / us for ideal, us in zip(ideal_us, times, strict=True)]
        log(f"{tuning}: {' '.join(f'{share:.1%}' for share in shares)}", quiet=quiet)
        tried.append({"tuning": vars(tuning), "shares": shares})
        return -statistics.mean(shares)

    partition = plan.partition
    start = Tuning(
        max(1, partition.num_ctas // num_sms),
        partition.tile_tokens,
        partition.segment_tiles,
        partition.step_tokens,
        partition.num_warps,
        partition.num_stages,
    )
    best = descend(start, CHOICES, cost)
    description = describe(plan, best, cases, num_sms, bandwidth, output.stem)
    try:
        output.write_text(description.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise TangramError("description cannot be written", where=str(output), got=error.strerror) from error
    return {"description": description.model_dump(), "tried": tried}


def descend(start: Tuning, choices: Mapping[str, Sequence[int]], cost: Callable[[Tuning], float]) -> Tuning:
    """The best tuning that is found by changing one field at a time, until no field helps."""
    costs = {start: cost(start)}
    best = start
    while True:
        before = best
        for field, values in choices.items():
            for candidate in (replace(best, **{field: value}) for value in values):
                if candidate not in costs:
                    costs[candidate] = cost(candidate)
            best = min((replace(best, **{field: value}) for value in values), key=costs.__getitem__)
        if costs[best] >= costs[before]:
            return before


def time_tuning(
    plan: Plan, tuning: Tuning, cases: Sequence[DecodeInputs], num_sms: int, schedule: Schedule
) -> list[float]:
    """Microseconds of a step of every case, whose outputs are checked first."""
    from tangram_plan.codegen import emit
    from tangram_plan.runtime.generated_kernels import GeneratedKernels

    candidate = tuned(plan, tuning, num_sms)
    with tempfile.TemporaryDirectory() as folder:
        emit(candidate, "0" * 64, Path(folder))
        kernels = GeneratedKernels(Path(folder), candidate, cases[0].device)
        times = []
        for inputs in cases:
            case = DecodeCase(kernels, inputs, schedule)
            case.check()
            times.append(time_graph(case.run))
    return times


def tuned(plan: Plan, tuning: Tuning, num_sms: int) -> Plan:
    """The plan for a GPU of so many SMs, with the kernels of a tuning."""
    changed = {field.name: getattr(tuning, field.name) for field in fields(tuning) if field.name != "ctas_per_sm"}
    return replace(plan, partition=replace(plan.partition, num_ctas=tuning.ctas_per_sm * num_sms, **changed))


def describe(
    plan: Plan, tuning: Tuning, cases: Sequence[DecodeInputs], num_sms: int, bandwidth: float, name: str
) -> Device:
    """The description of the GPU at hand, with the cost model's constants as the tuned kernels show them.

    A schedule's overhead is what a layer takes beyond its bytes, in the middle of the regimes (for static splits, in the one
    that takes least); the bandwidth of one CTA is that of the busiest one where static splits are balanced worst.
    """
    import torch
    import triton

    num_layers = len(plan.model.planned_layers)
    token_bytes = plan.layout.kv_bytes

    def beyond_bytes(schedule: Schedule) -> list[float]:
        times = time_tuning(plan, tuning, cases, num_sms, schedule)
        return [
            us / num_layers - inputs.read_bytes / (bandwidth * 1e3) / num_layers
            for us, inputs in zip(times, cases, strict=True)
        ]

    queue_us, static_us = beyond_bytes(Schedule.TILE_QUEUE), beyond_bytes(Schedule.STATIC_SPLITS)
    worst = max(range(len(cases)), key=static_us.__getitem__)
    num_ctas = tuning.ctas_per_sm * num_sms
    busiest = sum(static_makespan(*work, num_ctas) for work in layer_work(plan, cases[worst].regime)) * token_bytes
    straggling_us = (static_us[worst] - min(static_us)) * num_layers + cases[worst].read_bytes / (bandwidth * 1e3)
    return Device(
        name=name,
        num_sms=num_sms,
        **vars(tuning),
        read_bandwidth_gb_s=round(bandwidth),
        cta_bandwidth_gb_s=round(busiest / straggling_us / 1e3, 2),
        static_splits_overhead_us=round(min(static_us), 1),
        tile_queue_overhead_us=round(statistics.median(queue_us), 1),
        source=f"`tangram-plan bench tune` on {torch.cuda.get_device_name()} (torch {torch.__version__}, triton "
        f"{triton.__version__}): {plan.model.model_type}, head_dim {plan.layout.head_dim}, {plan.layout.dtype}.",
    )


def tune_table(result: dict[str, Any]) -> RenderableType:
    """What was tried, best first, for a person."""
    table = new_table(
        "Tunings, best first: share of the read bandwidth",
        *(field.name.replace("_", " ") for field in fields(Tuning)),
        *(regime.name for regime in REGIMES),
    )
    for row in sorted(result["tried"], key=lambda row: -statistics.mean(row["shares"]))[:12]:
        table.add_row(*map(str, row["tuning"].values()), *(f"{share:.1%}" for share in row["shares"]))
    return table
