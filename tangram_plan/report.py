"""What is said about a plan: as data for machines and reports, and as tables for a person."""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tangram_plan.ir import REPORT_CONTEXTS, REPORTS, RHO_ONE, MemoryUse, Plan, memory_use, plan_hash
from tangram_plan.profiles import Profile

from .budgets import budget_rule, held_out_overflow
from .config import BuildConfig
from .fitness import Fitness
from .grouping import SolvedGrouping
from .terminal import new_table


class SolverReport(BaseModel):
    """How the head groups were found; all but the name are None if the build's report is lost.

    Args:
        name: the clustering solver.
        status: `optimal`, `feasible` or `heuristic`.
        objective: see `grouping_problem`; near the mean of allocated / ideal.
        bound: the solver's own proof that no grouping has a smaller objective.
        seconds: what it took.
    """

    name: str
    status: str | None = None
    objective: float | None = None
    bound: float | None = None
    seconds: float | None = None


def read_solver_report(artefact: Path) -> SolverReport | None:
    """From a build's report; None if somebody removed or damaged it, because a plan is complete without it."""
    try:
        report = json.loads((artefact / REPORTS / "build.json").read_text(encoding="utf-8"))
        return SolverReport.model_validate(report["solver"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def plan_summary(plan: Plan, solver: SolverReport | None, *, missing_statistics: Sequence[str] = ()) -> dict[str, Any]:
    """A plan as data; the answer of `show --json`.

    Args:
        plan: a verified plan.
        solver: how its groups were found; None if that is lost.
        missing_statistics: what its scorer needs and its artefact lacks.
    """
    return {
        "plan_hash": plan_hash(plan),
        "model": {
            "model_type": plan.model.model_type,
            "fingerprint": plan.model.fingerprint,
            "layers": len(plan.model.layers),
            "planned_layers": len(plan.model.planned_layers),
            "num_kv_heads": plan.model.num_kv_heads,
            "head_dim": plan.model.head_dim,
        },
        "profile": plan.provenance.profile,
        "rule": plan.provenance.rule,
        "scorer": plan.scorer,
        "missing_statistics": list(missing_statistics),
        "kv_dtype": plan.layout.dtype.value,
        "tensor_parallel": plan.tensor_parallel,
        "head_order": plan.head_order.hash,
        "compress_chunk_tokens": plan.compress_chunk_tokens,
        "max_new_tokens": plan.max_new_tokens,
        "mean_rho": round(sum(plan.budgets.rho.values()) / len(plan.budgets.rho) / RHO_ONE, 6),
        "sink_tokens": plan.budgets.sink_tokens,
        "window_tokens": plan.budgets.window_tokens,
        "num_groups": len(plan.grouping.groups),
        "page_slots": plan.layout.page_slots,
        "page_bytes": plan.layout.page_bytes,
        "groups": [
            {
                "group_id": group_id,
                "rho": round(group.rho / RHO_ONE, 6),
                "num_members": group.num_members,
                "tokens_per_page": plan.layout.tokens_per_page(group.num_members),
                "layers": len({kv_head.layer for members in group.members_by_rank for kv_head in members}),
            }
            for group_id, group in enumerate(plan.grouping.groups)
        ],
        "memory": [_memory_data(memory_use(plan, context), plan) for context in REPORT_CONTEXTS],
        "solver": (solver or SolverReport(name=plan.provenance.grouping_solver)).model_dump(),
        "partition": [
            {
                "batch": choice.batch,
                "context": choice.context,
                "schedule": choice.schedule.value,
                "predicted_us": choice.estimates[choice.schedule].predicted_us,
                "makespan_over_ideal": choice.estimates[choice.schedule].makespan_over_ideal,
                "estimates": {
                    schedule.value: {
                        "predicted_us": estimate.predicted_us,
                        "makespan_over_ideal": estimate.makespan_over_ideal,
                    }
                    for schedule, estimate in sorted(choice.estimates.items())
                },
            }
            for choice in plan.partition.choices
        ],
    }


def solver_report(config: BuildConfig, solved: SolvedGrouping) -> SolverReport:
    """How a build found its groups."""
    found = solved.solution
    return SolverReport(
        name=config.grouping.solver,
        status=found.status,
        objective=found.objective,
        bound=found.bound,
        seconds=round(solved.seconds, 3),
    )


def build_report(config: BuildConfig, profile: Profile, fitness: Fitness, solved: SolvedGrouping) -> dict[str, Any]:
    """What depends on time and tool versions, and how sure the budgets are: `OUT/reports/build.json`."""
    report: dict[str, Any] = {
        "versions": {name: version(name) for name in ("tangram-plan", "ortools", "networkx", "numpy", "scipy")},
        "config": config.model_dump(mode="json"),
        "fitness": {"verdict": fitness.verdict, "median_rank_correlation": round(fitness.median, 4)},
        "solver": solver_report(config, solved).model_dump(),
        "gap": solved.solution.gap,
    }
    if config.retention.ratio < 1:
        retained = profile.at_ratio(config.retention.level, config.retention.ratio)
        overflow = held_out_overflow(
            retained, [sample.context for sample in profile.samples], budget_rule(config.retention)
        )
        report["held_out_overflow"] = overflow and {
            "pairs": overflow.pairs,
            "overflow": round(overflow.overflow, 6),
            "raw_overflow": round(overflow.raw_overflow, 6),
            "per_head": [[round(value, 4) for value in layer] for layer in profile.layer_table(overflow.per_head)],
        }
    return report


def plan_tables(summary: Mapping[str, Any]) -> RenderableType:
    """A plan for a person: what was compiled, what it saves, and how decode will run."""
    model, solver = summary["model"], summary["solver"]
    facts = Table.grid(padding=(0, 2))
    facts.add_row("plan", summary["plan_hash"][:16])
    facts.add_row(
        "model",
        f"{model['model_type']}, {model['num_kv_heads']} KV heads in {model['planned_layers']} of {model['layers']} layers, head_dim {model['head_dim']}",
    )
    facts.add_row(
        "budgets",
        f"{summary['rule']} from {summary['profile']}: KV heads keep {summary['mean_rho']:.1%} on average, and each its first {summary['sink_tokens']} and last {summary['window_tokens']} tokens",
    )
    facts.add_row(
        "groups",
        f"{summary['num_groups']} page tables{' on each rank' if summary['tensor_parallel'] > 1 else ''}, pages of {summary['page_slots']} slots ({summary['page_bytes']:,} bytes, {summary['kv_dtype']})",
    )
    if solver["status"]:
        gap = (
            ""
            if solver["bound"] is None
            else f", gap {(solver['objective'] - solver['bound']) / solver['objective']:.2%}"
        )
        facts.add_row("solver", f"{solver['name']}: {solver['status']}{gap}, {solver['seconds']:.1f} s")
    if summary["tensor_parallel"] > 1:
        order = (
            f"heads reordered ({summary['head_order'][:12]}): run `tangram-plan reorder`"
            if summary["head_order"]
            else "heads in the checkpoint's order"
        )
        facts.add_row("ranks", f"{summary['tensor_parallel']}, {order}")
    facts.add_row("scorer", f"{summary['scorer']}, compressing every {summary['compress_chunk_tokens']} tokens")
    if summary["missing_statistics"]:
        missing = ", ".join(summary["missing_statistics"])
        facts.add_row(
            "warning",
            f"cannot be served: the profile lacks {missing}, which the scorer needs; calibrate and build again",
        )

    memory = new_table(
        "Memory of one request",
        "prompt tokens",
        "full cache",
        "compressed",
        "of full",
        "saved",
        "pages",
        "allocated / ideal",
    )
    for use in summary["memory"]:
        memory.add_row(
            f"{use['context']:,}",
            _bytes(use["full_bytes"]),
            _bytes(use["allocated_bytes"]),
            f"{use['allocated_over_full']:.1%}",
            f"{1 - use['allocated_over_full']:.1%}",
            f"{use['pages']:,}",
            f"{use['allocated_over_ideal']:.3f}",
        )
    decode = new_table(
        "Decode attention of one step, all layers, by the cost model",
        "requests",
        "prompt tokens",
        "schedule",
        "predicted",
        "makespan / ideal",
    )
    for case in summary["partition"]:
        decode.add_row(
            f"{case['batch']}",
            f"{case['context']:,}",
            case["schedule"],
            f"{case['predicted_us']:,.0f} us",
            f"{case['makespan_over_ideal']:.3f}",
        )
    note = "makespan / ideal: tokens of the busiest CTA over an equal share, worst layer; where prompts are short, launches cost more than that"
    parts: list[RenderableType] = [facts, Text(), memory, Text(), decode, Text(note)]
    if "artefact" in summary:
        parts += [Text(), Text(f"artefact {summary['artefact']}; next: tangram-plan verify {summary['artefact']}")]
    return Group(*parts)


def _memory_data(use: MemoryUse, plan: Plan) -> dict[str, Any]:
    return {
        "context": use.context,
        "ideal_slots": use.ideal_slots,
        "allocated_slots": use.allocated_slots,
        "allocated_over_ideal": round(use.allocated_over_ideal, 6),
        "allocated_over_full": round(use.allocated_over_full, 6),
        "pages": use.pages,
        "pages_per_rank": use.pages // plan.tensor_parallel,
        "allocated_bytes": use.allocated_bytes,
        "full_bytes": use.full_bytes,
    }


def _bytes(count: int) -> str:
    """Bytes in the binary unit that leaves at most four digits."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.1f} {units[0]}"
