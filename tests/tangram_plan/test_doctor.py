import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tangram_plan import doctor
from tangram_plan.ir import load_artefact, plan_hash
from tangram_plan.runtime.vllm_plugin import installed
from tests.command_line import Answer, CommandLine
from tests.engine_runs import ENVIRONMENT, ROOT
from tests.small_plans import LLAMA

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def built(cli: CommandLine, model_yaml: Path, scorer: str = "recent") -> Path:
    answer = cli("build", model_yaml, "-q", "--set", f"scorer={scorer}", "--set", "compress_chunk_tokens=64")
    assert answer.code == 0, answer.err
    return model_yaml.parent / "plan"


def checks(answer: Answer) -> list[dict[str, str]]:
    found = json.loads(answer.out)
    assert found["ok"] == (answer.code == 0) == all(check["verdict"] != "refused" for check in found["checks"])
    return list(found["checks"])


def named(answer: Answer, name: str) -> list[tuple[str, str, str]]:
    """(verdict, found, fix) of the checks with a name."""
    return [(check["verdict"], check["found"], check["fix"]) for check in checks(answer) if check["check"] == name]


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda _: None)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


# --- on a machine without vLLM


@pytest.mark.usefixtures("without_vllm")
def test_without_vllm_all_that_can_be_looked_at_is(cli: CommandLine, model_yaml: Path) -> None:
    artefact = built(cli, model_yaml)
    answer = cli("doctor", artefact, "--model", artefact.parent, "--json")
    assert (answer.code, answer.err) == (1, "")
    assert named(answer, "vllm") == [("refused", "vLLM is not installed", installed.INSTALL)]
    plan = load_artefact(artefact)
    assert named(answer, "plan") == [("ok", f"{plan_hash(plan)[:16]} for llama, target 0.3", "")]
    assert named(answer, "model") == [("ok", str(artefact.parent), "")]
    assert {check["check"] for check in checks(answer)} == {
        "python", "torch", "triton", "vllm", "plugin", "plan", "model"
    }  # fmt: skip


@pytest.mark.usefixtures("without_vllm")
def test_a_person_gets_the_same_as_a_table(cli: CommandLine, model_yaml: Path) -> None:
    artefact = built(cli, model_yaml)
    answer = cli("doctor", artefact)
    assert answer.code == 1
    (row,) = (line for line in answer.out.splitlines() if line.startswith("| vllm "))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "vllm",
        "refused",
        "vLLM is not installed",
        installed.INSTALL,
    ]


@pytest.mark.usefixtures("without_vllm")
def test_a_plan_that_cannot_be_read_is_refused(cli: CommandLine, tmp_path: Path) -> None:
    ((verdict, found, _),) = named(cli("doctor", tmp_path, "--json"), "plan")
    assert verdict == "refused"
    assert "manifest.json" in found


@pytest.mark.usefixtures("without_vllm")
def test_a_plan_whose_scorer_cannot_serve_is_refused_with_what_to_do(cli: CommandLine, model_yaml: Path) -> None:
    artefact = built(cli, model_yaml, scorer="kvzip")
    ((verdict, found, fix),) = named(cli("doctor", artefact, "--json"), "plan")
    assert (verdict, found.split(",")[0]) == ("refused", "plan: scorer: this scorer does not serve: got kvzip")
    assert "scorer" in fix


@pytest.mark.usefixtures("without_vllm")
def test_another_model_is_refused(cli: CommandLine, model_yaml: Path, tmp_path: Path) -> None:
    artefact = built(cli, model_yaml)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 101}))
    ((verdict, found, fix),) = named(cli("doctor", artefact, "--model", tmp_path, "--json"), "model")
    assert verdict == "refused"
    assert found.startswith("--model: plan is for another model: got llama ")
    assert fix == "give the plan's model, or build a plan for this one"


@pytest.mark.usefixtures("without_vllm")
@pytest.mark.parametrize(
    ("allowed", "verdict"),
    [("tangram_plan", "ok"), ("other, tangram_plan", "ok"), ("", "refused"), ("other", "refused")],
)
def test_a_plugin_that_is_kept_out_is_refused(
    cli: CommandLine, model_yaml: Path, monkeypatch: pytest.MonkeyPatch, allowed: str, verdict: str
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    ((found, what, fix),) = named(cli("doctor", built(cli, model_yaml), "--json"), "plugin")
    assert found == verdict
    if verdict == "refused":
        assert (what, fix) == (f"VLLM_PLUGINS={allowed} keeps it out", "add tangram_plan to VLLM_PLUGINS")


@pytest.mark.usefixtures("without_vllm")
def test_a_plugin_that_is_not_installed_is_refused(
    cli: CommandLine, model_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "entry_points", lambda **_: [SimpleNamespace(value="other:register")])
    ((verdict, _, fix),) = named(cli("doctor", built(cli, model_yaml), "--json"), "plugin")
    assert (verdict, fix) == ("refused", "install tangram-plan with pip, into the environment of vLLM")


# --- with vLLM


def examined(artefact: Path, *options: object) -> Answer:
    command = [sys.executable, "-m", "tangram_plan", "doctor", str(artefact), "--json", *map(str, options)]
    environment: dict[str, Any] = os.environ | ENVIRONMENT
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return Answer(ran.returncode, ran.stdout, ran.stderr)


@needs_vllm
@pytest.mark.slow
def test_nothing_is_refused_where_a_plan_can_be_served(cli: CommandLine, model_yaml: Path) -> None:
    artefact = built(cli, model_yaml)
    answer = examined(artefact, "--model", artefact.parent, "--skip-tokenizer-init")
    assert answer.code == 0, answer.out
    assert [check["check"] for check in checks(answer)] == [
        "python",
        "torch",
        "triton",
        "vllm",
        "tested versions",
        "device",
        "plugin",
        "plan",
        "model",
        "options",
    ]
    assert named(answer, "options") == [("ok", "nothing that is asked for is refused", "")]


@needs_vllm
@pytest.mark.slow
def test_every_option_that_would_be_refused_is_named_with_its_fix(cli: CommandLine, model_yaml: Path) -> None:
    artefact = built(cli, model_yaml)
    options = ("--block-size", "32", "--dtype", "half", "--max-num-seqs", "10", "--max-num-batched-tokens", "73")
    found = named(examined(artefact, "--model", artefact.parent, *options), "options")
    assert {verdict for verdict, _, _ in found} == {"refused"}
    assert [fix for _, _, fix in found] == [
        "give --dtype bfloat16, or build the plan with another kv_dtype",
        "leave --block-size out",
        "give --max-num-batched-tokens 74, or lower --max-num-seqs",
    ]


@pytest.mark.parametrize(
    ("planned", "gpu", "verdicts"),
    [
        ("h200", "NVIDIA H200", ["ok"]),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB", ["ok"]),
        ("NVIDIA L40S", "NVIDIA L40S", ["ok"]),
        ("h200", "NVIDIA A100-SXM4-80GB", ["warning"]),
        ("a100-80gb", "NVIDIA H100 80GB HBM3", ["warning"]),
        ("h200", "", []),
    ],
)
def test_a_plan_that_is_tuned_for_another_gpu_is_a_warning(planned: str, gpu: str, verdicts: list[str]) -> None:
    assert [finding.verdict.value for finding in doctor.tuning(planned, gpu)] == verdicts
