import subprocess
import sys
from pathlib import Path

from tangram_plan.artefact import write_artefact
from tests.plans import valid_plan

RUN = """
from pathlib import Path
from tangram_plan.bench.decode import DecodeStep
from tangram_plan.ir import Schedule
from tests.plans import valid_plan
import sys

step = DecodeStep(Path(sys.argv[1]), valid_plan(), 4, 60, device="cpu")
step.check_agreement()
print(step.read_bytes, [bool(layer.out[schedule].isfinite().all()) for layer in step.layers for schedule in Schedule])
"""


def test_one_step_runs_every_layer_by_both_schedules_alike(tmp_path: Path) -> None:
    plan = valid_plan()
    write_artefact(plan, {}, tmp_path / "plan")
    held = [plan.group_tokens(group_id, 60, 60) for _, group_id, _, _ in plan.grouping.columns()]
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, str(tmp_path / "plan")],
        capture_output=True,
        text=True,
        env={"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert answer.stderr == ""
    assert answer.stdout == f"{4 * sum(held) * 2 * 64 * 4} {[True] * 6}\n"
