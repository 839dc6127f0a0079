"""The generated modules of an artefact, loaded together; what checks, benchmarks and the runtime launch."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tangram_plan.ir import Plan

from .head_tables import load_head_tables
from .kernel_modules import kernel_files, load_module


class GeneratedKernels:
    """The kernels and head tables of an artefact, in a process in which Triton interprets (or on a GPU).

    Args:
        directory: artefact directory.
        plan: its plan.
        device: where the kernels run, as torch names it.
    """

    def __init__(self, directory: Path, plan: Plan, device: str = "cpu") -> None:
        self.plan, self.device = plan, device
        self.tables = load_head_tables(directory)
        self.modules = {path.stem: load_module(directory, path.stem) for path in kernel_files(directory)}


class KernelRun(NamedTuple):
    """One run of a kernel check."""

    names: tuple[str, ...]  # the kernels that it is about
    error: Callable[[], float]  # runs them; largest relative error, infinite where something exact is wrong
