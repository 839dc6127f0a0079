"""Writes the generated files of a plan."""

import json
from pathlib import Path

from tangram_plan.ir import ALLOCATOR_FILE, HEAD_TABLES_NAME, KERNELS_FOLDER, Plan

from .allocator_config import allocator_config
from .head_tables import tabulate
from .render import render_head_tables, render_kernel
from .specialize import specialize


def emit(plan: Plan, plan_hash: str, directory: Path) -> list[Path]:
    """Writes `kernels/*.py` and `allocator.json` below a directory.

    Args:
        plan: a verified plan.
        plan_hash: its hash, for the provenance lines.
        directory: artefact directory, without generated files; made if it does not exist.

    Returns:
        Every file of the plan, sorted.
    """
    kernels = directory / KERNELS_FOLDER
    texts = {kernels / f"{spec.name}.py": render_kernel(spec, plan_hash) for spec in specialize(plan)}
    texts[kernels / f"{HEAD_TABLES_NAME}.py"] = render_head_tables(tabulate(plan), plan_hash)
    texts[directory / ALLOCATOR_FILE] = json.dumps(allocator_config(plan), indent=2, sort_keys=True) + "\n"
    kernels.mkdir(parents=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8", newline="\n")
    return sorted(texts)
