"""The ablation on the small build: every pair of solvers, one run of the clustering each, files that can be read."""

import csv
import itertools
from pathlib import Path
from typing import Any

import pytest

from tangram_plan.ablation import ablation_table, run_ablation, write_ablation
from tangram_plan.config import load_config
from tangram_plan.ir import Plan, Schedule, TangramError
from tangram_plan.pipeline import Stage, compile_stages
from tangram_plan.solvers import GROUPING_SOLVERS, SPLIT_SOLVERS
from tests.small_plans import write_inputs

PAIRS = list(itertools.product(GROUPING_SOLVERS, SPLIT_SOLVERS))
COLUMNS = [
    "grouping",
    "partition",
    "num_groups",
    "page_slots",
    "objective",
    "bound",
    "allocated_over_ideal",
    "allocated_over_full",
    "static_makespan_over_ideal",
    "static_us",
    "best_us",
    "seconds",
]


def ablate(model_yaml: Path, *overrides: str) -> list[dict[str, Any]]:
    return run_ablation(model_yaml, overrides=overrides, force=False, quiet=True)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ablate(write_inputs(tmp_path_factory.mktemp("inputs")))


def test_every_pair_of_solvers_has_a_row(rows: list[dict[str, Any]]) -> None:
    assert [(row["grouping"], row["partition"]) for row in rows] == PAIRS
    assert all(list(row) == COLUMNS for row in rows)


def test_objective_of_cp_sat_is_never_above_another(rows: list[dict[str, Any]]) -> None:
    (of_cp_sat,) = {row["objective"] for row in rows if row["grouping"] == "cp_sat"}
    assert of_cp_sat <= min(row["objective"] for row in rows)


def test_row_tells_what_the_pipeline_makes_of_the_pair(rows: list[dict[str, Any]], model_yaml: Path) -> None:
    for row in rows[:: len(SPLIT_SOLVERS) + 1]:  # each solver once
        names = (f"grouping.solver={row['grouping']}", f"partition.solver={row['partition']}")
        stages = compile_stages(load_config(model_yaml, names), relative_to=model_yaml.parent)
        plan = {product.stage: product.value for product in stages}[Stage.PLAN]
        assert isinstance(plan, Plan)
        assert row["num_groups"] == len(plan.grouping.groups)
        static = [choice.estimates[Schedule.STATIC_SPLITS].predicted_us for choice in plan.partition.choices]
        assert row["static_us"] == round(sum(static), 1)


def test_each_clustering_solver_runs_once(monkeypatch: pytest.MonkeyPatch, model_yaml: Path) -> None:
    solved = []
    for name, make in list(GROUPING_SOLVERS.items()):

        def counted(name: str = name, make: Any = make) -> Any:
            solved.append(name)
            return make()

        monkeypatch.setitem(GROUPING_SOLVERS, name, counted)
    ablate(model_yaml)
    assert solved == list(GROUPING_SOLVERS)


def test_files_can_be_read(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    table, *plots = write_ablation(rows, tmp_path / "new" / "folder")
    with table.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [list(row) for row in read] == [COLUMNS] * len(PAIRS)
    assert [float(row["objective"]) for row in read] == [row["objective"] for row in rows]
    assert [plot.name for plot in plots] == ["memory.png", "decode.png"]
    for plot in plots:
        assert plot.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (["grouping.max_groups_per_layer=2"], {"adjacent", "sorted", "graph"}),
        (["grouping.max_groups_per_layer=2", "grouping.scope=layer"], set(GROUPING_SOLVERS)),
    ],
)
def test_solver_that_does_not_apply_has_refused_rows(
    overrides: list[str], refused: set[str], model_yaml: Path, tmp_path: Path
) -> None:
    rows = ablate(model_yaml, *overrides)
    assert [(row["grouping"], row["partition"]) for row in rows] == PAIRS
    assert {row["grouping"] for row in rows if "refused" in row} == refused
    assert all(path.stat().st_size for path in write_ablation(rows, tmp_path))
    assert ablation_table(rows)


def test_other_errors_are_raised(model_yaml: Path) -> None:
    with pytest.raises(TangramError, match="do not fit"):
        ablate(model_yaml, "grouping.max_groups=1", "grouping.page_slots=16")
