"""What an engine cannot do with a plan: each refusal is one line that names the option to change.

`Settings` are vLLM's engine arguments under their own names, as far as they are known: the ones a user gave, or all that a
configured engine has (`compat.settings_of`). So the same rules hold before the engine starts and inside it. Imports no vLLM.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangram_plan.ir import (
    LayerKind,
    MismatchError,
    Plan,
    TangramError,
    check_head_order,
    check_scorer,
    longest_chunk,
)

from . import PLAN_KEY

Settings = Mapping[str, Any]

DTYPE_ALIASES = {"half": "float16", "float": "float32"}


@dataclass(frozen=True)
class Rule:
    """One of vLLM's engine arguments that a plan restricts.

    Args:
        argument: its name; the option is the same with dashes.
        fits: whether a value will do.
        what: what is refused otherwise.
        expected: a value that will do.
        fix: what to do.
        where: what the error names, if it is not the option.
    """

    argument: str
    fits: Callable[[Any, Plan], bool]
    what: str
    expected: Callable[[Plan], str]
    fix: Callable[[Plan], str]
    where: str = ""

    def check(self, settings: Settings, plan: Plan) -> TangramError | None:
        """The refusal, if the argument is known and does not fit."""
        value = settings.get(self.argument)
        if value is None or self.fits(value, plan):
            return None
        where = self.where or option(self.argument)
        return TangramError(self.what, where=where, got=_short(value), expected=self.expected(plan), fix=self.fix(plan))


def option(argument: str) -> str:
    """How an engine argument is called on the command line."""
    return "--" + argument.replace("_", "-")


def refusals(settings: Settings, plan: Plan, environment: Mapping[str, str]) -> list[TangramError]:
    """Everything that arguments and environment ask for and a plan cannot give.

    Args:
        settings: arguments that are known; those that are not are passed over.
        plan: of the artefact.
        environment: variables of the process.
    """
    found = [rule.check(settings, plan) for rule in RULES]
    found += [_token_budget(settings, plan), _prefill_threshold(settings, plan), *_environment(environment)]
    return [error for error in found if error is not None]


def engine_refusals(config: Any, plan: Plan, environment: Mapping[str, str]) -> list[TangramError]:
    """Everything that keeps a configured engine from serving a plan.

    Args:
        config: vLLM's.
        plan: of the artefact.
        environment: variables of the process.
    """
    from .compat import model_config_json, model_facts, settings_of

    found = [
        *plan_refusals(plan, Path(config.additional_config[PLAN_KEY])),
        *refusals(settings_of(config), plan, environment),
        *model_refusals(model_facts(config), plan),
    ]
    try:
        check_head_order(model_config_json(config), plan.head_order, where="--model")
    except TangramError as error:
        found.append(error)
    return found


def check_engine(config: Any, plan: Plan, environment: Mapping[str, str]) -> None:
    """The last check, in the engine's own process: where a user composed the options by hand it is the first.

    Raises:
        TangramError: the first of `engine_refusals`.
    """
    for error in engine_refusals(config, plan, environment):
        raise error


def check_attention_form(found: Mapping[str, Any], plan: Plan, *, layer: str) -> None:
    """That a layer of a loaded model attends as the plan's kernels do; an override of its configuration may have changed that.

    Args:
        found: how it attends: softmax scale, logit soft cap, sliding window, ALiBi, sinks.
        plan: of the artefact.
        layer: its name.

    Raises:
        MismatchError: otherwise.
    """
    form = plan.model.attention
    expected: dict[str, float | bool | None] = {
        "softmax scale": form.softmax_scale,
        "logit soft cap": form.logit_softcap,
        "sliding window": None,
        "ALiBi": False,
        "sinks": form.has_sinks,
    }
    for name, value in expected.items():
        if not _equal(found[name], value):
            raise MismatchError(
                f"the model attends otherwise than the plan: {name}",
                where=layer,
                got=str(found[name]),
                expected=str(value),
                fix="leave overrides of its configuration out, or build a plan for it",
            )


def plan_refusals(plan: Plan, artefact: Path) -> list[TangramError]:
    """What of a plan no engine serves, whatever its arguments.

    Args:
        plan: of the artefact.
        artefact: its folder.
    """
    found: list[TangramError] = []
    try:
        check_scorer(plan, artefact)
    except TangramError as error:
        found.append(error)
    others = {layer.kind for layer in plan.model.layers if layer.kind is not LayerKind.FULL}
    if others:
        found.append(
            TangramError(
                f"{plan.model.model_type} has layers that are not served from a plan",
                where="plan",
                got=f"{', '.join(sorted(kind.value for kind in others))} layers",
                expected="full attention in every layer",
                fix="serve this model with stock vLLM",
            )
        )
    return found


def model_refusals(facts: Mapping[str, Any], plan: Plan) -> list[TangramError]:
    """Where a model is not the plan's.

    Args:
        facts: what is known of the model, under the names of `planned_facts`.
        plan: of the artefact.
    """
    return [
        MismatchError(
            f"plan is for a model with another {name}",
            where="--model",
            got=facts[name],
            expected=str(planned),
            fix="give the plan's model, or build a plan for this one",
        )
        for name, planned in planned_facts(plan).items()
        if facts.get(name) is not None and str(facts[name]) != str(planned)
    ]


def planned_facts(plan: Plan) -> dict[str, Any]:
    """What a plan says of its model, by name."""
    identity = dict(plan.model.identity)
    facts = {
        "number of layers": len(plan.model.layers),
        "number of KV heads": max(layer.num_kv_heads for layer in plan.model.layers),
        "head_dim": plan.model.head_dim,
        "hidden_size": identity.get("hidden_size"),
        "vocab_size": identity.get("vocab_size"),
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def _equal(found: Any, expected: Any) -> bool:
    """Numbers up to the float32 that a config may have gone through."""
    numbers = isinstance(found, float) and isinstance(expected, float)
    return math.isclose(found, expected, rel_tol=1e-6) if numbers else bool(found == expected)


def least_token_budget(plan: Plan, max_num_seqs: int) -> int:
    """Tokens that a step must have room for: a chunk, and one of every other request."""
    return longest_chunk(plan.compress_chunk_tokens) + max_num_seqs - 1


def _token_budget(settings: Settings, plan: Plan) -> TangramError | None:
    least = least_token_budget(plan, settings.get("max_num_seqs") or 1)
    for argument in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
        budget = settings.get(argument)
        if budget is not None and budget < least:
            return TangramError(
                "a step has no room for a chunk of the prompt",
                where=option(argument),
                got=budget,
                expected=f"at least {least}, the plan's compress_chunk_tokens {plan.compress_chunk_tokens} + max_num_seqs",
                fix=f"give {option(argument)} {least}, or lower --max-num-seqs",
            )
    return None


def _prefill_threshold(settings: Settings, plan: Plan) -> TangramError | None:
    threshold = settings.get("long_prefill_token_threshold") or 0
    if (settings.get("max_num_partial_prefills") or 1) > 1 and not threshold:
        threshold = int(settings.get("max_model_len") or 0) // 25  # what vLLM makes of it
    least = longest_chunk(plan.compress_chunk_tokens)
    if not threshold or threshold >= least:
        return None
    return TangramError(
        "prompts are cut into pieces smaller than the plan's chunks",
        where="--long-prefill-token-threshold",
        got=threshold,
        expected=f"0, or at least {least}",
        fix=f"give --long-prefill-token-threshold {least}, or leave it and --max-num-partial-prefills out",
    )


def _environment(environment: Mapping[str, str]) -> list[TangramError]:
    reasons = {
        "VLLM_USE_V2_MODEL_RUNNER": "the second model runner does not ask a plan for the width of its block tables",
        "VLLM_USE_RUST_FRONTEND": "the Rust front end does not check the length of answers",
    }
    return [
        TangramError(reason, where=name, got=environment[name], expected="0", fix=f"unset {name}")
        for name, reason in reasons.items()
        if environment.get(name, "0").strip().lower() not in ("", "0", "false")
    ]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _field(value: Any, name: str) -> Any:
    """Of a configuration, as an object or as the mapping that it is made of."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _dtype(value: Any) -> str:
    name = str(value).removeprefix("torch.")
    return DTYPE_ALIASES.get(name, name)


def _off(argument: str, what: str) -> Rule:
    """Something that must not be on."""
    return Rule(
        argument, lambda value, _: not value, what, lambda _: "nothing", lambda _: f"leave {option(argument)} out"
    )


def _one(argument: str, what: str) -> Rule:
    """A number that must be 1."""
    return Rule(argument, lambda value, _: value == 1, what, lambda _: "1", lambda _: f"leave {option(argument)} out")


RULES = (
    Rule(
        "enable_prefix_caching",
        lambda value, _: not value,
        "a compressed prompt is not found again by its tokens, so there is no prefix caching",
        lambda _: "no prefix caching",
        lambda _: "give --no-enable-prefix-caching",
    ),
    Rule(
        "enable_chunked_prefill",
        lambda value, _: value,
        "a prompt is compressed chunk by chunk",
        lambda _: "chunked prefill",
        lambda _: "leave --no-enable-chunked-prefill out",
    ),
    _off("speculative_config", "speculative decoding over a compressed cache is not supported"),
    Rule(
        "kv_cache_dtype",
        lambda value, plan: _dtype(value) in ("auto", plan.layout.dtype.value),
        "the plan's pages hold another type of element",
        lambda plan: f"auto or {plan.layout.dtype.value}",
        lambda _: "leave --kv-cache-dtype out, or build the plan with another kv_dtype",
    ),
    Rule(
        "dtype",
        lambda value, plan: _dtype(value) in ("auto", plan.layout.dtype.value),
        "the model computes in another type than the plan's pages hold",
        lambda plan: plan.layout.dtype.value,
        lambda plan: f"give --dtype {plan.layout.dtype.value}, or build the plan with another kv_dtype",
    ),
    Rule(
        "tensor_parallel_size",
        lambda value, plan: value == plan.tensor_parallel,
        "the plan is for another number of ranks",
        lambda plan: str(plan.tensor_parallel),
        lambda plan: f"give --tensor-parallel-size {plan.tensor_parallel}, or build the plan for these ranks",
    ),
    _one("pipeline_parallel_size", "pipeline parallelism is not supported: one pool of pages holds all layers"),
    _one("data_parallel_size", "data parallelism is not supported"),
    _one("decode_context_parallel_size", "context parallelism in decoding is not supported"),
    _one("prefill_context_parallel_size", "context parallelism in prefill is not supported"),
    _off("kv_transfer_config", "KV connectors do not know the plan's pages"),
    _off("kv_offloading_size", "KV offloading does not know the plan's pages"),
    Rule(
        "kv_events_config",
        lambda value, _: not _field(value, "enable_kv_cache_events"),
        "pages are not named by their tokens, so there are no KV events",
        lambda _: "no events",
        lambda _: "leave --kv-events-config out",
    ),
    _off("ec_transfer_config", "encoder cache transfer is not supported"),
    _off("kv_sharing_fast_prefill", "fast prefill of layers that share a cache is not supported"),
    _off("calculate_kv_scales", "pages hold unscaled keys and values"),
    _off("enable_dbo", "dual batch overlap is not supported"),
    _off("ubatch_size", "micro-batches are not supported"),
    _off("block_size", "the plan says how large a page is"),
    _off("attention_backend", "the plan's kernels are the attention of all its layers"),
    Rule(
        "attention_config",
        lambda value, _: not _field(value, "backend"),
        "the plan's kernels are the attention of all its layers",
        lambda _: "no backend",
        lambda _: "leave its backend out",
    ),
    Rule(
        "runner",
        lambda value, _: value in ("auto", "generate"),
        "only generation is served from a plan",
        lambda _: "generate",
        lambda _: "leave --runner out",
    ),
    Rule(
        "use_v2_model_runner",  # none of vLLM's arguments: see `compat.settings_of`
        lambda value, _: not value,
        "the second model runner does not ask a plan for the width of its block tables",
        lambda _: "the first",
        lambda _: (
            "set VLLM_USE_V2_MODEL_RUNNER=0, and leave options out that need the second, such as --watermark-config"
        ),
        where="model runner",
    ),
    Rule(
        "modalities",  # none of vLLM's arguments: see `compat.settings_of`
        lambda value, _: value == "text",
        "images, video and sound are not served from a plan",
        lambda _: "text alone",
        lambda _: "give --language-model-only",
        where="--model",
    ),
)
