"""`verify`: everything that an artefact claims, checked again from its files."""

import contextlib
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from tangram_plan.ir import REPORTS, MismatchError, VerifyError, load_artefact, plan_hash, print_json

from .terminal import new_table


def verify_artefact(artefact: Path) -> dict[str, Any]:
    """Check hashes, schema, invariants and kernels; leaves `reports/compile.json` beside the plan if it can.

    Returns:
        `ok`, `plan_hash`, `checks` = list of {name, ok, detail}, `kernels` = list of {name, ok, max_error, tolerance,
        compiled, detail}: `compiled` holds the compute capabilities that the kernel was compiled for.

    Raises:
        TangramError: there is no artefact.
    """
    from tangram_plan.runtime.kernel_check import check_kernels, compile_report

    try:
        plan = load_artefact(artefact)
    except (VerifyError, MismatchError) as error:
        return {
            "ok": False,
            "plan_hash": None,
            "checks": [{"name": "artefact", "ok": False, "detail": str(error)}],
            "kernels": [],
        }
    results = check_kernels(artefact, plan)
    with contextlib.suppress(OSError):  # a report is a convenience; the folder may be read-only
        (artefact / REPORTS).mkdir(exist_ok=True)
        (artefact / REPORTS / "compile.json").write_text(print_json(compile_report(results)), encoding="utf-8")
    kernels = [
        {
            "name": result.name,
            "ok": result.ok,
            "max_error": result.max_error,
            "tolerance": result.tolerance,
            "compiled": sorted(result.compiled),
            "detail": result.error,
        }
        for result in results
    ]
    checks = [{"name": "artefact", "ok": True, "detail": "hashes, schema and every invariant of the plan hold"}]
    return {
        "ok": bool(kernels) and all(kernel["ok"] for kernel in kernels),
        "plan_hash": plan_hash(plan),
        "checks": checks,
        "kernels": kernels,
    }


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
