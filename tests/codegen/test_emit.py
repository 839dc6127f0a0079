import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest

from tangram_plan.codegen import allocator_config, emit, render_kernel, specialize
from tangram_plan.codegen.render import render_head_tables
from tangram_plan.ir import KVDtype
from tests.plans import valid_plan

GOLDEN = Path(__file__).parents[1] / "golden"
PLAN_HASH = "0123456789abcdef" * 4
GOLDEN_PLAN = valid_plan(dtype=KVDtype.BFLOAT16, tensor_parallel=2, tile_tokens=128)


@pytest.mark.parametrize(
    "name",
    [
        "decode_attention_d64_gqa3_bfloat16.py",
        "page_table.py",
        "plan_tile_queue.py",
        "head_tables.py",
        "allocator.json",
    ],
)
def test_generated_file_is_as_reviewed(tmp_path: Path, name: str) -> None:
    """After a wanted change: TANGRAM_UPDATE_GOLDEN=1 pytest tests/codegen, and review the difference as code."""
    (path,) = (path for path in emit(GOLDEN_PLAN, PLAN_HASH, tmp_path) if path.name == name)
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("TANGRAM_UPDATE_GOLDEN"):
        golden.write_text(path.read_text())
    assert path.read_text() == golden.read_text()


def test_same_plan_same_bytes(tmp_path: Path) -> None:
    one, two = (emit(GOLDEN_PLAN, PLAN_HASH, tmp_path / name) for name in ("one", "two"))
    assert [path.name for path in one] == [path.name for path in two]
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_every_file_says_where_it_comes_from(tmp_path: Path) -> None:
    for path in emit(GOLDEN_PLAN, PLAN_HASH, tmp_path):
        if path.suffix == ".py":
            first, second = path.read_text().splitlines()[:2]
            assert PLAN_HASH in first
            assert f"template {path.stem.split('_d64')[0]}.py.j2, name {path.stem}." in first
            assert second.startswith('"""')


@pytest.mark.parametrize("num_kv_heads", [1, 2, 40])
def test_generated_source_is_clean(tmp_path: Path, num_kv_heads: int) -> None:
    """Parses, passes this repository's lint rules, and is formatted, short tables and long ones alike."""
    plan = valid_plan(num_layers=1, num_kv_heads=num_kv_heads)
    for path in emit(plan, PLAN_HASH, tmp_path):
        if path.suffix == ".py":
            ast.parse(path.read_text())
    config = Path(__file__).parents[2] / "pyproject.toml"
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check", "--ignore=INP001"], ["format", "--check"]):
        done = subprocess.run(
            [*ruff, *command, "--no-cache", f"--config={config}", str(tmp_path)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_hole_without_a_value_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        render_head_tables(None, PLAN_HASH)  # type: ignore[arg-type]
    assert all("{{" not in render_kernel(spec, PLAN_HASH) for spec in specialize(GOLDEN_PLAN))


def test_allocator_config_is_json_with_the_plans_geometry() -> None:
    config = json.loads(json.dumps(allocator_config(GOLDEN_PLAN)))
    layout = GOLDEN_PLAN.layout
    assert (config["page_bytes"], config["slot_bytes"]) == (layout.page_bytes, 2 * 64 * 2 + 8)
    assert config["groups"][1] == {"rho": 20000, "num_members": 2, "tokens_per_page": 32}
    assert len(config["groups"]) == len(GOLDEN_PLAN.grouping.groups)
    assert (config["sink_tokens"], config["window_tokens"], config["tensor_parallel"]) == (4, 8, 2)
