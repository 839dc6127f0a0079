import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tangram_plan.ir import AttentionForm, KVDtype, MismatchError, Plan
from tangram_plan.runtime.vllm_plugin.refusals import (
    RULES,
    check_attention_form,
    least_token_budget,
    model_refusals,
    option,
    plan_refusals,
    planned_facts,
    refusals,
)
from tests.engine_runs import ENVIRONMENT, ROOT
from tests.engines import Engines
from tests.plans import valid_plan
from tests.small_plans import hand_plan

PLAN = replace(valid_plan(compress_chunk_tokens=64, max_new_tokens=128), scorer="recent")
BFLOAT16 = replace(valid_plan(dtype=KVDtype.BFLOAT16), scorer="recent")
TWO_RANKS = replace(valid_plan(tensor_parallel=2), scorer="recent")

# argument -> (values that are refused, values that are not)
VALUES: Mapping[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "enable_prefix_caching": ((True,), (False,)),
    "speculative_config": (("ngram", {"method": "ngram"}), ({},)),
    "kv_cache_dtype": (("fp8", "fp8_e4m3", "bfloat16", "int8"), ("auto", "float32", "float")),
    "dtype": (("half", "bfloat16", "torch.float16"), ("auto", "float32", "float", "torch.float32")),
    "tensor_parallel_size": ((2, 4), (1,)),
    "pipeline_parallel_size": ((2,), (1,)),
    "data_parallel_size": ((2,), (1,)),
    "decode_context_parallel_size": ((2,), (1,)),
    "prefill_context_parallel_size": ((2,), (1,)),
    "kv_transfer_config": (({"kv_connector": "NixlConnector"}, "NixlConnector"), ()),
    "kv_offloading_size": ((4.0,), (0,)),
    "kv_events_config": (
        ({"enable_kv_cache_events": True}, SimpleNamespace(enable_kv_cache_events=True)),
        ({"enable_kv_cache_events": False}, SimpleNamespace(enable_kv_cache_events=False), {}),
    ),
    "ec_transfer_config": (({"ec_connector": "ECExampleConnector"},), ()),
    "kv_sharing_fast_prefill": ((True,), (False,)),
    "calculate_kv_scales": ((True,), (False,)),
    "enable_dbo": ((True,), (False,)),
    "ubatch_size": ((2,), (0,)),
    "block_size": ((16, 128), ()),
    "attention_backend": (("FLASH_ATTN",), ()),
    "attention_config": (
        ({"backend": "FLASH_ATTN"}, SimpleNamespace(backend="FLASH_ATTN")),
        ({"flash_attn_version": 3}, SimpleNamespace(backend=None)),
    ),
    "enable_chunked_prefill": ((False,), (True,)),
    "use_v2_model_runner": ((True,), (False,)),
    "runner": (("pooling", "draft"), ("auto", "generate")),
    "modalities": (("more than text",), ("text",)),
}
REFUSED = [(argument, value) for argument, (values, _) in VALUES.items() for value in values]
PASSING = [(argument, value) for argument, (_, values) in VALUES.items() for value in (*values, None)]

LINES = {
    "enable_prefix_caching": (
        "--enable-prefix-caching: a compressed prompt is not found again by its tokens, so there is no prefix caching:"
        " got True, expected no prefix caching; give --no-enable-prefix-caching"
    ),
    "kv_cache_dtype": (
        "--kv-cache-dtype: the plan's pages hold another type of element: got fp8, expected auto or float32;"
        " leave --kv-cache-dtype out, or build the plan with another kv_dtype"
    ),
    "tensor_parallel_size": (
        "--tensor-parallel-size: the plan is for another number of ranks: got 2, expected 1;"
        " give --tensor-parallel-size 1, or build the plan for these ranks"
    ),
    "speculative_config": (
        "--speculative-config: speculative decoding over a compressed cache is not supported: got ngram, expected nothing;"
        " leave --speculative-config out"
    ),
    "modalities": (
        "--model: images, video and sound are not served from a plan: got more than text, expected text alone;"
        " give --language-model-only"
    ),
}


def lines(settings: Mapping[str, Any], plan: Plan = PLAN, environment: Mapping[str, str] = {}) -> list[str]:
    return [str(error) for error in refusals(settings, plan, environment)]


def test_every_rule_is_tried() -> None:
    assert {rule.argument for rule in RULES} == set(VALUES)


@pytest.mark.parametrize(("argument", "value"), REFUSED)
def test_what_a_plan_cannot_give_is_refused_in_one_line_that_names_the_option(argument: str, value: Any) -> None:
    (line,) = lines({argument: value})
    (rule,) = (rule for rule in RULES if rule.argument == argument)
    assert line.startswith(f"{rule.where or option(argument)}: {rule.what}: got ")
    assert "\n" not in line
    assert rule.fix(PLAN) in line


@pytest.mark.parametrize(("argument", "value"), PASSING)
def test_what_a_plan_can_give_passes(argument: str, value: Any) -> None:
    assert lines({argument: value}) == []


@pytest.mark.parametrize("argument", LINES)
def test_a_refusal_says_what_and_where_and_what_to_do(argument: str) -> None:
    assert lines({argument: VALUES[argument][0][0]}) == [LINES[argument]]


def test_nothing_that_is_not_asked_for_is_refused() -> None:
    assert lines({}) == []
    assert lines({"no_argument_of_vllms": True}) == []


def test_everything_that_is_wrong_is_said_at_once() -> None:
    assert len(lines({"enable_prefix_caching": True, "block_size": 16, "max_num_batched_tokens": 1})) == 3


def test_types_and_ranks_are_the_plans() -> None:
    assert lines({"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}, BFLOAT16) == []
    assert len(lines({"dtype": "float32", "kv_cache_dtype": "float32"}, BFLOAT16)) == 2
    assert lines({"tensor_parallel_size": 2}, TWO_RANKS) == []
    assert len(lines({"tensor_parallel_size": 1}, TWO_RANKS)) == 1


def test_a_long_value_is_cut() -> None:
    (line,) = lines({"speculative_config": {"model": "x" * 1000}})
    assert len(line) < 300


# --- what depends on several arguments


@pytest.mark.parametrize(("max_num_seqs", "least"), [(None, 65), (1, 65), (8, 72), (1024, 1088)])
def test_a_step_has_room_for_a_chunk_and_a_token_of_every_request(max_num_seqs: int | None, least: int) -> None:
    assert least_token_budget(PLAN, max_num_seqs or 1) == least
    assert lines({"max_num_seqs": max_num_seqs, "max_num_batched_tokens": least}) == []
    assert lines({"max_num_seqs": max_num_seqs, "max_num_batched_tokens": least - 1}) == [
        f"--max-num-batched-tokens: a step has no room for a chunk of the prompt: got {least - 1}, expected at least {least},"
        f" the plan's compress_chunk_tokens 64 + max_num_seqs; give --max-num-batched-tokens {least}, or lower --max-num-seqs"
    ]


@pytest.mark.parametrize("budget", [64, 1])
def test_a_smaller_budget_than_that_of_a_batch_holds_a_chunk_too(budget: int) -> None:
    settings = {"max_num_batched_tokens": 65, "max_num_scheduled_tokens": budget}
    (line,) = lines(settings)
    assert line.startswith(f"--max-num-scheduled-tokens: a step has no room for a chunk of the prompt: got {budget}, ")
    assert lines(settings | {"max_num_scheduled_tokens": 65}) == []


def test_a_budget_that_vllm_is_to_choose_passes() -> None:
    assert lines({"max_num_seqs": 100_000}) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"long_prefill_token_threshold": 0},
        {"long_prefill_token_threshold": 65},
        {"max_num_partial_prefills": 2, "max_model_len": 65 * 25},
        {"max_num_partial_prefills": 1, "max_model_len": 100},
        {"max_num_partial_prefills": None, "max_model_len": 100},
    ],
)
def test_pieces_of_prompts_that_hold_a_chunk_pass(settings: Mapping[str, Any]) -> None:
    assert lines(settings) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"long_prefill_token_threshold": 64},
        {"long_prefill_token_threshold": 64, "max_num_partial_prefills": 2, "max_model_len": 10_000},
        {"max_num_partial_prefills": 2, "max_model_len": 65 * 25 - 1},
    ],
)
def test_pieces_of_prompts_that_hold_no_chunk_are_refused(settings: Mapping[str, Any]) -> None:
    assert lines(settings) == [
        "--long-prefill-token-threshold: prompts are cut into pieces smaller than the plan's chunks: got 64,"
        " expected 0, or at least 65; give --long-prefill-token-threshold 65,"
        " or leave it and --max-num-partial-prefills out"
    ]


@pytest.mark.parametrize("name", ["VLLM_USE_V2_MODEL_RUNNER", "VLLM_USE_RUST_FRONTEND"])
def test_what_the_environment_switches_on_is_refused(name: str) -> None:
    for value in ("", "0", " False "):
        assert lines({}, PLAN, {name: value}) == []
    (line,) = lines({}, PLAN, {name: "1"})
    assert line.startswith(f"{name}: ")
    assert line.endswith(f": got 1, expected 0; unset {name}")


# --- layers of a loaded model

PLAIN = {"softmax scale": 0.25, "logit soft cap": None, "sliding window": None, "ALiBi": False, "sinks": False}


@pytest.mark.parametrize(
    ("name", "value"),
    [("softmax scale", 0.2501), ("logit soft cap", 30.0), ("sliding window", 512), ("ALiBi", True), ("sinks", True)],
)
def test_a_layer_that_attends_otherwise_is_refused(name: str, value: Any) -> None:
    plan = replace(PLAN, model=replace(PLAN.model, attention=AttentionForm(0.25)))
    check_attention_form(PLAIN | {"softmax scale": 0.25 * (1 + 1e-7)}, plan, layer="model.layers.3")
    with pytest.raises(MismatchError, match=f"model.layers.3: the model attends otherwise than the plan: {name}"):
        check_attention_form(PLAIN | {name: value}, plan, layer="model.layers.3")


def test_a_soft_cap_that_the_model_lost_is_seen() -> None:
    plan = replace(PLAN, model=replace(PLAN.model, attention=AttentionForm(0.25, logit_softcap=30.0)))
    check_attention_form(PLAIN | {"logit soft cap": 30.0}, plan, layer="0")
    with pytest.raises(MismatchError, match=r"logit soft cap: got None, expected 30\.0"):
        check_attention_form(PLAIN, plan, layer="0")


# --- plans and models


def test_a_plan_of_full_attention_that_has_what_its_scorer_needs_is_served(tmp_path: Path) -> None:
    assert plan_refusals(PLAN, tmp_path) == []


def test_a_plan_whose_scorer_cannot_serve_is_refused(tmp_path: Path) -> None:
    (error,) = plan_refusals(replace(PLAN, scorer="kvzip"), tmp_path)
    assert (error.where, error.got) == ("plan: scorer", "kvzip")
    assert "recent" in error.expected


def test_a_plan_of_a_model_with_other_layers_is_refused(tmp_path: Path) -> None:
    (error,) = plan_refusals(replace(hand_plan(), scorer="recent"), tmp_path)
    assert str(error) == (
        "plan: hand has layers that are not served from a plan: got shared, sliding layers,"
        " expected full attention in every layer; serve this model with stock vLLM"
    )


def test_another_model_is_refused_by_what_differs() -> None:
    plan = replace(PLAN, model=replace(PLAN.model, identity=(("hidden_size", "768"), ("vocab_size", "100"))))
    facts = {
        "number of layers": 3,
        "number of KV heads": 4,
        "head_dim": 64,
        "hidden_size": 768,
        "vocab_size": 100,
    }
    assert planned_facts(plan).keys() == facts.keys()
    assert model_refusals(facts, plan) == []
    assert model_refusals({}, plan) == []
    for name, value in facts.items():
        (error,) = model_refusals({**facts, name: value + 1}, plan)
        assert str(error) == (
            f"--model: plan is for a model with another {name}: got {value + 1}, expected {value};"
            " give the plan's model, or build a plan for this one"
        )


# --- a configured engine

ASK = """
import json, sys
from tangram_plan.runtime.vllm_plugin.compat import engine_config, model_facts, parse_serve_options, settings_of
config = engine_config(parse_serve_options(sys.argv[1:])[0])
print(json.dumps({"settings": settings_of(config), "facts": model_facts(config)}, default=str))
"""


@pytest.mark.slow
def test_an_engine_says_what_it_does_under_the_names_of_the_rules(engines: Engines, plan: Plan) -> None:
    command = [sys.executable, "-c", ASK, str(engines.model), "--dtype", "bfloat16", "--block-size", "32"]
    environment = os.environ | ENVIRONMENT
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    unsaid = {rule.argument for rule in RULES} - set(found["settings"])
    assert unsaid <= {
        "attention_config",
        "calculate_kv_scales",
    }  # one says `attention_backend`, too, the other is 0.26's
    assert {"max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold", "max_model_len"} <= set(
        found["settings"]
    )
    assert found["facts"] == planned_facts(plan) | {
        name: int(planned_facts(plan)[name]) for name in ("hidden_size", "vocab_size")
    }
    refused = {error.where for error in refusals(found["settings"], plan, {})}
    assert refused == {"--dtype", "--block-size", "--enable-prefix-caching"}
