"""`bench tune`: measures what a device description says of a GPU, and writes one.

Kernels of every choice of CTAs, tile, step, warps and stages are generated from the user's plan and timed as `bench decode` does,
one choice at a time changed while that makes the worst regime faster.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tangram_plan.ir import Plan, Schedule

from .decode_case import DecodeCase, DecodeInputs
from .timing import time_graph


@dataclass(frozen=True)
class Tuning:
    """One choice of what a device description says of the decode kernels; fields as in `Device`."""

    ctas_per_sm: int
    tile_tokens: int
    segment_tiles: int
    step_tokens: int
    num_warps: int
    num_stages: int


def tuned(plan: Plan, tuning: Tuning, num_sms: int) -> Plan:
    """The plan for a GPU of so many SMs, with the kernels of a tuning."""
    partition = replace(
        plan.partition,
        num_ctas=tuning.ctas_per_sm * num_sms,
        tile_tokens=tuning.tile_tokens,
        segment_tiles=tuning.segment_tiles,
        step_tokens=tuning.step_tokens,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    return replace(plan, partition=partition)


def time_tuning(
    plan: Plan,
    tuning: Tuning,
    cases: Sequence[DecodeInputs],
    num_sms: int,
    schedule: Schedule,
    *,
    overlap: bool = False,
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
            times.append(time_graph(partial(case.run, overlap=overlap)))
    return times
