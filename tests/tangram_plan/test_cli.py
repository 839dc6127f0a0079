import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from tangram_plan import cli as command_line
from tangram_plan.ir import KVHead, load_artefact
from tangram_plan.model_config import model_shape_from_config
from tangram_plan.pipeline import Stage
from tangram_plan.profiles import Level, Profile, load_profile, save_profile
from tests.command_line import CommandLine, assert_refused
from tests.small_plans import LLAMA, small_profile, write_inputs

SHAPE = model_shape_from_config(LLAMA, "config.json")
CP_SAT = ("--set", "grouping.solver=cp_sat", "--set", "partition.solver=cp_sat")


def built(cli: CommandLine, model_yaml: Path, *options: object) -> Path:
    answer = cli("build", model_yaml, "-q", "-o", model_yaml.parent / "plan", *options)
    assert answer.code == 0, answer.err
    return model_yaml.parent / "plan"


def artefact_bytes(folder: Path) -> dict[str, bytes]:
    """Every file but the reports."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent != folder / "reports"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def in_a_process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tangram_plan", *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# --- data on stdout, logs on stderr


def test_build_logs_every_stage_on_stderr_and_shows_the_plan_on_stdout(cli: CommandLine, model_yaml: Path) -> None:
    answer = cli("build", model_yaml)
    assert answer.code == 0
    logged = [line.partition(":")[0] for line in answer.err.splitlines()]
    assert logged == list(Stage)
    assert f"artefact {model_yaml.parent / 'plan'}; next: tangram-plan verify" in answer.out
    plan = load_artefact(model_yaml.parent / "plan")  # beside the configuration, unless told otherwise
    assert len(plan.grouping.groups) <= 6
    assert "Memory of one request" in answer.out
    assert "Memory of one request" not in answer.err


def test_quiet_says_nothing_on_stderr(cli: CommandLine, model_yaml: Path) -> None:
    answer = cli("build", model_yaml, "--quiet")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out


def test_build_and_show_print_the_same_json(cli: CommandLine, model_yaml: Path) -> None:
    answer = cli("build", model_yaml, "--json")
    assert answer.code == 0
    shown = cli("show", model_yaml.parent / "plan", "--json")
    assert (shown.code, shown.err) == (0, "")
    assert json.loads(shown.out) == json.loads(answer.out)


def test_schema_is_a_json_schema_of_the_configuration(cli: CommandLine) -> None:
    answer = cli("schema")
    assert (answer.code, answer.err) == (0, "")
    schema = json.loads(answer.out)
    assert schema["required"] == ["model", "profile"]
    assert schema["additionalProperties"] is False


def test_an_unknown_command_or_option_is_wrong_input(cli: CommandLine, model_yaml: Path) -> None:
    for arguments in (("biuld",), ("build",), ("build", model_yaml, "--jsno"), ("show",)):
        answer = cli(*arguments)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err


# --- show


@pytest.fixture
def shown(cli: CommandLine, model_yaml: Path) -> tuple[dict[str, Any], Path]:
    plan = built(cli, model_yaml, *CP_SAT)
    return json.loads(cli("show", plan, "--json").out), plan


def test_show_names_the_plan_and_its_pages(shown: tuple[dict[str, Any], Path]) -> None:
    data, plan = shown
    raw = json.loads((plan / "plan.json").read_text())
    assert data["plan_hash"] == hashlib.sha256((plan / "plan.json").read_bytes()).hexdigest()
    assert data["num_groups"] == len(raw["groups"]) == len(data["groups"])
    assert data["page_slots"] == raw["page"]["page_slots"]
    assert data["page_bytes"] == data["page_slots"] * (2 * 16 * 2 + 8)
    assert data["mean_rho"] == 0.3
    for group, raw_group in zip(data["groups"], raw["groups"], strict=True):
        members = raw_group["members_by_rank"][0]
        assert group["num_members"] == len(members)
        assert group["tokens_per_page"] == data["page_slots"] // (16 * len(members)) * 16
        assert group["layers"] == len({layer for layer, _ in members})


def test_show_counts_memory_as_the_plan_file_says(shown: tuple[dict[str, Any], Path]) -> None:
    data, plan = shown
    raw = json.loads((plan / "plan.json").read_text())
    protected = int(raw["budgets"]["sink_tokens"] + raw["budgets"]["window_tokens"])
    assert [use["context"] for use in data["memory"]] == [2048, 8192, 32768, 131072]
    for use in data["memory"]:

        def kept(rho: int, context: int = int(use["context"])) -> int:
            return ceil(protected + Fraction(rho, 65536) * (context - protected))

        pages = 0
        for group in raw["groups"]:
            tokens = raw["page"]["page_slots"] // (16 * len(group["members_by_rank"][0])) * 16
            pages += ceil(Fraction(kept(group["rho"]), tokens))
        assert use["pages"] == pages
        assert use["allocated_slots"] == use["pages"] * data["page_slots"]
        assert use["ideal_slots"] == sum(kept(rho) for layer in raw["budgets"]["rho"].values() for rho in layer)
        assert use["allocated_over_ideal"] == round(use["allocated_slots"] / use["ideal_slots"], 6)
        full_bytes = 16 * use["context"] * 2 * 16 * 2
        assert use["allocated_over_full"] == round(pages * data["page_bytes"] / full_bytes, 6)
        assert use["allocated_over_ideal"] >= 1
        assert use["allocated_over_full"] < 1


def test_show_reports_the_solver_and_its_bound(shown: tuple[dict[str, Any], Path]) -> None:
    solver = shown[0]["solver"]
    assert {"name", "status", "objective", "bound", "seconds"} <= solver.keys()
    assert (solver["name"], solver["status"]) == ("cp_sat", "optimal")
    assert solver["bound"] <= solver["objective"]
    assert solver["seconds"] >= 0


def test_show_says_for_every_batch_and_context_how_decode_runs(shown: tuple[dict[str, Any], Path]) -> None:
    partition = shown[0]["partition"]
    cases = [(case["batch"], case["context"]) for case in partition]
    assert cases == [(batch, context) for batch in (1, 4) for context in (2048, 8192, 32768, 131072)]
    for case in partition:
        times = {name: estimate["predicted_us"] for name, estimate in case["estimates"].items()}
        assert times.keys() == {"static_splits", "tile_queue"}
        assert case["predicted_us"] == times[case["schedule"]] == min(times.values()) > 0
        assert case["makespan_over_ideal"] >= 1


def test_show_needs_no_reports(cli: CommandLine, model_yaml: Path) -> None:
    plan = built(cli, model_yaml)
    (plan / "reports" / "build.json").write_text("[1")
    solver = json.loads(cli("show", plan, "--json").out)["solver"]
    assert (solver["name"], solver["status"], solver["bound"]) == ("graph", None, None)
    assert cli("show", plan).code == 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_show_counts_all_ranks(cli: CommandLine, model_yaml: Path, ranks: int) -> None:
    plan = built(cli, model_yaml, "--set", f"tensor_parallel={ranks}", "--set", "grouping.reorder_heads=true")
    data = json.loads(cli("show", plan, "--json").out)
    assert data["tensor_parallel"] == ranks
    assert sum(group["num_members"] for group in data["groups"]) * ranks == 16
    for use in data["memory"]:
        assert use["pages"] == use["pages_per_rank"] * ranks
        assert use["allocated_slots"] == use["pages"] * data["page_slots"]
    manifest = json.loads((plan / "manifest.json").read_text())
    assert manifest["head_order"] == data["head_order"]


# --- the same input, the same bytes


def test_ten_builds_give_the_same_bytes(cli: CommandLine, model_yaml: Path, tmp_path: Path) -> None:
    plan = built(cli, model_yaml, *CP_SAT)
    first = artefact_bytes(plan)
    assert {"plan.json", "manifest.json", "allocator.json"} < first.keys()
    for _ in range(6):
        assert artefact_bytes(built(cli, model_yaml, *CP_SAT)) == first
    elsewhere = write_inputs(tmp_path / "somewhere else")
    assert artefact_bytes(built(cli, elsewhere, *CP_SAT)) == first
    for seed in ("1", "2"):
        answer = in_a_process("build", model_yaml, "-q", "-o", tmp_path / seed, *CP_SAT, PYTHONHASHSEED=seed)
        assert (answer.returncode, answer.stderr) == (0, "")
        assert artefact_bytes(tmp_path / seed) == first


def test_the_locale_changes_no_byte(cli: CommandLine, model_yaml: Path, tmp_path: Path) -> None:
    save_profile(small_profile(SHAPE, model="modèle 模型"), model_yaml.parent / "tiny.npz")
    model_yaml.write_text(model_yaml.read_text() + "scorer: clé\n", encoding="utf-8")
    first = artefact_bytes(built(cli, model_yaml))
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "utf-8"}
    answer = in_a_process("build", model_yaml, "-q", "-o", tmp_path / "ascii", **ascii_only)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert artefact_bytes(tmp_path / "ascii") == first


def test_a_changed_input_changes_the_hash(cli: CommandLine, model_yaml: Path) -> None:
    hashes = set()
    for override in (
        "scorer=key_anchor",
        "scorer=snapkv",
        "retention.ratio=0.31",
        "max_new_tokens=1",
        "kv_dtype=float16",
    ):
        answer = cli("build", model_yaml, "--dry-run", "--json", "-q", "--set", override)
        hashes.add(json.loads(answer.out)["plan_hash"])
    assert len(hashes) == 5


# --- options of build


def test_set_overrides_a_key(cli: CommandLine, model_yaml: Path) -> None:
    for count in (4, 16):
        answer = cli("build", model_yaml, "--dry-run", "--json", "--set", f"grouping.max_groups={count}")
        assert json.loads(answer.out)["num_groups"] <= count
        assert count == 4 or json.loads(answer.out)["num_groups"] > 6


def test_dry_run_writes_nothing(cli: CommandLine, model_yaml: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    answer = cli("build", model_yaml, "--dry-run", "--json", "-o", tmp_path / "out")
    assert answer.code == 0
    assert len(json.loads(answer.out)["plan_hash"]) == 64
    assert "artefact:" not in answer.err
    assert tree(tmp_path) == before


@pytest.mark.parametrize("stage", [stage for stage in Stage if stage is not Stage.PLAN])
def test_stop_after_prints_the_product_and_writes_nothing(
    cli: CommandLine, model_yaml: Path, tmp_path: Path, stage: Stage
) -> None:
    before = tree(tmp_path)
    answer = cli("build", model_yaml, "--stop-after", stage)
    assert answer.code == 0
    assert list(json.loads(answer.out)) == [stage]
    stages = list(Stage)
    assert [line.partition(":")[0] for line in answer.err.splitlines()] == stages[: stages.index(stage) + 1]
    assert tree(tmp_path) == before


def test_stop_after_the_plan_is_a_dry_run(cli: CommandLine, model_yaml: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    answer = cli("build", model_yaml, "--stop-after", "plan", "--json")
    assert "plan_hash" in json.loads(answer.out)
    assert tree(tmp_path) == before


def test_dump_writes_every_product(cli: CommandLine, model_yaml: Path, tmp_path: Path) -> None:
    answer = cli("build", model_yaml, "--dry-run", "-q", "--dump", tmp_path / "dump")
    assert (answer.code, answer.err) == (0, "")
    names = [path.name for path in sorted((tmp_path / "dump").iterdir())]
    assert names == [f"{number}-{stage}.json" for number, stage in enumerate(Stage)]
    products = {name: json.loads((tmp_path / "dump" / name).read_text()) for name in names}
    budgets = products["3-budgets.json"]["rho"]
    assert list(budgets) == [f"{layer}.{head}" for layer in range(4) for head in range(4)]
    assert sum(budgets.values()) == round(0.3 * 16 * 65536)
    stopped = json.loads(cli("build", model_yaml, "-q", "--stop-after", "budgets").out)
    assert stopped["budgets"] == products["3-budgets.json"]


def test_dump_up_to_a_stage(cli: CommandLine, model_yaml: Path, tmp_path: Path) -> None:
    cli("build", model_yaml, "-q", "--dump", tmp_path / "dump", "--stop-after", "profile")
    assert [path.name for path in sorted((tmp_path / "dump").iterdir())] == ["0-model.json", "1-profile.json"]


def test_a_ratio_of_one_keeps_everything_and_needs_no_measured_ratio(cli: CommandLine, model_yaml: Path) -> None:
    answer = cli("build", model_yaml, "--json", "-q", "--set", "retention.ratio=1.0")
    assert answer.code == 0, answer.err
    data = json.loads(answer.out)
    assert data["mean_rho"] == 1
    assert [use["ideal_slots"] for use in data["memory"]] == [16 * use["context"] for use in data["memory"]]
    assert all(use["allocated_over_full"] > 1 for use in data["memory"])  # positions and scores are counted


# --- wrong input: one line, exit code 2


def leave_as_it_is(_: Path) -> None:
    pass


def replace_file(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def remove_file(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def change_config(**changes: Any) -> Callable[[Path], object]:
    return replace_file("config.json", json.dumps(LLAMA | changes))


def change_profile(change: Callable[[Profile], object]) -> Callable[[Path], object]:
    """The profile's file with other contents, written past the checks of `save_profile`."""

    def changed(folder: Path) -> None:
        profile = load_profile(folder / "tiny.npz")
        change(profile)
        with np.load(folder / "tiny.npz") as arrays:
            header = arrays["header"]
        np.savez(folder / "tiny.npz", header=header, retained_model=profile.retained[Level.MODEL])

    return changed


def shuffle(profile: Profile) -> None:
    """Every sample ranks KV heads in another way."""
    generator = np.random.default_rng(3)
    for sample in profile.retained[Level.MODEL]:
        generator.permuted(sample, axis=1, out=sample)


def put_nan(profile: Profile) -> None:
    profile.retained[Level.MODEL][2, 1, 7] = np.nan


WRONG_INPUT: dict[str, tuple[Callable[[Path], object], tuple[str, ...], tuple[str, ...]]] = {
    "missing configuration": (remove_file("model.yaml"), (), ("model.yaml: configuration does not exist",)),
    "broken YAML": (replace_file("model.yaml", "model: [1\n"), (), ("model.yaml: configuration is not YAML",)),
    "unknown key": (
        replace_file("model.yaml", "model: config.json\nprofile: tiny.npz\nretention: {ration: 0.3}\n"),
        (),
        ("model.yaml: unknown key retention.ration; did you mean ratio?",),
    ),
    "missing model": (remove_file("config.json"), (), ("config.json",)),
    "broken config": (replace_file("config.json", '{"model_type": '), (), ("config.json",)),
    "config without layers": (change_config(num_hidden_layers=None), (), ("config.json",)),
    "missing profile": (remove_file("tiny.npz"), (), ("tiny.npz: profile does not exist", "calibrate")),
    "broken profile": (replace_file("tiny.npz", "garbage"), (), ("tiny.npz: not a profile file",)),
    "NaN in the profile": (
        change_profile(put_nan),
        (),
        ("tiny.npz, level model", "sample 2, layer 1, head 3 is not valid", "got nan", "0 to 1"),
    ),
    "profile of fewer layers": (
        change_config(num_hidden_layers=5),
        (),
        ("another shape than the model: layer 4, head 0", "got 16 KV heads in 4 layers", "expected 20 in 5"),
    ),
    "profile of more heads": (change_config(num_key_value_heads=2), (), ("layer 0, head 2 was measured",)),
    "profile of another model": (change_config(rope_theta=5e5), (), ("another model of the same shape", "--force")),
    "unstable profile": (change_profile(shuffle), (), ("do not keep their rank", "at least 0.5", "--force")),
    "ratio 0": (leave_as_it_is, ("--set", "retention.ratio=0"), ("retention.ratio", "got 0")),
    "ratio below 0": (leave_as_it_is, ("--set", "retention.ratio=-0.3"), ("retention.ratio", "got -0.3")),
    "ratio above 1": (leave_as_it_is, ("--set", "retention.ratio=1.01"), ("retention.ratio", "got 1.01")),
    "ratio NaN": (leave_as_it_is, ("--set", "retention.ratio=.nan"), ("retention.ratio", "got nan")),
    "ratio that was not measured": (
        leave_as_it_is,
        ("--set", "retention.ratio=0.1"),
        ("got 0.1, expected 0.25 to 0.5",),
    ),
    "level that was not measured": (leave_as_it_is, ("--set", "retention.level=layer"), ("got layer, expected model",)),
    "heads over 3 ranks": (
        leave_as_it_is,
        ("--set", "tensor_parallel=3"),
        ("do not divide", "got 4 KV heads over 3 ranks", "1 or 2 or 4"),
    ),
    "more ranks than heads": (leave_as_it_is, ("--set", "tensor_parallel=8"), ("got 4 KV heads over 8 ranks",)),
    "pages too small": (
        leave_as_it_is,
        ("--set", "grouping.page_slots=16"),
        ("16 KV heads a rank do not fit into 6 groups", "raise grouping.max_groups or grouping.page_slots"),
    ),
    "unknown device": (leave_as_it_is, ("--set", "partition.device=h300"), ("no such device: got h300", "h200")),
    "unknown stage": (leave_as_it_is, ("--stop-after", "group"), ("--stop-after", "got group", "did you mean groups?")),
    "broken override": (leave_as_it_is, ("--set", "ratio"), ("--set", "got ratio", "expected KEY=VALUE")),
    "dump into a file": (leave_as_it_is, ("--dump", "{folder}/config.json"), ("config.json", "cannot be dumped")),
    "output on a file": (leave_as_it_is, ("-o", "{folder}/config.json"), ("config.json: output is not a folder",)),
    "output below a file": (leave_as_it_is, ("-o", "{folder}/config.json/plan"), ("config.json", "cannot be written")),
    "output among files": (leave_as_it_is, ("-o", "{folder}"), ("not part of an artefact", "-o")),
}


@pytest.mark.parametrize("name", WRONG_INPUT)
def test_wrong_input_is_one_line_and_writes_nothing(cli: CommandLine, model_yaml: Path, name: str) -> None:
    damage, options, parts = WRONG_INPUT[name]
    folder = model_yaml.parent
    damage(folder)
    before = tree(folder)
    answer = cli("build", model_yaml, "-q", "--json", *(option.format(folder=folder) for option in options))
    assert_refused(answer, *parts)
    assert tree(folder) == before


@pytest.mark.parametrize("name", ["profile of another model", "unstable profile"])
def test_force_builds_what_is_only_doubtful(cli: CommandLine, model_yaml: Path, name: str) -> None:
    WRONG_INPUT[name][0](model_yaml.parent)
    assert cli("build", model_yaml, "-q", "--force").code == 0
    load_artefact(model_yaml.parent / "plan")


def test_force_does_not_excuse_a_profile_of_another_shape(cli: CommandLine, model_yaml: Path) -> None:
    WRONG_INPUT["profile of fewer layers"][0](model_yaml.parent)
    assert_refused(cli("build", model_yaml, "-q", "--force"), "another shape")


def test_the_installed_command_ends_without_a_traceback(model_yaml: Path) -> None:
    answer = in_a_process("build", model_yaml, "-q", "--set", "retention.ratio=30")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith(f"error: {model_yaml}: retention.ratio is not valid: got 30, expected ")
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["show", "verify"])
def test_what_is_no_artefact_is_wrong_input(cli: CommandLine, tmp_path: Path, command: str) -> None:
    answer = cli(command, tmp_path)
    assert answer.code == 2
    assert answer.out == ""
    assert f"error: {tmp_path}: not an artefact: expected a folder with manifest.json" in answer.err


def test_show_refuses_a_changed_artefact(cli: CommandLine, model_yaml: Path) -> None:
    plan = built(cli, model_yaml)
    (plan / "allocator.json").write_text("{}")
    assert_refused(cli("show", plan, "--json"), "allocator.json: file was changed after the build")


def test_verify_of_a_changed_artefact_is_a_failed_check(cli: CommandLine, model_yaml: Path) -> None:
    pytest.importorskip("torch", reason="verify needs torch")
    pytest.importorskip("triton", reason="verify needs triton")
    plan = built(cli, model_yaml)
    (plan / "allocator.json").write_text("{}")
    answer = cli("verify", plan, "--json", "-q")
    assert (answer.code, answer.err) == (1, "")
    data = json.loads(answer.out)
    assert (data["ok"], data["plan_hash"], data["kernels"]) == (False, None, [])
    assert [(check["name"], check["ok"]) for check in data["checks"]] == [("artefact", False)]
    assert "allocator.json: file was changed" in data["checks"][0]["detail"]


# --- a disk that is full, a build that is stopped, a fault of our own


def fail_with(fault: BaseException) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise fault

    return fail


def test_a_full_disk_is_one_line_and_leaves_the_old_artefact(
    cli: CommandLine, model_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = built(cli, model_yaml)
    before = artefact_bytes(plan)
    fault = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(plan / "x"))
    monkeypatch.setattr("tangram_plan.artefact.emit", fail_with(fault))
    answer = cli("build", model_yaml, "-q", "--set", "max_new_tokens=7")
    assert_refused(answer, "artefact cannot be written", "got No space left on device", "nothing was changed")
    assert artefact_bytes(plan) == before


def test_an_interrupted_build_has_its_own_exit_code(
    cli: CommandLine, model_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(model_yaml.parent)
    monkeypatch.setattr("tangram_plan.artefact.emit", fail_with(KeyboardInterrupt()))
    answer = cli("build", model_yaml, "-q")
    assert (answer.code, answer.out) == (130, "")
    assert "Traceback" not in answer.err
    assert tree(model_yaml.parent) == before


def test_a_fault_of_our_own_keeps_its_traceback(model_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tangram_plan.artefact.emit", fail_with(RuntimeError("ours")))
    monkeypatch.setattr(sys, "argv", ["tangram-plan", "build", str(model_yaml), "-q"])
    with pytest.raises(RuntimeError, match="ours"):
        command_line.main()


# --- profiles


def test_profile_show_has_every_level_and_ratio(cli: CommandLine, model_yaml: Path) -> None:
    answer = cli("profile", "show", model_yaml.parent / "tiny.npz", "--json")
    assert (answer.code, answer.err) == (0, "")
    data = json.loads(answer.out)
    profile = load_profile(model_yaml.parent / "tiny.npz")
    assert (data["model"], data["scorer"], data["profile_hash"]) == ("tiny", "kvzip", profile.hash)
    assert (data["layers"], data["num_kv_heads"], data["ratios"]) == ([0, 1, 2, 3], 16, [0.25, 0.5])
    assert data["samples"][3] == {"source": "text 3", "context": 3, "num_tokens": 103}
    assert list(data["levels"]) == ["model"]
    assert list(data["levels"]["model"]) == ["0.25", "0.5"]
    for index, values in enumerate(data["levels"]["model"].values()):
        retained = profile.retained[Level.MODEL][:, index].reshape(4, 4, 4)
        np.testing.assert_allclose(values["mean"], retained.mean(axis=0))
        np.testing.assert_allclose(values["std"], retained.std(axis=0))
        assert values["spread"] == pytest.approx(retained.std(axis=0).mean())
        ranks = values["rank_correlation"]
        assert len(ranks["per_sample"]) == 4
        assert ranks["min"] == min(ranks["per_sample"])
        assert ranks["median"] == pytest.approx(np.median(ranks["per_sample"]))
        assert values["verdict"] == "stable"
        assert values["overflow"]["held_out_pairs"] == 64
        assert 0 <= values["overflow"]["heads_that_overflow"] <= 16


def test_profile_show_draws_a_line_per_layer(cli: CommandLine, model_yaml: Path) -> None:
    answer = cli("profile", "show", model_yaml.parent / "tiny.npz", "--ratio", "0.5")
    assert answer.code == 0
    assert "Retained fraction at 0.5, level model" in answer.out
    drawn = [line for line in answer.out.splitlines() if line.count("|") == 2 and line.split("|")[0].strip().isdigit()]
    assert [int(line.split("|")[0]) for line in drawn] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("none.npz",), "profile does not exist"),
        (("builtin:none/none",), "no such built-in profile: got builtin:none/none"),
        (("{folder}/config.json",), "not a profile file"),
        (("{folder}/tiny.npz", "--ratio", "0.9"), "got 0.9, expected 0.25 to 0.5"),
        (("{folder}/tiny.npz", "--ratio", "nan"), "got nan, expected 0.25 to 0.5"),
        (("{folder}/tiny.npz", "--level", "layer"), "got layer, expected model"),
    ],
)
def test_profile_show_refuses_in_one_line(
    cli: CommandLine, model_yaml: Path, arguments: tuple[str, ...], part: str
) -> None:
    answer = cli("profile", "show", *(argument.format(folder=model_yaml.parent) for argument in arguments))
    assert_refused(answer, part)


def import_arguments(folder: Path) -> tuple[object, ...]:
    return ("profile", "import", folder / "arrays.npz", "--model", folder, "--scorer", "kvzip", "--name", "mine")


def test_an_imported_profile_shows_and_builds(cli: CommandLine, model_yaml: Path) -> None:
    folder = model_yaml.parent
    retained = small_profile(SHAPE, ratios=(0.3,), num_samples=6).retained[Level.MODEL].reshape(1, 6, 4, 4)
    np.savez(
        folder / "arrays.npz",
        raw_ratio=retained,
        static_layer_ids=np.arange(4),
        base_ratios=np.array([0.3], dtype=np.float32),
        sample_meta=np.array([[7], [7], [8], [9], [9], [1]]),
    )
    options = ("--key", "raw_ratio", "--layer-ids", "static_layer_ids", "--ratio-key", "base_ratios")
    answer = cli(*import_arguments(folder), *options, "--meta-key", "sample_meta", "-o", folder / "mine.npz")
    assert (answer.code, answer.out) == (0, "")
    assert "6 samples of 4 contexts, 16 KV heads" in answer.err
    profile = load_profile(folder / "mine.npz")
    assert (profile.model, profile.ratios) == ("mine", (0.3,))
    assert profile.kv_heads[6] == KVHead(1, 2)
    assert np.array_equal(profile.retained[Level.MODEL].reshape(6, 4, 4), retained[0])
    assert cli("build", model_yaml, "-q", "--set", "profile=mine").code == 0
    assert load_artefact(folder / "plan").provenance.profile_hash == profile.hash


def test_import_says_which_ratio_it_takes_when_none_is_named(cli: CommandLine, model_yaml: Path) -> None:
    folder = model_yaml.parent
    np.savez(folder / "arrays.npz", retained=np.full((2, 4, 4), 0.5))
    answer = cli(*import_arguments(folder), "-o", folder / "mine.npz")
    assert answer.code == 0
    assert "the requested ratio is taken to be 0.3" in answer.err
    quiet = cli(*import_arguments(folder), "-o", folder / "mine.npz", "-q")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")
    assert load_profile(folder / "mine.npz").ratios == (0.3,)


@pytest.mark.parametrize(
    ("retained", "options", "part"),
    [
        (np.full((2, 3, 4), 0.5), (), "got 3 rows, expected 4 layers"),
        (np.full((2, 4, 2), 0.5), (), "KV heads of layer 0 do not match the model"),
        (np.full((2, 4, 4), np.nan), (), "sample 0, layer 0, head 0"),
        (np.full((2, 4, 4), 0.5), ("--key", "other"), "got other, expected one of retained"),
        (np.full((2, 4, 4), 0.5), ("--ratio", "0"), "requested ratios are not valid: got [0.0]"),
        (np.full((2, 4, 4), 0.5), ("--ratio", "nan"), "requested ratios are not valid: got [nan]"),
        (np.full((2, 4, 4), 0.5), ("--ratio", "1.2"), "requested ratios are not valid: got [1.2]"),
    ],
    ids=range(7),
)
def test_import_refuses_in_one_line_and_writes_nothing(
    cli: CommandLine, model_yaml: Path, retained: Any, options: tuple[str, ...], part: str
) -> None:
    folder = model_yaml.parent
    np.savez(folder / "arrays.npz", retained=retained)
    assert_refused(cli(*import_arguments(folder), "-o", folder / "mine.npz", "-q", *options), part)
    assert not (folder / "mine.npz").exists()


# --- faults that are known


@pytest.mark.parametrize("content", [b"\xff", b'{"grouping": 3}', b'{"grouping": {}}'], ids=repr)
def test_show_does_without_a_report_that_is_damaged(cli: CommandLine, model_yaml: Path, content: bytes) -> None:
    plan = built(cli, model_yaml)
    (plan / "reports" / "build.json").write_bytes(content)
    assert json.loads(cli("show", plan, "--json").out)["solver"]["status"] is None
    assert cli("show", plan).code == 0


@pytest.mark.parametrize("name", ["org/[/x]", "[red]org", "a:warning:b"])
def test_names_are_printed_as_they_are(cli: CommandLine, model_yaml: Path, name: str) -> None:
    save_profile(small_profile(SHAPE, model=name), model_yaml.parent / "tiny.npz")
    answer = cli("build", model_yaml, "--dry-run")
    assert answer.code == 0
    assert f"from {name}/kvzip" in answer.out
    assert f"profile: {name} by kvzip" in answer.err


@pytest.mark.parametrize(
    "override", [f"partition.device={'x' * 300}", "partition.device=~no-such-user/d", "model=~no-such-user/m"]
)
def test_names_that_no_file_can_have_are_wrong_input(cli: CommandLine, model_yaml: Path, override: str) -> None:
    assert_refused(cli("build", model_yaml, "-q", "--set", override), override.partition("=")[2])


def test_an_interrupted_build_says_that_nothing_was_left(
    cli: CommandLine, model_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tangram_plan.artefact.emit", fail_with(KeyboardInterrupt()))
    assert cli("build", model_yaml, "-q").err == "interrupted; no half-written artefact or profile was left\n"


def test_a_reader_that_stops_reading_is_no_failed_check(cli: CommandLine, model_yaml: Path) -> None:
    plan = built(cli, model_yaml)
    with subprocess.Popen(
        [sys.executable, "-m", "tangram_plan", "show", plan, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=60)) == (b"", 0)


def test_usage_error_is_one_line() -> None:
    answer = in_a_process("show")
    assert answer.returncode == 2
    assert answer.stderr == "error: Missing argument 'OUT'.; see `tangram-plan show --help`\n"


def test_full_disk_on_stdout_is_one_line(cli: CommandLine, model_yaml: Path) -> None:
    plan = built(cli, model_yaml)
    with Path("/dev/full").open("w") as full:
        answer = subprocess.run(
            [sys.executable, "-m", "tangram_plan", "show", plan],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert answer.returncode == 2
    assert answer.stderr == "error: stdout: output cannot be written: got No space left on device\n"


def test_tables_are_whole_and_without_blanks_at_line_ends(cli: CommandLine, model_yaml: Path) -> None:
    lines = cli("build", model_yaml, "--dry-run", "-q").out.splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert "…" not in "".join(lines)


def test_model_whose_heads_were_reordered_is_not_planned_from(cli: CommandLine, model_yaml: Path) -> None:
    path = model_yaml.parent / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tangram_head_order": "abc"}))
    assert_refused(
        cli("build", model_yaml, "-q"), "KV heads are in another order: got abc, expected the original order"
    )


def test_budgets_that_keep_everything_against_the_ratio_are_a_failed_check(cli: CommandLine, model_yaml: Path) -> None:
    answer = cli("build", model_yaml, "-q", "--set", "retention.rule=mean_std", "--set", "retention.alpha=1000")
    assert answer.code == 1
    assert "the plan is meant to evict tokens but saves no byte" in answer.err


def test_import_replaces_profiles_only(cli: CommandLine, model_yaml: Path) -> None:
    folder = model_yaml.parent
    np.savez(folder / "arrays.npz", retained=np.linspace(0.1, 0.9, 32).reshape(2, 4, 4))
    (folder / "notes.txt").write_text("precious")
    answer = cli(*import_arguments(folder), "-o", folder / "notes.txt", "-q")
    assert_refused(answer, "a file that is no profile would be replaced")
    assert (folder / "notes.txt").read_text() == "precious"
