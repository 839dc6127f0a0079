"""The examples, as a newcomer runs them, and what the README says of them."""

import json
import subprocess
import sys
from pathlib import Path

from tests.command_line import CommandLine

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def test_readme_shows_what_the_quickstart_prints(cli: CommandLine, tmp_path: Path) -> None:
    answer = cli("build", EXAMPLES / "quickstart" / "model.yaml", "-o", tmp_path / "plan")
    assert answer.code == 0
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    facts, rest = answer.out.split("Memory of one request")
    memory = rest.split("Decode attention")[0]
    shown = [line for line in (*facts.splitlines(), *memory.splitlines()) if line and not line.startswith("solver")]
    assert len(shown) > 10
    for line in shown:  # the hash among them: the plan is the same on every machine
        assert line in readme


def test_arrays_of_another_tool_become_a_plan_for_two_ranks(cli: CommandLine, tmp_path: Path) -> None:
    example = EXAMPLES / "qwen3-4b"
    subprocess.run([sys.executable, example / "make_arrays.py", tmp_path / "arrays.npz"], check=True)
    keys = (
        "--key",
        "raw_ratio",
        "--layer-ids",
        "static_layer_ids",
        "--ratio-key",
        "base_ratios",
        "--meta-key",
        "sample_meta",
    )
    made = cli(
        "profile",
        "import",
        tmp_path / "arrays.npz",
        *keys,
        "--scorer",
        "snapkv",
        "--model",
        example,
        "-o",
        tmp_path / "p.npz",
    )
    assert made.code == 0
    assert "28 samples of 18 contexts, 288 KV heads" in made.err
    built = cli(
        "build", example / "model.yaml", "-o", tmp_path / "plan", "--set", f"profile={tmp_path / 'p.npz'}", "--json"
    )
    assert built.code == 0
    plan = json.loads(built.out)
    assert (plan["tensor_parallel"], plan["num_groups"], plan["head_order"] != "") == (2, 24, True)
    assert plan["memory"][-1]["allocated_over_ideal"] < 1.09  # one law for both ranks, heads dealt to them
