"""The arguments with which a stock vLLM engine serves from a plan, for Python and for the command line. Imports no vLLM."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tangram_plan.ir import HEAD_ORDER_KEY, Plan, TangramError, check_head_order, load_artefact

from .vllm_plugin import PLAN_KEY
from .vllm_plugin.refusals import least_token_budget, model_refusals, option, plan_refusals, refusals

PLUGIN = f"{__package__}.vllm_plugin"
OURS = {
    "scheduler_cls": f"{PLUGIN}.scheduler.make_scheduler",
    "worker_cls": f"{PLUGIN}.worker.CompressedWorker",
}
MIDDLEWARE = f"{PLUGIN}.admission.AnswerLimit"

# vLLM chooses budget and number of requests by GPU and use: never a smaller budget, and never more requests, than these.
SMALLEST_TOKEN_BUDGET, MOST_REQUESTS, USUAL_TOKEN_BUDGET = 2048, 1024, 8192


def engine_args(artefact: str | Path, **arguments: Any) -> dict[str, Any]:
    """Arguments for `vllm.LLM`, or for its engine: yours, and what the plan needs.

    Args:
        artefact: folder that `tangram-plan build` wrote.
        arguments: any of vLLM's; `model` among them.

    Raises:
        TangramError: the artefact is none, or the arguments ask for what a plan cannot give.
    """
    artefact = Path(artefact).resolve()
    plan = load_artefact(artefact)
    for error in refused_arguments(plan, artefact, arguments):
        raise error
    return {**arguments, **_needed(plan, artefact, arguments)}


def server_args(plan: Plan, artefact: Path, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What `vllm serve` needs beside your arguments: the engine's, a limit for answers that ask for none, and one for those that do.

    Args:
        plan: of the artefact.
        artefact: its folder.
        arguments: yours, of which `refused_arguments` refuses none.
    """
    generation = dict(arguments.get("override_generation_config") or {})
    generation["max_new_tokens"] = generation.get("max_new_tokens") or plan.max_new_tokens
    return {
        **_needed(plan, artefact.resolve(), arguments),
        "override_generation_config": generation,
        "middleware": MIDDLEWARE,
    }


def server_options(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Arguments as options of `vllm serve`.

    Raises:
        TangramError: a mapping has a key that no option can name.
    """
    for name, value in arguments.items():
        if isinstance(value, bool):
            yield option(name) if value else f"--no-{option(name).removeprefix('--')}"
        elif isinstance(value, Mapping):
            yield from (f"{option(name)}.{_checked_key(name, key)}={_text(entry)}" for key, entry in value.items())
        elif isinstance(value, list | tuple):
            yield from (option(name), *map(str, value))
        else:
            yield from (option(name), str(value))


def _checked_key(name: str, key: str) -> str:
    if "." in key:
        raise TangramError("a key with a dot cannot be passed on", where=option(name), got=key, fix="name it otherwise")
    return key


def _text(entry: Any) -> str:
    """Of an entry of a mapping; vLLM reads JSON where it can, and numbers such as 80g, neither of which begins with a slash."""
    return entry if isinstance(entry, str) and entry.startswith("/") else json.dumps(entry)


def refused_arguments(plan: Plan, artefact: Path, arguments: Mapping[str, Any]) -> list[TangramError]:
    """What is known to be refused before vLLM has seen the arguments."""
    found = [*plan_refusals(plan, artefact), *refusals(arguments, plan, os.environ)]
    for name, ours in OURS.items():
        if arguments.get(name) not in (None, "auto", ours):
            what = "the plan brings its own"
            found.append(TangramError(what, where=option(name), got=arguments[name], fix=f"leave {option(name)} out"))
    generation = arguments.get("override_generation_config") or {}
    if (generation.get("max_new_tokens") or 0) > plan.max_new_tokens:
        found.append(
            TangramError(
                "answers are longer than the plan admits",
                where="--override-generation-config: max_new_tokens",
                got=generation["max_new_tokens"],
                expected=f"at most {plan.max_new_tokens}",
                fix="lower it, or build the plan with a larger max_new_tokens",
            )
        )
    if (model := arguments.get("model")) is not None:
        found += _local_model_refusals(Path(model), plan)
    return found


def _needed(plan: Plan, artefact: Path, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What the plan needs, merged with what the user gave under the same names."""
    needed = {
        **OURS,
        "enable_prefix_caching": False,
        "additional_config": {**(arguments.get("additional_config") or {}), PLAN_KEY: str(artefact)},
        "logits_processors": [
            *(arguments.get("logits_processors") or ()),
            f"{PLUGIN}.admission:AtMost{plan.max_new_tokens}Tokens",
        ],
    }
    if arguments.get("dtype", "auto") == "auto":
        needed["dtype"] = plan.layout.dtype.value
    if arguments.get("tensor_parallel_size") is None and plan.tensor_parallel > 1:
        needed["tensor_parallel_size"] = plan.tensor_parallel
    least = least_token_budget(plan, arguments.get("max_num_seqs") or MOST_REQUESTS)
    if arguments.get("max_num_batched_tokens") is None and least > SMALLEST_TOKEN_BUDGET:
        needed["max_num_batched_tokens"] = max(least, USUAL_TOKEN_BUDGET)
    return needed


def _local_model_refusals(folder: Path, plan: Plan) -> list[TangramError]:
    """Where the `config.json` of a folder is not that of the plan's model; of other models the engine tells."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(config, dict):
        return []
    decoder = config.get("text_config") or config
    keys = {
        "number of layers": "num_hidden_layers",
        "number of KV heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "hidden_size": "hidden_size",
        "vocab_size": "vocab_size",
    }
    counts = {name: decoder.get(key) for name, key in keys.items()}
    found = model_refusals({name: count for name, count in counts.items() if isinstance(count, int)}, plan)
    try:
        check_head_order({HEAD_ORDER_KEY: config.get(HEAD_ORDER_KEY)}, plan.head_order, where=str(folder))
    except TangramError as error:
        found.append(error)
    return found
