import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tangram_plan import serve
from tangram_plan.ir import HEAD_ORDER_KEY, Plan, TangramError, load_artefact
from tangram_plan.runtime.vllm_plugin import __main__ as server
from tangram_plan.runtime.vllm_plugin import installed
from tangram_plan.serve import Service, model_errors, start
from tests.command_line import CommandLine, assert_refused
from tests.engine_runs import ENVIRONMENT, ROOT
from tests.small_plans import LLAMA, hand_plan

PLUGIN = "tangram_plan.runtime.vllm_plugin"
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture
def artefact(cli: CommandLine, model_yaml: Path) -> Path:
    """A plan that serves; beside it lies the `config.json` of its model."""
    answer = cli("build", model_yaml, "-q", "--set", "scorer=recent", "--set", "max_new_tokens=128")
    assert answer.code == 0, answer.err
    return model_yaml.parent / "plan"


@pytest.fixture
def plan(artefact: Path) -> Plan:
    return load_artefact(artefact)


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


# --- before vLLM is asked


def test_without_vllm_one_line_says_how_to_install_it(
    cli: CommandLine, artefact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda _: None)
    answer = cli("serve", artefact, "--model", artefact.parent)
    assert_refused(answer, "vLLM is not installed; pip install 'tangram-plan[gpu]'")


@needs_vllm
def test_a_vllm_that_lacks_what_the_plugin_needs_is_refused(
    cli: CommandLine, artefact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "import_module", raising(ImportError("cannot import name 'Scheduler'")))
    answer = cli("serve", artefact, "--model", artefact.parent)
    assert_refused(answer, "vllm: this vLLM cannot serve from a plan: got cannot import name 'Scheduler'; pip install")


def test_another_model_is_refused_before_vllm_is_asked(
    cli: CommandLine, artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "check_vllm", raising(AssertionError("asked")))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"rope_theta": 5000.0}))
    answer = cli("serve", artefact, "--model", tmp_path)
    assert_refused(answer, "--model: plan is for another model: got llama ", "build a plan for this one")


def test_what_is_no_artefact_is_refused(cli: CommandLine, tmp_path: Path) -> None:
    assert_refused(cli("serve", tmp_path, "--model", tmp_path), "manifest.json")


def test_a_model_is_asked_for(cli: CommandLine, artefact: Path) -> None:
    assert_refused(cli("serve", artefact), "--model")


def test_the_plans_model_passes(plan: Plan, artefact: Path) -> None:
    assert model_errors(str(artefact.parent), plan) == []


def test_a_model_that_only_vllm_can_find_is_left_to_it(plan: Plan) -> None:
    assert model_errors("org/no-such-model", plan) == []


@pytest.mark.parametrize("model", ["/no/such/folder", "./no-such-folder", "no-such-folder", "~/no-such-folder"])
def test_a_folder_that_is_not_there_is_refused(plan: Plan, model: str) -> None:
    (error,) = model_errors(model, plan)
    assert "\n" not in str(error)


def test_a_checkpoint_in_another_head_order_is_refused(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {HEAD_ORDER_KEY: "0" * 64}))
    (error,) = model_errors(str(tmp_path), plan)
    assert "KV heads are in another order" in str(error)


def test_an_unreadable_config_is_refused(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    (error,) = model_errors(str(tmp_path), plan)
    assert "broken JSON" in str(error)


# --- the line, and what it starts


@pytest.mark.parametrize(
    ("distributions", "command"), [(["vllm"], ["vllm", "serve"]), ([], [sys.executable, "-m", PLUGIN])]
)
def test_the_line_is_one_that_a_shell_can_run(
    distributions: list[str], command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "distributions", lambda **_: iter(distributions))
    options = ("a model", "--additional-config", '{"a": 1}')
    assert shlex.split(Service(hand_plan(), options).line) == [*command, *options]


def test_the_server_takes_the_place_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append((path, arguments)))
    start(Service(hand_plan(), ("model", "--port", "8001")))
    assert started == [(sys.executable, [sys.executable, "-m", PLUGIN, "model", "--port", "8001"])]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            TangramError("vLLM refuses its options", where="vllm serve"),
            2,
            "error: vllm serve: vLLM refuses its options\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_the_server_ends_as_the_command_line_does(
    error: Exception, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, f"{PLUGIN}.compat", SimpleNamespace(run_server=raising(error)))
    with pytest.raises(SystemExit) as ending:
        server.main()
    assert (ending.value.code, capsys.readouterr().err) == (code, said)


def test_vllm_is_quiet_only_while_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stdout")
    with installed.quiet_vllm():
        assert (os.environ["VLLM_LOGGING_LEVEL"], os.environ["VLLM_LOGGING_STREAM"]) == ("ERROR", "ext://sys.stdout")
    assert "VLLM_LOGGING_LEVEL" not in os.environ


# --- what vLLM makes of it

DIFFERENCES = """
import json, sys
from tangram_plan.runtime.vllm_plugin.compat import parse_serve_options
given, started = (vars(parse_serve_options(options)[0]) for options in json.loads(sys.argv[1]))
print(json.dumps({name: value for name, value in started.items() if value != given[name]}, default=str))
"""


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def printed(artefact: Path, *options: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ("-m", "tangram_plan", "serve", artefact, "--model", artefact.parent, "--print")
    return run(*command, *options, **environment)


@needs_vllm
@pytest.mark.slow
def test_options_of_vllm_are_passed_on_unchanged_and_those_of_the_plan_added(artefact: Path) -> None:
    config = artefact.parent / "server.yaml"
    config.write_text("max-num-seqs: 5\nmax-num-batched-tokens: 9000\n")
    options = [
        *("--config", str(config), "--port", "8001", "--max-model-len", "4k", "--served-model-name", "one", "two"),
        *("--additional-config", '{"text": "1", "nested": {"a": [1, "2"], "b": null}}'),
        *("--override-generation-config", '{"temperature": 0.5}', "--logits-processors", "my.own:Processor"),
        *("--middleware", "starlette.middleware.gzip.GZipMiddleware", "--skip-tokenizer-init", "--enforce-eager"),
    ]
    answer = printed(artefact, *options)
    assert answer.returncode == 0, answer.stderr
    (line,) = answer.stdout.splitlines()
    _, _, line_options = line.partition(str(artefact.parent))
    words = shlex.split(line_options)
    assert words[: len(options)] == options
    model = str(artefact.parent)
    differences = run("-c", DIFFERENCES, json.dumps([[model, *options], [model, *words]]))
    assert differences.returncode == 0, differences.stderr
    assert json.loads(differences.stdout.splitlines()[-1]) == {
        "scheduler_cls": f"{PLUGIN}.scheduler.make_scheduler",
        "worker_cls": f"{PLUGIN}.worker.CompressedWorker",
        "enable_prefix_caching": False,
        "dtype": "bfloat16",
        "additional_config": {"text": "1", "nested": {"a": [1, "2"], "b": None}, "tangram_plan": str(artefact)},
        "override_generation_config": {"temperature": 0.5, "max_new_tokens": 128},
        "logits_processors": ["my.own:Processor", f"{PLUGIN}.admission:AtMost128Tokens"],
        "middleware": ["starlette.middleware.gzip.GZipMiddleware", f"{PLUGIN}.admission.AnswerLimit"],
    }


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--no-such-option",), ("unrecognized arguments: --no-such-option", "see `vllm serve --help=all`")),
        (("--tensor-parallel-size", "2"), ("--tensor-parallel-size: ", "give --tensor-parallel-size 1")),
        (
            ("--max-num-batched-tokens", "8192"),
            ("--max-num-batched-tokens: ", "compress_chunk_tokens 8192 + max_num_seqs"),
        ),
        (("--max-model-len", "10m"), ("vLLM refuses its options", "max_position_embeddings=131072")),
        (("--middleware", "json.no_such"), ("vLLM refuses its options", "no_such")),
    ],
)
def test_what_would_be_refused_is_one_line_before_an_engine_starts(
    artefact: Path, options: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    answer = printed(artefact, *options, "--skip-tokenizer-init")
    assert (answer.returncode, answer.stdout) == (2, "")
    (line,) = (line for line in answer.stderr.splitlines() if line.startswith("error: "))
    assert "Traceback" not in answer.stderr
    for part in parts:
        assert part in line


@needs_vllm
@pytest.mark.slow
def test_a_package_that_the_server_lacks_is_named(artefact: Path, tmp_path: Path) -> None:
    name = "prometheus_fastapi_instrumentator"
    (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')\n")
    answer = printed(artefact, PYTHONPATH=str(tmp_path))
    assert (answer.returncode, answer.stdout) == (2, "")
    (line,) = (line for line in answer.stderr.splitlines() if line.startswith("error: "))
    assert line == (
        f"error: vllm: vLLM's server cannot be put together: got No module named '{name}',"
        f" expected every package that it imports; install what has `{name}`, or all that vLLM needs: {installed.INSTALL}"
    )
