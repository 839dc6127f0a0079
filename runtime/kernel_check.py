"""Proof that the generated kernels of an artefact are right, without a GPU.

Every kernel is loaded from its file, run in Triton's interpreter on a small ragged problem and compared with
`runtime.reference`; and compiled ahead of time for every supported architecture. Triton decides when a kernel is decorated
whether it is interpreted, so both happen in processes of their own (`python -m tangram_plan.runtime.kernel_check`), and what
the caller has imported does not matter.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tangram_plan.ir import (
    PAGE_TABLE_KERNEL,
    CheckFailedError,
    KVDtype,
    Plan,
    Schedule,
    parse_plan,
    plan_kernel_name,
    print_plan,
)

from .kernel_modules import kernel_files, load_module

if TYPE_CHECKING:
    from .generated_kernels import KernelRun

ARCHITECTURES = (80, 90, 100)  # compute capabilities: A100, H100 and H200, B200
SHARED_MEMORY_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # that one CTA can have
TOLERANCES = {KVDtype.FLOAT32: 2e-5, KVDtype.FLOAT16: 2e-3, KVDtype.BFLOAT16: 1.6e-2}  # of `KernelResult.max_error`


@dataclass(frozen=True)
class CompiledKernel:
    """What the compiler says of a kernel on one architecture.

    Args:
        registers: per thread.
        spill_bytes: per thread, stores and loads together.
        shared_memory_bytes: per CTA.
    """

    registers: int
    spill_bytes: int
    shared_memory_bytes: int


@dataclass(frozen=True)
class KernelResult:
    """What was found about one generated kernel.

    Args:
        name: of the kernel.
        max_error: largest relative error of an output row against the reference: the norm of the difference over the
            norm of the row. Infinite for NaN, for a row that had to be zero and was not, and for a wrong tile count.
        tolerance: largest error that is right, for the plan's dtype.
        compiled: per architecture (80, 90, 100).
        error: why the kernel did not run or compile, or does not fit the device; empty if it did.
    """

    name: str
    max_error: float
    tolerance: float
    compiled: Mapping[int, CompiledKernel]
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether the kernel is right on every architecture."""
        return not self.error and self.max_error <= self.tolerance and set(self.compiled) == set(ARCHITECTURES)


def check_kernels(directory: Path, plan: Plan) -> list[KernelResult]:
    """Runs and compiles every generated kernel of an artefact. A wrong kernel is reported, not raised.

    Args:
        directory: artefact directory, with `kernels/*.py`.
        plan: the plan that they were generated from.

    Raises:
        CheckFailedError: if torch or triton is missing, the check stopped, or the head tables are not the plan's.
        TangramError: if there are no kernels.
    """
    _require_packages()
    from .kernel_problem import verify_head_tables

    names = {path.stem for path in kernel_files(directory)}
    verify_head_tables(directory, plan)
    with tempfile.TemporaryDirectory() as cache, contextlib.ExitStack() as processes:
        compiler = processes.enter_context(_started("compile", directory, _compile_settings(cache)))
        interpreter = processes.enter_context(_started("interpret", directory, {"TRITON_INTERPRET": "1"}))
        errors, compiled = _finish(interpreter, print_plan(plan)), _finish(compiler)
    return [_result(name, plan, errors.get(name, {}), compiled.get(name, {})) for name in sorted(names | errors.keys())]


def compile_kernels(directory: Path) -> dict[str, dict[int, CompiledKernel]]:
    """Compiles every generated kernel of an artefact, and runs none: {name: {architecture: what the compiler says}}.

    Raises:
        CheckFailedError: if torch or triton is missing, or a kernel does not compile.
        TangramError: if there are no kernels.
    """
    _require_packages()
    with tempfile.TemporaryDirectory() as cache, _started("compile", directory, _compile_settings(cache)) as compiler:
        compiled = _finish(compiler)
    for name, found in compiled.items():
        if "failure" in found:
            raise CheckFailedError("kernel does not compile", where=name, got=found["failure"])
    return {name: _compiled(found) for name, found in compiled.items()}


def compile_report(results: list[KernelResult]) -> dict[str, object]:
    """What the compiler said, as JSON values by Triton version; it changes with Triton, so it is no part of a plan's hash."""
    import triton

    kernels = {
        result.name: {f"sm_{arch}": asdict(compiled) for arch, compiled in sorted(result.compiled.items())}
        for result in results
    }
    return {"triton": {triton.__version__: dict(sorted(kernels.items()))}}


def _result(name: str, plan: Plan, run: dict[str, object], compiled: dict[str, object]) -> KernelResult:
    failures = [str(part["failure"]) for part in (run, compiled) if "failure" in part]
    found = _compiled(compiled)
    for arch, kernel in found.items():
        if kernel.shared_memory_bytes > SHARED_MEMORY_BYTES[arch]:
            failures.append(
                f"{kernel.shared_memory_bytes} bytes of shared memory, sm_{arch} has {SHARED_MEMORY_BYTES[arch]}"
            )
    error = run.get("max_error")
    max_error = float(error) if isinstance(error, int | float) else float("inf")
    return KernelResult(name, max_error, tolerance(name, plan.layout.dtype), found, "; ".join(failures))


def tolerance(name: str, dtype: KVDtype) -> float:
    """Largest error of a kernel that is right; what is counted, moved or selected is exact."""
    is_exact = name.startswith("evict_") or name in (PAGE_TABLE_KERNEL, *map(plan_kernel_name, Schedule))
    return 0.0 if is_exact else TOLERANCES[dtype]


def _compiled(found: dict[str, object]) -> dict[int, CompiledKernel]:
    return {arch: CompiledKernel(**found[str(arch)]) for arch in ARCHITECTURES if str(arch) in found}  # type: ignore[arg-type]


def _compile_settings(cache: str) -> dict[str, str]:
    return {"TRITON_INTERPRET": "0", "TRITON_DUMP_PTXAS_LOG": "1", "TRITON_CACHE_DIR": cache}


def _require_packages() -> None:
    missing = [package for package in ("torch", "triton") if importlib.util.find_spec(package) is None]
    if missing:
        raise CheckFailedError(
            "checking kernels needs packages that are not installed",
            got=f"no {' and no '.join(missing)}",
            fix="run `pip install 'tangram-plan[verify]'`",
        )


@contextlib.contextmanager
def _started(task: str, directory: Path, settings: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process of this module, which does not outlive the block."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | settings
    command = [sys.executable, "-m", "tangram_plan.runtime.kernel_check", task, str(directory)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def _finish(process: subprocess.Popen[str], text: str = "") -> dict[str, dict[str, object]]:
    output, log = process.communicate(text)
    if process.returncode:
        last = log.strip().splitlines()[-1] if log.strip() else ""
        raise CheckFailedError("the kernel check stopped", got=last, where=" ".join(map(str, process.args[2:4])))  # type: ignore[index]
    found: dict[str, dict[str, object]] = json.loads(output.splitlines()[-1])
    return found


# ---------------------------------------------------------------- in the compiling process


def _compile_all(directory: Path) -> dict[str, dict[str, object]]:
    results: dict[str, dict[str, object]] = {}
    for path in kernel_files(directory):
        found: dict[str, object] = {}
        try:
            for arch in ARCHITECTURES:
                found[str(arch)] = asdict(compile_kernel(directory, path.stem, arch))
        except Exception as error:  # whatever the compiler raises is the finding
            found["failure"] = f"sm_{arch}: {type(error).__name__}: {error}".splitlines()[0]
        results[path.stem] = found
    return results


def compile_kernel(directory: Path, name: str, arch: int) -> CompiledKernel:
    """Compiles one generated kernel ahead of time; needs a process in which Triton does not interpret.

    Arguments that the kernel's SIGNATURE calls multiples of 16 are declared so, as Triton finds them at serving time:
    vector loads depend on it. Registers and spills are read from what ptxas prints, hence from a compilation that was
    not cached.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = load_module(directory, name)
    kernel = module.KERNEL
    declared = dict(zip(kernel.arg_names, module.SIGNATURE.split(), strict=True))
    types = {name: re.split("[:=]", argument)[0] for name, argument in declared.items()}
    constants = {name: argument.partition("=")[2] == "True" for name, argument in declared.items() if "=" in argument}
    aligned = [index for index, argument in enumerate(declared.values()) if argument.endswith(":16")]
    source = ASTSource(kernel, types, constexprs=constants, attrs={(i,): [["tt.divisibility", 16]] for i in aligned})
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(module.OPTIONS))
    registers = re.findall(r"Used (\d+) registers", log.getvalue())
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue())
    return CompiledKernel(int(registers[-1]), sum(map(int, spills)), int(compiled.metadata.shared))


# ---------------------------------------------------------------- in the interpreting process


def run_kernels(directory: Path, plan: Plan, device: str = "cpu") -> dict[str, dict[str, object]]:
    """Finds the largest error of every generated kernel, and why one does not run.

    Args:
        directory: artefact directory.
        plan: its plan.
        device: where the kernels run; on a CPU, in a process in which Triton interprets.

    Returns:
        {name: {"max_error": ..., "failure": ...}}; what was not found is not there.
    """
    from .decode_problem import decode_runs
    from .eviction_problem import eviction_runs
    from .generated_kernels import GeneratedKernels
    from .page_table_problem import page_table_runs
    from .prefill_problem import prefill_runs

    kernels = GeneratedKernels(directory, plan, device)
    families = (page_table_runs, decode_runs, prefill_runs, eviction_runs)
    return find_errors(chain.from_iterable(runs(kernels) for runs in families), device)


def find_errors(runs: "Iterable[KernelRun]", device: str = "cpu") -> dict[str, dict[str, object]]:
    """As `run_kernels`, of some runs."""
    findings: dict[str, dict[str, object]] = {}
    for names, error in runs:
        try:
            found: dict[str, object] = {"max_error": error()}
        except Exception as failure:  # whatever the interpreter raises is the finding
            found = {"failure": f"on {device}: {type(failure).__name__}: {failure}".splitlines()[0]}
        for name in names:  # some share an output: which of them is wrong, it does not tell
            findings[name] = _worse(findings.get(name, {}), found)
    return findings


def _worse(one: dict[str, object], other: dict[str, object]) -> dict[str, object]:
    errors = [float(str(found["max_error"])) for found in (one, other) if "max_error" in found]
    return one | other | ({"max_error": max(errors)} if errors else {})


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tangram_plan.runtime.kernel_check")
    parser.add_argument("task", choices=("compile", "interpret"))
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    if arguments.task == "compile":
        print(json.dumps(_compile_all(arguments.directory)))
        return
    import torch

    torch.set_num_threads(1)  # its products are tiny, and the compiling process wants a core, too
    plan = parse_plan(sys.stdin.read(), where="plan on standard input")
    print(json.dumps(run_kernels(arguments.directory, plan)))


if __name__ == "__main__":
    _main()
