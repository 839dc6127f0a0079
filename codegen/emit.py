"""Writes the generated files of a plan."""

import json
from pathlib import Path

from tangram_plan.ir import Plan

from .allocator_config import allocator_config
from .head_tables import tabulate
from .render import HEAD_TABLES_NAME, PROVENANCE, render_head_tables, render_kernel
from .specialize import specialize

KERNELS_FOLDER = "kernels"
ALLOCATOR_FILE = "allocator.json"


def emit(plan: Plan, plan_hash: str, directory: Path) -> list[Path]:
    """Writes `kernels/*.py` and `allocator.json` below a directory; files that are equal stay untouched.

    Generated kernels of an earlier plan that this one does not have are removed; nothing else is.

    Args:
        plan: a verified plan.
        plan_hash: its hash, for the provenance lines.
        directory: artefact directory; made if it does not exist.

    Returns:
        Every file of the plan, sorted.
    """
    texts = {
        directory / KERNELS_FOLDER / f"{spec.name}.py": render_kernel(spec, plan_hash) for spec in specialize(plan)
    }
    texts[directory / KERNELS_FOLDER / f"{HEAD_TABLES_NAME}.py"] = render_head_tables(tabulate(plan), plan_hash)
    texts[directory / ALLOCATOR_FILE] = json.dumps(allocator_config(plan), indent=2, sort_keys=True) + "\n"
    for path, text in texts.items():
        _write_if_different(path, text)
    for path in sorted((directory / KERNELS_FOLDER).glob("*.py")):
        if path not in texts and path.read_text(encoding="utf-8").startswith(PROVENANCE):
            path.unlink()
    return sorted(texts)


def _write_if_different(path: Path, text: str) -> None:
    if path.exists() and path.read_bytes() == text.encode():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
