"""`build`: runs the stages, dumps or reports them, and writes the artefact."""

import difflib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

import numpy as np

from tangram_plan.ir import (
    RHO_ONE,
    BudgetTable,
    CtaPartition,
    HeadOrder,
    ModelShape,
    PageLayout,
    Plan,
    TangramError,
    needed_statistics,
    plan_hash,
    print_json,
)
from tangram_plan.profiles import Profile

from .artefact import check_place, write_artefact
from .config import load_config
from .fitness import Fitness
from .grouping import SolvedGrouping
from .pipeline import Stage, compile_stages
from .report import build_report, plan_summary, solver_report
from .select_statistics import select_statistics
from .terminal import log


def build_plan(
    config_file: Path,
    output: Path | None,
    *,
    overrides: tuple[str, ...] = (),
    stop_after: str | None = None,
    dump: Path | None = None,
    force: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Compile `model.yaml`, and write the artefact unless told otherwise.

    Args:
        config_file: the configuration.
        output: folder of the artefact; None writes nothing.
        overrides: `KEY=VALUE` that replace keys of the configuration.
        stop_after: stage whose product is returned instead of a plan.
        dump: folder that gets every product as JSON.
        force: see `compile_stages`.
        quiet: no log lines.

    Returns:
        `plan_summary` of the plan, with the place of the artefact if one was written; or the product of `stop_after`.
    """
    last = _stage(stop_after)
    config = load_config(config_file, overrides)
    if output is not None:
        check_place(output)
    products: dict[Stage, object] = {}
    for number, product in enumerate(compile_stages(config, relative_to=config_file.parent, force=force)):
        products[product.stage] = product.value
        log(f"{product.stage}: {_headline(product.value)}", quiet=quiet)
        if dump is not None:
            _dump(dump / f"{number}-{product.stage}.json", product.value)
        if product.stage is last and last is not Stage.PLAN:
            return {product.stage.value: to_data(product.value)}
    plan = cast("Plan", products[Stage.PLAN])
    profile, solved = cast("Profile", products[Stage.PROFILE]), cast("SolvedGrouping", products[Stage.GROUPS])
    statistics = select_statistics(profile, plan)
    report = build_report(config, profile, cast("Fitness", products[Stage.FITNESS]), solved)
    missing = () if statistics else needed_statistics(plan)
    summary = plan_summary(plan, solver_report(config, solved), missing_statistics=missing)
    if output is None or last is not None:
        return summary
    write_artefact(plan, {"build": report}, output, statistics=statistics)
    return summary | {"artefact": str(output)}


def to_data(value: object) -> Any:
    """Any product as JSON values: fields by name, KV heads as `layer.head`, arrays as lists."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {field.name: to_data(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {
            ".".join(map(str, key)) if isinstance(key, tuple) else str(key): to_data(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [to_data(item) for item in value]
    return value


def _stage(name: str | None) -> Stage | None:
    if name is None:
        return None
    try:
        return Stage(name)
    except ValueError as error:
        nearest = difflib.get_close_matches(name, list(Stage), n=1)
        raise TangramError(
            "no such stage",
            where="--stop-after",
            got=name,
            expected=", ".join(Stage),
            fix=f"did you mean {nearest[0]}?" if nearest else "",
        ) from error


def _dump(path: Path, value: object) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(print_json(to_data(value)), encoding="utf-8")
    except OSError as error:
        raise TangramError("product cannot be dumped", where=str(path), got=error.strerror or str(error)) from error


def _headline(value: object) -> str:
    """A product in a few words, for the log."""
    match value:
        case ModelShape():
            return f"{value.model_type}, {value.num_kv_heads} KV heads in {len(value.planned_layers)} of {len(value.layers)} layers, head_dim {value.head_dim}"
        case Profile():
            return f"{value.model} by {value.scorer}, {len(value.samples)} samples"
        case Fitness():
            return f"{value.verdict}, median rank correlation {value.median:.2f}"
        case BudgetTable():
            return f"{sum(value.rho.values()) / len(value.rho) / RHO_ONE:.1%} kept on average, {value.sink_tokens} first and {value.window_tokens} last tokens on top"
        case HeadOrder():
            return f"reordered, {value.hash[:12]}" if value.hash else "as in the checkpoint"
        case SolvedGrouping():
            return f"{len(value.solution.groups)} groups, pages of {value.solution.page_slots} slots, {value.solution.status} in {value.seconds:.1f} s"
        case PageLayout():
            return f"{value.page_bytes:,} bytes each"
        case CtaPartition():
            return f"{len(value.static_splits)} batch sizes over {value.num_ctas} CTAs of {value.device}"
        case Plan():
            return f"{plan_hash(value)[:16]}, verified"
        case _:
            return type(value).__name__
