"""The plot of `bench decode`: share of the read bandwidth by regime, our schedules beside the peers."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tangram_plan.ir import Schedule, TangramError


def plot_shares(results: Mapping[str, Any], path: Path) -> Path:
    """Grouped bars: one cluster per regime, one bar per schedule and peer.

    A share is the time that a plain read of what the KV heads hold would take, over the time taken: what a peer reads beyond
    that, as padding or as the full cache, lowers it. A layer without a peer's time counts in none of the peer's sums.

    Args:
        results: `read_bandwidth_gb_s`, and `regimes` = list of {name, layers}, where `layers` = list of {bytes,
            tile_queue_us, static_splits_us, peers}, and `peers` maps names to microseconds, or to None.
        path: of the image.

    Raises:
        TangramError: there is nothing to plot, or the image cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    regimes = results.get("regimes", [])
    shares = [regime_shares(regime.get("layers", []), results["read_bandwidth_gb_s"]) for regime in regimes]
    names = list(dict.fromkeys(name for found in shares for name in found))
    if not names:
        raise TangramError("no times to plot", where=str(path))
    figure = Figure(figsize=(max(7.0, 2.4 * len(regimes)), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        offset = (index - (len(names) - 1) / 2) * width
        heights = {place: found[name] for place, found in enumerate(shares) if name in found}
        bars = axes.bar([place + offset for place in heights], list(heights.values()), width, label=name)
        axes.bar_label(bars, [f"{height:.0%}" for height in heights.values()], fontsize=6)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(regimes)), [regime.get("name", "") for regime in regimes])
    axes.set_ylabel("share of the read bandwidth, by bytes held")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    try:
        figure.savefig(path, dpi=120, metadata={"Software": None})
    except OSError as error:
        raise TangramError(
            "plot cannot be written", where=str(error.filename or path), got=error.strerror or str(error)
        ) from error
    return path


def regime_shares(layers: Iterable[Mapping[str, Any]], read_bandwidth_gb_s: float) -> dict[str, float]:
    """Share of every schedule and peer over the layers that have its time."""
    num_bytes: dict[str, float] = {}
    total_us: dict[str, float] = {}
    for layer in layers:
        times = {schedule.value.replace("_", " "): layer.get(f"{schedule.value}_us") for schedule in Schedule}
        times |= layer.get("peers", {})
        for name, us in times.items():
            if us and us > 0:
                num_bytes[name] = num_bytes.get(name, 0.0) + layer["bytes"]
                total_us[name] = total_us.get(name, 0.0) + us
    return {name: num_bytes[name] / (read_bandwidth_gb_s * 1e3) / us for name, us in total_us.items()}
