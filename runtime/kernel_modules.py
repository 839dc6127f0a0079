"""Loads the generated modules of an artefact."""

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from tangram_plan.ir import HEAD_TABLES_NAME, KERNELS_FOLDER, TangramError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def kernel_files(directory: Path) -> tuple[Path, ...]:
    """Files with generated kernels below an artefact directory, by name."""
    files = sorted((directory / KERNELS_FOLDER).glob("*.py"))
    if not files:
        raise TangramError(
            "no generated kernels", where=str(directory), expected=f"{KERNELS_FOLDER}/*.py", fix="build the plan again"
        )
    return tuple(path for path in files if path.stem != HEAD_TABLES_NAME)


def load_module(directory: Path, name: str) -> ModuleType:
    """Runs a generated file as a module of its own; nothing is written beside it, and loading twice gives two modules."""
    path = directory / KERNELS_FOLDER / f"{name}.py"
    if not path.is_file():
        raise TangramError("generated file is missing", where=str(path), fix="build the plan again")
    module_name = f"tangram_plan_generated_{name}"
    spec = importlib.util.spec_from_file_location(module_name, path, loader=_NoBytecode(module_name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _NoBytecode(SourceFileLoader):
    """Leaves no `__pycache__` in an artefact, whose manifest vouches for every file."""

    def set_data(self, path: str, data: "ReadableBuffer", *, _mode: int = 0o666) -> None:
        """Writes nothing."""
