"""`bench decode`: the generated decode kernels on a GPU, layer by layer, and what the cost model said of them.

One CUDA graph holds the whole attention of a decode step, as an engine runs it, and one more each layer, repeated on other
pages. Nothing is timed before its outputs, poisoned with NaN, agree with the reference. Peers read the same keys and values of
the layer whose KV heads differ most, and of the one in the middle.
"""

import statistics
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from tangram_plan.cost_model import estimate
from tangram_plan.device import Device, load_device
from tangram_plan.ir import Plan, Schedule, load_artefact
from tangram_plan.terminal import log, new_table

from .decode_case import REGIMES, DecodeCase, DecodeInputs, LayerInputs, Regime
from .peers import bench_peers, layer_batch
from .plots import plot_shares
from .timing import read_bandwidth, require_gpu, time_graph

if TYPE_CHECKING:
    from tangram_plan.runtime.generated_kernels import GeneratedKernels

MEMORY_SHARE = 0.8  # of the GPU's free memory that a pool may take
LAYER_REPEATS = 8  # launches of a layer in its graph
LAUNCH_FLOOR = Regime("32 x 1", (1,) * 32)  # next to no bytes: what launches and latencies alone take


def bench_decode(artefact: Path, *, with_peers: bool = True, quiet: bool) -> dict[str, Any]:
    """Time every regime by every schedule, rank 0.

    Returns:
        `gpu`, `read_bandwidth_gb_s`, `launch_floor_us` (a layer, one token per request), and `cases` = list of {regime,
        requests, schedule, step_us, overlapped_us, planning_us, predicted_us, bytes, share, overlapped_share, layers}, where
        `layers` = list of {layer, us, bytes, share}, and `peers` = list of {regime, layer, name, us, speedup, plan_us,
        planned_speedup, note} for those that ran, {regime, layer, name, note} for the others. Times are medians of replays; `step_us` is all layers and their planning,
        `overlapped_us` the same where a layer starts while the one before it ends. Shares are of the bandwidth of a plain read.

    Raises:
        TangramError: no CUDA device, or an output is wrong.
    """
    torch = require_gpu("bench decode")
    from tangram_plan.runtime.generated_kernels import GeneratedKernels

    plan = load_artefact(artefact)
    kernels = GeneratedKernels(artefact, plan, "cuda")
    device = load_device(plan.partition.device)
    bandwidth = read_bandwidth()
    cases: list[dict[str, Any]] = []
    peers: list[dict[str, Any]] = []
    for regime in REGIMES:
        pool_bytes = sum(plan.num_pages(length, length) for length in regime.prompt_tokens) * plan.layout.page_bytes
        if pool_bytes > MEMORY_SHARE * torch.cuda.mem_get_info()[0]:
            log(f"{regime.name}: {pool_bytes >> 30} GiB do not fit, skipped", quiet=quiet)
            continue
        inputs = DecodeInputs(plan, regime, "cuda")
        for schedule in Schedule:
            found = time_case(kernels, inputs, schedule, bandwidth, device)
            log(
                f"{regime.name}, {schedule.value}: {found['step_us']:.0f} us, {found['share']:.1%}, "
                f"overlapped {found['overlapped_share']:.1%}, predicted {found['predicted_us']:.0f} us",
                quiet=quiet,
            )
            cases.append(found)
        if with_peers:
            peers += time_peers(inputs, cases)
        del inputs
        torch.cuda.empty_cache()
    floor = DecodeCase(kernels, DecodeInputs(plan, LAUNCH_FLOOR, "cuda"), Schedule.TILE_QUEUE)
    floor.check()
    return {
        "gpu": torch.cuda.get_device_name(),
        "read_bandwidth_gb_s": bandwidth,
        "plan": str(artefact),
        "launch_floor_us": _layer_us(floor, floor.inputs.layers[0]),
        "cases": cases,
        "peers": peers,
    }


def time_case(
    kernels: "GeneratedKernels", inputs: DecodeInputs, schedule: Schedule, bandwidth: float, device: Device
) -> dict[str, Any]:
    """One of the `cases` of `bench_decode`."""
    case = DecodeCase(kernels, inputs, schedule)
    case.check()
    step_us, overlapped_us = time_graph(case.run), time_graph(partial(case.run, overlap=True))

    def share(num_bytes: int, us: float) -> float:
        return num_bytes / (bandwidth * 1e3) / us

    layers = []
    for layer in inputs.layers:
        us = _layer_us(case, layer)
        layers.append({"layer": layer.layer, "us": us, "bytes": layer.read_bytes, "share": share(layer.read_bytes, us)})
    return {
        "regime": inputs.regime.name,
        "requests": len(inputs.regime.prompt_tokens),
        "schedule": schedule.value,
        "step_us": step_us,
        "overlapped_us": overlapped_us,
        "planning_us": time_graph(case.plan),
        "predicted_us": predicted_us(inputs.plan, inputs.regime, schedule, device),
        "bytes": inputs.read_bytes,
        "share": share(inputs.read_bytes, step_us),
        "overlapped_share": share(inputs.read_bytes, overlapped_us),
        "layers": layers,
    }


def time_peers(inputs: DecodeInputs, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The `peers` of one regime, beside the fastest schedule of `cases`; the inputs must have been through `DecodeCase.check`."""
    by_skew = sorted(inputs.layers, key=lambda layer: _skew(inputs, layer.layer))
    found = []
    for layer in (by_skew[len(by_skew) // 2], by_skew[-1]):
        own_us = min(
            timed["us"]
            for case in cases
            for timed in case["layers"]
            if case["regime"] == inputs.regime.name and timed["layer"] == layer.layer
        )
        table, prompt_tokens = inputs.page_tables[0], inputs.regime.prompt_tokens
        batch = layer_batch(inputs.plan, layer.layer, 0, layer.q, inputs.pool, table, prompt_tokens)
        for peer in bench_peers(batch):
            row = {"regime": inputs.regime.name, "layer": layer.layer, **peer}
            if "us" in peer:
                row["speedup"] = peer["us"] / own_us
                row["planned_speedup"] = (peer["us"] + (peer["plan_us"] or 0)) / own_us
            found.append(row)
    return found


def _skew(inputs: DecodeInputs, layer: int) -> float:
    """Tokens of the KV head that holds most, over the mean."""
    from tangram_plan.runtime.reference import local_heads

    plan, longest = inputs.plan, max(inputs.regime.prompt_tokens)
    held = [plan.group_tokens(place.group_id, longest, longest) for place in local_heads(plan, 0, layer)]
    return max(held) * len(held) / sum(held)


def predicted_us(plan: Plan, regime: Regime, schedule: Schedule, device: Device) -> float:
    """What the cost model says of a step of rank 0."""
    token_bytes = plan.layout.kv_bytes
    return estimate(layer_work(plan, regime), token_bytes, device)[schedule].predicted_us


def layer_work(plan: Plan, regime: Regime) -> list[tuple[list[int], list[int]]]:
    """Per layer of rank 0, tokens and static splits of each (request, KV head) pair."""
    batches = [static.batch for static in plan.partition.static_splits]
    number = next((i for i, batch in enumerate(batches) if batch >= len(regime.prompt_tokens)), len(batches) - 1)
    splits = plan.partition.static_splits[number].splits
    group_of = {head: group_id for rank, group_id, _, head in plan.grouping.columns() if rank == 0}
    layers = []
    for layer in plan.model.planned_layers:
        heads = plan.model.local_kv_heads(layer, 0, plan.tensor_parallel)
        tokens = [plan.group_tokens(group_of[head], n, n) for n in regime.prompt_tokens for head in heads]
        layers.append((tokens, [splits[head] for head in heads] * len(regime.prompt_tokens)))
    return layers


def decode_tables(result: dict[str, Any]) -> RenderableType:
    """The result for a person."""
    title = (
        f"Decode attention of one step, all layers, on {result['gpu']} (plain read {result['read_bandwidth_gb_s']:.0f} GB/s; "
        f"a layer of 32 requests with one token each takes {result['launch_floor_us']:.1f} us)"
    )
    table = new_table(
        title,
        "requests",
        "schedule",
        "us",
        "overlapped us",
        "predicted / measured",
        "share of bandwidth",
        "overlapped",
        "layers: mean",
        "worst",
    )
    for case in result["cases"]:
        shares = [layer["share"] for layer in case["layers"]]
        table.add_row(
            case["regime"],
            case["schedule"],
            f"{case['step_us']:,.0f}",
            f"{case['overlapped_us']:,.0f}",
            f"{case['predicted_us'] / case['step_us']:.2f}",
            f"{case['share']:.1%}",
            f"{case['overlapped_share']:.1%}",
            f"{statistics.mean(shares):.1%}",
            f"{min(shares):.1%}",
        )
    return Group(table, peer_table(result["peers"])) if result["peers"] else table


def peer_table(peers: list[dict[str, Any]]) -> RenderableType:
    """How much longer the peers take, for a person."""
    title = "Peers on the same keys and values, one layer (the middle and the most skewed), over the generated kernel"
    table = new_table(title, "requests", "layer", "peer", "us", "takes", "plan() us", "takes with plan()", "note")
    for peer in peers:
        times = (
            (
                f"{peer['us']:.0f}",
                f"{peer['speedup']:.2f}x",
                f"{peer['plan_us']:.0f}" if peer["plan_us"] else "",
                f"{peer['planned_speedup']:.2f}x",
            )
            if "us" in peer
            else ("", "", "", "")
        )
        table.add_row(peer["regime"], str(peer["layer"]), peer["name"], *times, peer["note"])
    return table


def plot_decode(result: dict[str, Any], path: Path) -> None:
    """Shares of the read bandwidth by regime, peers on the layers that they were timed on."""
    regimes: dict[str, dict[int, dict[str, Any]]] = {}
    for case in result["cases"]:
        for timed in case["layers"]:
            layer = regimes.setdefault(case["regime"], {}).setdefault(timed["layer"], {"peers": {}})
            layer |= {"bytes": timed["bytes"], f"{case['schedule']}_us": timed["us"]}
    for peer in result["peers"]:
        regimes[peer["regime"]][peer["layer"]]["peers"][peer["name"]] = peer.get("us")
    plotted = [{"name": name, "layers": list(layers.values())} for name, layers in regimes.items()]
    plot_shares({"read_bandwidth_gb_s": result["read_bandwidth_gb_s"], "regimes": plotted}, path)


def _layer_us(case: DecodeCase, layer: LayerInputs) -> float:
    """Microseconds of one layer, among launches of the same layer on other pages."""
    case.plan()
    return time_graph(partial(case.run_layer, layer, repeats=LAYER_REPEATS)) / LAYER_REPEATS
