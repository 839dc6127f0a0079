"""`verify`: everything that an artefact claims, checked again from its files."""

import contextlib
import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import RenderableType

from tangram_plan.codegen import allocator_config
from tangram_plan.ir import (
    ALLOCATOR_FILE,
    MANIFEST,
    REPORTS,
    STATISTICS_FILE,
    MismatchError,
    Plan,
    TangramError,
    load_artefact,
    plan_hash,
    print_json,
    verify_statistics,
)

from .terminal import new_table

if TYPE_CHECKING:
    from tangram_plan.runtime.kernel_check import KernelResult


def verify_artefact(artefact: Path) -> dict[str, Any]:
    """Check hashes, schema, invariants and kernels; leaves `reports/compile.json` beside the plan if it can.

    Returns:
        `ok`, `plan_hash`, `checks` = list of {name, ok, detail}, `kernels` = list of {name, ok, max_error, tolerance,
        compiled, detail}: `compiled` holds the compute capabilities that the kernel was compiled for. What stops a check
        (a changed file, no torch or triton) is a failed check, never a skipped one.

    Raises:
        TangramError: there is no artefact.
    """
    if not (artefact / MANIFEST).is_file():
        load_artefact(artefact)  # says what is missing
    checks, results, plan = [], [], None
    try:
        plan = load_artefact(artefact)
        checks.append(_check("artefact", "hashes, schema and every invariant of the plan hold"))
        if not _allocator_is_the_plans(artefact, plan):
            checks.append(_check("allocator", f"{ALLOCATOR_FILE} is not the plan's; build it again", ok=False))
        if not _statistics_fit(artefact, plan):
            checks.append(_check("statistics", f"{STATISTICS_FILE} does not fit the plan; build it again", ok=False))
        results = _check_kernels(artefact, plan)
    except TangramError as error:
        checks.append(_check("artefact" if plan is None else "kernels", str(error), ok=False))
    kernels = [
        _check(result.name, result.error, ok=result.ok)
        | {"max_error": result.max_error, "tolerance": result.tolerance, "compiled": sorted(result.compiled)}
        for result in results
    ]
    return {
        "ok": bool(kernels) and all(check["ok"] for check in (*checks, *kernels)),
        "plan_hash": plan and plan_hash(plan),
        "checks": checks,
        "kernels": kernels,
    }


def _check(name: str, detail: str, *, ok: bool = True) -> dict[str, Any]:
    return {"name": name, "ok": ok, "detail": detail}


def _allocator_is_the_plans(artefact: Path, plan: Plan) -> bool:
    try:
        found = json.loads((artefact / ALLOCATOR_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found == json.loads(json.dumps(allocator_config(plan))))


def _statistics_fit(artefact: Path, plan: Plan) -> bool:
    path = artefact / STATISTICS_FILE
    if not path.is_file():  # a plan that can be looked at, but not served
        return True
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            verify_statistics({name: arrays[name].shape for name in arrays}, plan, where=str(path))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, MismatchError):
        return False
    return True


def _check_kernels(artefact: Path, plan: Plan) -> "list[KernelResult]":
    from tangram_plan.runtime.kernel_check import check_kernels, compile_report

    results = check_kernels(artefact, plan)
    with contextlib.suppress(OSError):  # a report is a convenience; the folder may be read-only
        (artefact / REPORTS).mkdir(exist_ok=True)
        (artefact / REPORTS / "compile.json").write_text(print_json(compile_report(results)), encoding="utf-8")
    return results


def verify_tables(result: dict[str, Any]) -> RenderableType:
    """The result for a person."""
    table = new_table("Verification", "what", "result", "max error", "tolerance", "compiled for", "detail")
    for check in result["checks"]:
        table.add_row(check["name"], "ok" if check["ok"] else "FAILED", "", "", "", check["detail"])
    for kernel in result["kernels"]:
        compiled = " ".join(f"sm_{arch}" for arch in kernel["compiled"])
        table.add_row(
            kernel["name"],
            "ok" if kernel["ok"] else "FAILED",
            f"{kernel['max_error']:.1e}",
            f"{kernel['tolerance']:.1e}",
            compiled,
            kernel["detail"],
        )
    return table
