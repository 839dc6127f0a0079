import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tangram_plan.bench.serve import PLAN, STOCK
from tests.engine_runs import ENVIRONMENT, ROOT
from tests.engines import Engines

pytestmark = pytest.mark.slow


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tangram_plan", "bench", "serve", *map(str, arguments)]
    environment = os.environ | ENVIRONMENT
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_both_engines_serve_the_same_requests(engines: Engines, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    model = ("--model", engines.model, "--enforce-eager")
    load = ("-w", "3x200+30", "-w", "1x300+2", "--kv-gib", "0.2", "--rate", "1000")
    ran = bench(engines.artefact(0.3), *model, *load, "-q", "-o", figures)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(figures.read_text())
    assert [(run["engine"], run["workload"]) for run in found["runs"]] == [
        (engine, workload) for engine in (STOCK, PLAN) for workload in ("3x200+30", "1x300+2")
    ]
    assert [run["in_flight"] for run in found["runs"]] == [3, 1, 3, 1]
    for run in found["runs"]:
        assert 0 < run["ttft_median"] <= run["ttft_p99"] <= run["prefill_seconds"] <= run["seconds"]
        assert run["step_ms"] > 0


@pytest.mark.parametrize("option", ["--no-such-option", "--enable-prefix-caching"])
def test_an_option_that_no_engine_takes_is_refused_in_one_line(engines: Engines, option: str) -> None:
    ran = bench(engines.artefact(0.3), "--model", engines.model, "-w", "1x20+2", "--kv-gib", "0.2", option)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert [option in line for line in ran.stderr.splitlines() if line.startswith("error: ")] == [True]
