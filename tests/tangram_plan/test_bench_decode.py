import json
import subprocess
import sys
from pathlib import Path

from tangram_plan.artefact import write_artefact
from tests.plans import valid_plan

RUN = """
from pathlib import Path
from tangram_plan.bench.decode import predicted_us
from tangram_plan.bench.decode_case import DecodeCase, DecodeInputs, Regime
from tangram_plan.ir import Schedule, TangramError
from tangram_plan.runtime.generated_kernels import GeneratedKernels
from tests.devices import make_device
from tests.plans import valid_plan
import json, sys

plan = valid_plan()
kernels = GeneratedKernels(Path(sys.argv[1]), plan)
inputs = DecodeInputs(plan, Regime("uneven", (60, 1, 33)), "cpu")
found = {"bytes": inputs.read_bytes}
for schedule in Schedule:
    case = DecodeCase(kernels, inputs, schedule)
    case.check()
    case.plan()
    case.run_layer(inputs.layers[1], repeats=2)
    found[schedule.value] = predicted_us(plan, inputs.regime, schedule, make_device())
inputs.layers[2].q[0, 0] += 1
case.run = lambda: None  # outputs stay poisoned
try:
    case.check()
except TangramError as error:
    found["error"] = str(error)
print(json.dumps(found))
"""


def test_a_case_is_checked_and_counted(tmp_path: Path) -> None:
    plan = valid_plan()
    write_artefact(plan, {}, tmp_path / "plan")
    held = [plan.group_tokens(group_id, n, n) for _, group_id, _, _ in plan.grouping.columns() for n in (60, 1, 33)]
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, str(tmp_path / "plan")],
        capture_output=True,
        text=True,
        env={"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert answer.stderr == ""
    found = json.loads(answer.stdout)
    assert found["bytes"] == sum(held) * 2 * 64 * 4
    for schedule, overhead_us in (("static_splits", 10), ("tile_queue", 12)):
        read_us = found["bytes"] / 2000  # at 2 bytes per nanosecond
        assert found[schedule] >= 3 * overhead_us + read_us - 0.1
    assert "is wrong" in found["error"]
    assert "uneven, layer 0, request 0, KV head 0" in found["error"]
