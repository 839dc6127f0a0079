"""`tangram-plan doctor`: what this machine has for serving a plan, what would be refused, and which option fixes it."""

import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tangram_plan.ir import TangramError, load_artefact, plan_hash
from tangram_plan.runtime.vllm_plugin import register
from tangram_plan.runtime.vllm_plugin.installed import INSTALL, check_vllm, quiet_vllm
from tangram_plan.runtime.vllm_plugin.refusals import plan_refusals

from .serve import inspect_service, model_errors
from .terminal import new_table

if TYPE_CHECKING:
    from rich.console import RenderableType

PLUGIN_GROUP, PLUGIN_NAME = "vllm.general_plugins", "tangram_plan"


class Verdict(StrEnum):
    """Of one check."""

    OK = "ok"
    WARNING = "warning"  # it may work
    REFUSED = "refused"


@dataclass(frozen=True)
class Finding:
    """One check.

    Args:
        check: what was looked at.
        verdict: of it.
        found: what there is.
        fix: what to do, unless it is in order.
    """

    check: str
    verdict: Verdict
    found: str
    fix: str = ""


@quiet_vllm()
def examine(artefact: Path, model: str | None, options: Sequence[str]) -> dict[str, Any]:
    """Every check, and whether all of them passed.

    Args:
        artefact: folder that `build` wrote.
        model: folder or hub id; without one, what depends on a model is left out.
        options: of `vllm serve`.
    """
    findings = list(_findings(artefact, model, options))
    ok = all(finding.verdict is not Verdict.REFUSED for finding in findings)
    return {"ok": ok, "checks": [asdict(finding) for finding in findings]}


def doctor_table(result: dict[str, Any]) -> "RenderableType":
    """For a person."""
    table = new_table("", "check", "verdict", "found", "fix")
    for column in table.columns[1:]:
        column.justify = "left"
    for finding in result["checks"]:
        table.add_row(*(str(finding[name]) for name in ("check", "verdict", "found", "fix")))
    return table


def _findings(artefact: Path, model: str | None, options: Sequence[str]) -> Iterator[Finding]:
    yield Finding("python", Verdict.OK, platform.python_version())
    yield from (_package(name) for name in ("torch", "triton"))
    usable = _vllm()
    yield usable
    if usable.verdict is not Verdict.REFUSED:
        yield _tested()
        yield _device()
    yield _plugin()
    try:
        plan = load_artefact(artefact)
    except TangramError as error:
        yield _refusal("plan", error)
        return
    found = f"{plan_hash(plan)[:16]} for {plan.model.model_type}, {plan.provenance.rule}"
    refused = plan_refusals(plan, artefact)
    yield from _refusals("plan", refused, found)
    if usable.verdict is not Verdict.REFUSED:
        yield from tuning(plan.partition.device, _gpu_name())
    if model is None:
        return
    errors = model_errors(model, plan)
    yield from _refusals("model", errors, model)
    if usable.verdict is not Verdict.REFUSED and not errors:
        _, errors = inspect_service(artefact, model, options)
        known = {str(error) for error in refused}
        others = [error for error in errors if str(error) not in known]
        yield from _refusals("options", others, "nothing that is asked for is refused")


def _package(name: str) -> Finding:
    try:
        return Finding(name, Verdict.OK, version(name))
    except PackageNotFoundError:
        return Finding(name, Verdict.WARNING, "not installed", "comes with vLLM")


def _vllm() -> Finding:
    try:
        check_vllm()
    except TangramError as error:
        return _refusal("vllm", error)
    names = packages_distributions().get("vllm") or ["vllm"]
    return Finding("vllm", Verdict.OK, ", ".join(f"{name} {version(name)}" for name in sorted(set(names))))


def _tested() -> Finding:
    from tangram_plan.runtime.vllm_plugin.compat import TESTED_VERSIONS, version_warning

    tested = ", ".join(f"{', '.join(versions)} on {name}" for name, versions in TESTED_VERSIONS.items())
    if warning := version_warning():
        return Finding("tested versions", Verdict.WARNING, warning, INSTALL)
    return Finding("tested versions", Verdict.OK, tested)


def _device() -> Finding:
    from tangram_plan.runtime.vllm_plugin.compat import on_cpu

    if on_cpu():
        return Finding("device", Verdict.OK, "CPU: the plain-torch reference serves, slowly")
    name = _gpu_name()
    if not name:
        return Finding("device", Verdict.REFUSED, "vLLM is built for GPUs, and there is none", INSTALL)
    return Finding("device", Verdict.OK, name)


def _gpu_name() -> str:
    from tangram_plan.runtime.vllm_plugin.compat import device_name

    return device_name()


def tuning(planned: str, gpu: str) -> Iterator[Finding]:
    """Whether a plan's kernels are cut for the GPU that is here, if one is: they are right on every GPU, and fast on theirs.

    Args:
        planned: device of the plan's partition, as `h200` or `a100-80gb`.
        gpu: what the driver calls it, as `NVIDIA H200`; empty: none.
    """
    if not gpu:
        return
    if set(re.findall(r"[a-z0-9]+", planned.lower())) & set(re.findall(r"[a-z]+[0-9]+[a-z]*", gpu.lower())):
        yield Finding("tuning", Verdict.OK, f"for {planned}")
        return
    fix = "`tangram-plan bench tune` measures this GPU; build the plan with `--set partition.device=` its file"
    yield Finding("tuning", Verdict.WARNING, f"kernels are cut for {planned}, and this is {gpu}", fix)


def _plugin() -> Finding:
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in [name.strip() for name in allowed.split(",")]:
        return Finding(
            "plugin", Verdict.REFUSED, f"VLLM_PLUGINS={allowed} keeps it out", f"add {PLUGIN_NAME} to VLLM_PLUGINS"
        )
    ours = f"{register.__module__}:{register.__name__}"
    if any(point.value == ours for point in entry_points(group=PLUGIN_GROUP)):
        return Finding("plugin", Verdict.OK, f"{PLUGIN_GROUP}: {PLUGIN_NAME}")
    where = find_spec("tangram_plan")
    fix = "install tangram-plan with pip, into the environment of vLLM"
    return Finding("plugin", Verdict.REFUSED, f"not registered by {where.origin if where else 'tangram_plan'}", fix)


def _refusals(check: str, errors: Sequence[TangramError], found: str) -> Iterator[Finding]:
    if not errors:
        yield Finding(check, Verdict.OK, found)
    yield from (_refusal(check, error) for error in errors)


def _refusal(check: str, error: TangramError) -> Finding:
    without_fix = TangramError(error.what, where=error.where, got=error.got, expected=error.expected)
    return Finding(check, Verdict.REFUSED, str(without_fix), error.fix)
