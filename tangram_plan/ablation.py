"""`ablate`: every clustering solver with every partition solver, on one objective and one profile."""

import csv
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from tangram_plan.ir import REPORT_CONTEXTS, Plan, Schedule, TangramError, memory_use, verify_partition

from .config import BuildConfig, load_config
from .device import load_device
from .grouping import SolvedGrouping
from .partition import partition_work
from .pipeline import Stage, compile_stages
from .solvers import GROUPING_SOLVERS, SPLIT_SOLVERS, GroupingSolution, SolverDoesNotApplyError
from .terminal import log, new_table


def run_ablation(config_file: Path, *, overrides: tuple[str, ...], force: bool, quiet: bool) -> list[dict[str, Any]]:
    """One row per pair of solvers.

    Returns:
        Rows of `grouping`, `partition`, `num_groups`, `page_slots`, `objective` (the common one of clustering), `bound`,
        `allocated_over_ideal` (mean over the reported contexts), `allocated_over_full` (at the longest one),
        `static_makespan_over_ideal` (one request, longest context, worst layer), `static_us` and `best_us` (predicted
        decode attention of one step, summed over the planned cases; static splits, and the chosen schedules), and the
        seconds of all stages up to the partition; groups are made once per clustering solver. A solver that does not apply to the configuration has a `refused` row.
    """
    config = load_config(config_file, overrides)
    rows = []
    for solver in GROUPING_SOLVERS:
        log(f"{solver} ...", quiet=quiet)
        grouped = config.model_copy(update={"grouping": config.grouping.model_copy(update={"solver": solver})})
        try:
            rows += _rows(grouped, relative_to=config_file.parent, force=force)
        except SolverDoesNotApplyError as error:
            rows += [{"grouping": solver, "partition": partition, "refused": str(error)} for partition in SPLIT_SOLVERS]
    return rows


def write_ablation(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """The table as CSV, and a plot of memory and one of decode time.

    Raises:
        TangramError: the folder cannot be written.
    """
    done = [row for row in rows if "refused" not in row]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        table = folder / "ablation.csv"
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(
                file, fieldnames=list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n"
            )
            writer.writeheader()
            writer.writerows(rows)
        return [table, _plot_memory(done, folder / "memory.png"), _plot_decode(done, folder / "decode.png")]
    except OSError as error:
        raise TangramError(
            "ablation cannot be written", where=str(error.filename or folder), got=error.strerror or str(error)
        ) from error


def ablation_table(rows: list[dict[str, Any]]) -> RenderableType:
    """The rows for a person."""
    table = new_table(
        "Clustering solvers x partition solvers",
        "clustering",
        "partition",
        "page tables",
        "page slots",
        "objective",
        "gap",
        "allocated / ideal",
        "of full cache",
        "static makespan / ideal",
        "static us",
        "best us",
        "seconds",
    )
    for row in rows:
        if "refused" in row:
            table.add_row(row["grouping"], row["partition"], "does not apply")
            continue
        gap = "" if row["bound"] is None else f"{(row['objective'] - row['bound']) / row['objective']:.2%}"
        table.add_row(
            row["grouping"],
            row["partition"],
            str(row["num_groups"]),
            str(row["page_slots"]),
            f"{row['objective']:.4f}",
            gap,
            f"{row['allocated_over_ideal']:.3f}",
            f"{row['allocated_over_full']:.1%}",
            f"{row['static_makespan_over_ideal']:.3f}",
            f"{row['static_us']:,.0f}",
            f"{row['best_us']:,.0f}",
            f"{row['seconds']:.1f}",
        )
    return table


def _rows(config: BuildConfig, *, relative_to: Path, force: bool) -> list[dict[str, Any]]:
    """One row per partition solver, all for the groups that one run of the pipeline made."""
    products: dict[Stage, object] = {}
    ended: dict[Stage, float] = {}
    start = time.perf_counter()
    for product in compile_stages(config, relative_to=relative_to, force=force):
        products[product.stage], ended[product.stage] = product.value, time.perf_counter()
    solved, plan = products[Stage.GROUPS], products[Stage.PLAN]
    assert isinstance(solved, SolvedGrouping)
    assert isinstance(plan, Plan)
    device = load_device(config.partition.device, relative_to=relative_to)
    rows = []
    for solver in SPLIT_SOLVERS:
        before = time.perf_counter()
        partition = partition_work(
            plan.model,
            plan.budgets,
            plan.grouping,
            plan.layout,
            device,
            config.partition.model_copy(update={"solver": solver}),
            tensor_parallel=plan.tensor_parallel,
            seed=plan.provenance.seed,
        )
        verify_partition(partition, plan.model, plan.tensor_parallel)
        seconds = ended[Stage.PAGES] - start + time.perf_counter() - before
        provenance = replace(plan.provenance, partition_solver=solver)
        rows.append(_row(replace(plan, partition=partition, provenance=provenance), solved.solution, seconds))
    return rows


def _row(plan: Plan, solution: GroupingSolution, seconds: float) -> dict[str, Any]:
    uses = [memory_use(plan, context) for context in REPORT_CONTEXTS]
    choices = plan.partition.choices
    one_request = max(
        (choice for choice in choices if choice.batch == choices[0].batch), key=lambda choice: choice.context
    )
    return {
        "grouping": plan.provenance.grouping_solver,
        "partition": plan.provenance.partition_solver,
        "num_groups": len(plan.grouping.groups),
        "page_slots": plan.layout.page_slots,
        "objective": solution.objective,
        "bound": solution.bound,
        "allocated_over_ideal": round(sum(use.allocated_over_ideal for use in uses) / len(uses), 6),
        "allocated_over_full": round(uses[-1].allocated_over_full, 6),
        "static_makespan_over_ideal": one_request.estimates[Schedule.STATIC_SPLITS].makespan_over_ideal,
        "static_us": round(sum(choice.estimates[Schedule.STATIC_SPLITS].predicted_us for choice in choices), 1),
        "best_us": round(sum(choice.estimates[choice.schedule].predicted_us for choice in choices), 1),
        "seconds": round(seconds, 2),
    }


def _plot_memory(rows: list[dict[str, Any]], path: Path) -> Path:
    solvers = {row["grouping"]: row["allocated_over_ideal"] for row in rows}
    return _plot_bars({"": solvers}, "allocated / ideal, mean over 2K to 128K tokens", path, baseline=1.0)


def _plot_decode(rows: list[dict[str, Any]], path: Path) -> Path:
    series: dict[str, dict[str, float]] = {}
    for row in rows:
        series.setdefault(row["partition"], {})[row["grouping"]] = row["static_makespan_over_ideal"]
    return _plot_bars(series, "static splits: makespan / ideal, worst layer, one request", path, baseline=1.0)


def _plot_bars(series: dict[str, dict[str, float]], label: str, path: Path, *, baseline: float) -> Path:
    """Grouped bars: one cluster per clustering solver, one bar per series."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = list(next(iter(series.values()), {}))
    width = 0.8 / max(1, len(series))
    for index, (name, values) in enumerate(series.items()):
        places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(names))]
        bars = axes.bar(places, [values[n] for n in names], width, label=name or None)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(baseline, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel(label)
    if len(series) > 1:
        axes.legend(title="partition solver")
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return path
