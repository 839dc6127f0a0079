import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tangram_plan.artefact import write_artefact
from tangram_plan.ir import HEAD_ORDER_KEY, KVDtype, Plan, TangramError
from tangram_plan.runtime import engine_args
from tangram_plan.runtime.engine_args import refused_arguments, server_args, server_options
from tests.plans import valid_plan

PLUGIN = "tangram_plan.runtime.vllm_plugin"
SCHEDULER, WORKER = f"{PLUGIN}.scheduler.make_scheduler", f"{PLUGIN}.worker.CompressedWorker"
LIMIT = f"{PLUGIN}.admission:AtMost128Tokens"


def plan(**changes: Any) -> Plan:
    return replace(valid_plan(**{"max_new_tokens": 128, "compress_chunk_tokens": 64} | changes), scorer="recent")


@pytest.fixture
def artefact(tmp_path: Path) -> Path:
    write_artefact(plan(), {"build": {}}, tmp_path / "plan")
    return tmp_path / "plan"


def lines(arguments: Mapping[str, Any], given: Plan | None = None) -> list[str]:
    return [str(error) for error in refused_arguments(given or plan(), Path("plan"), arguments)]


def needed(given: Plan, **arguments: Any) -> dict[str, Any]:
    """What is added to arguments."""
    return server_args(given, Path("/plan"), arguments)


def test_neither_torch_nor_vllm_is_imported() -> None:
    code = "import sys, tangram_plan.runtime; print(sorted({'torch', 'vllm', 'triton', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_arguments_stay_and_what_the_plan_needs_is_added(artefact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(artefact.parent)
    assert engine_args("plan", model="org/model", max_model_len=2048, seed=1) == {
        "model": "org/model",
        "max_model_len": 2048,
        "seed": 1,
        "scheduler_cls": SCHEDULER,
        "worker_cls": WORKER,
        "enable_prefix_caching": False,
        "additional_config": {"tangram_plan": str(artefact)},
        "logits_processors": [LIMIT],
        "dtype": "float32",
    }


def test_what_the_user_gives_under_the_same_name_stays(artefact: Path) -> None:
    found = engine_args(artefact, additional_config={"mine": 1}, logits_processors=["mine:Processor"], dtype="float32")
    assert found["additional_config"] == {"mine": 1, "tangram_plan": str(artefact)}
    assert found["logits_processors"] == ["mine:Processor", LIMIT]
    assert found["dtype"] == "float32"


def test_what_cannot_be_is_refused_before_vllm_is_asked(artefact: Path) -> None:
    with pytest.raises(TangramError) as error:
        engine_args(artefact, model="org/model", enable_prefix_caching=True)
    assert str(error.value).startswith("--enable-prefix-caching: ")


def test_no_artefact_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(TangramError):
        engine_args(tmp_path, model="org/model")


def test_a_plan_whose_scorer_cannot_serve_is_refused() -> None:
    (line,) = lines({}, replace(plan(), scorer="kvzip"))
    assert line.startswith("plan: scorer: ")


def test_type_and_ranks_are_the_plans_unless_they_are_given() -> None:
    two_ranks = plan(tensor_parallel=2, dtype=KVDtype.BFLOAT16)
    found = needed(two_ranks, dtype="auto")
    assert (found["dtype"], found["tensor_parallel_size"]) == ("bfloat16", 2)
    assert {"dtype", "tensor_parallel_size"}.isdisjoint(needed(two_ranks, dtype="bfloat16", tensor_parallel_size=2))
    assert "tensor_parallel_size" not in needed(plan())
    (line,) = lines({"tensor_parallel_size": 1}, two_ranks)
    assert line.startswith("--tensor-parallel-size: ")


@pytest.mark.parametrize(
    ("chunk", "max_num_seqs", "budget"),
    [
        (64, None, None),  # vLLM's own is never below 2,048
        (1024, None, None),
        (1025, None, 8192),  # for 1,024 requests 2,049 are needed
        (2000, 48, None),
        (2000, 49, 8192),
        (8192, 16, 8208),
        (8192, None, 9216),
    ],
)
def test_a_step_has_room_for_a_chunk(chunk: int, max_num_seqs: int | None, budget: int | None) -> None:
    found = needed(plan(compress_chunk_tokens=chunk), max_num_seqs=max_num_seqs)
    assert found.get("max_num_batched_tokens") == budget


def test_a_token_budget_that_is_given_stays_or_is_refused() -> None:
    assert "max_num_batched_tokens" not in needed(plan(compress_chunk_tokens=8192), max_num_batched_tokens=10_000)
    assert lines({"max_num_batched_tokens": 64 + 8, "max_num_seqs": 8}) == []
    (line,) = lines({"max_num_batched_tokens": 64 + 7, "max_num_seqs": 8})
    assert line.startswith("--max-num-batched-tokens: ")


@pytest.mark.parametrize(("name", "ours"), [("scheduler_cls", SCHEDULER), ("worker_cls", WORKER)])
def test_the_plan_brings_its_own_classes(name: str, ours: str) -> None:
    for value in (None, "auto", ours):
        assert lines({name: value}) == []
    option = "--" + name.replace("_", "-")
    assert lines({name: "mine.Class"}) == [f"{option}: the plan brings its own: got mine.Class; leave {option} out"]


# --- a server's


def test_a_server_limits_answers_that_state_no_length() -> None:
    found = needed(plan(), override_generation_config={"temperature": 0.5})
    assert found["override_generation_config"] == {"temperature": 0.5, "max_new_tokens": 128}
    assert found["middleware"] == f"{PLUGIN}.admission.AnswerLimit"


def test_a_users_limit_stays_if_the_plan_admits_it() -> None:
    shorter = {"override_generation_config": {"max_new_tokens": 100}}
    assert needed(plan(), **shorter)["override_generation_config"] == {"max_new_tokens": 100}
    assert lines(shorter) == []
    assert lines({"override_generation_config": {"max_new_tokens": 128}}) == []
    assert lines({"override_generation_config": {"max_new_tokens": 129}}) == [
        "--override-generation-config: max_new_tokens: answers are longer than the plan admits: got 129,"
        " expected at most 128; lower it, or build the plan with a larger max_new_tokens"
    ]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({}, []),
        ({"dtype": "float32", "max_num_seqs": 8}, ["--dtype", "float32", "--max-num-seqs", "8"]),
        ({"enforce_eager": True, "enable_prefix_caching": False}, ["--enforce-eager", "--no-enable-prefix-caching"]),
        ({"logits_processors": ["a:B", "c:D"]}, ["--logits-processors", "a:B", "c:D"]),
        ({"additional_config": {"tangram_plan": "/a b/c"}}, ["--additional-config.tangram_plan=/a b/c"]),
        (
            {"additional_config": {"one": 1, "text": "1", "no": None, "list": [1, "x"]}},
            [
                "--additional-config.one=1",
                '--additional-config.text="1"',
                "--additional-config.no=null",
                '--additional-config.list=[1, "x"]',
            ],
        ),
    ],
)
def test_arguments_are_options_of_the_command_line(arguments: dict[str, Any], options: list[str]) -> None:
    assert list(server_options(arguments)) == options


def test_a_key_that_no_option_can_name_is_refused() -> None:
    with pytest.raises(TangramError) as error:
        list(server_options({"additional_config": {"a.b": 1}}))
    assert str(error.value) == "--additional-config: a key with a dot cannot be passed on: got a.b; name it otherwise"


# --- a model that lies on this machine

CONFIG = {"num_hidden_layers": 3, "num_key_value_heads": 4, "head_dim": 64}


def model(folder: Path, config: Any) -> dict[str, str]:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return {"model": str(folder)}


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        {"text_config": CONFIG},
        {**CONFIG, "head_dim": None},
        {**CONFIG, "num_key_value_heads": [4, 4, 4]},
        {},
        "[]",
        "no JSON",
    ],
)
def test_the_plans_model_passes_and_what_is_not_understood_is_left_to_vllm(tmp_path: Path, config: Any) -> None:
    assert lines(model(tmp_path, config)) == []


@pytest.mark.parametrize("key", CONFIG)
def test_another_model_is_refused(tmp_path: Path, key: str) -> None:
    other = CONFIG | {key: CONFIG[key] + 1}
    for config in (other, {"text_config": other}):
        (line,) = lines(model(tmp_path, config))
        assert line.startswith("--model: plan is for a model with another ")
        assert f"got {CONFIG[key] + 1}, expected {CONFIG[key]}; " in line


def test_a_checkpoint_in_another_head_order_is_refused(tmp_path: Path) -> None:
    (line,) = lines(model(tmp_path, {**CONFIG, HEAD_ORDER_KEY: "0" * 64}))
    assert f"{HEAD_ORDER_KEY}: KV heads are in another order" in line


def test_a_hub_id_is_left_to_vllm() -> None:
    assert lines({"model": "org/no-such-model"}) == []
