"""Requests that are aborted at any moment leave the pool as it was, and no trace."""

import json
import os
import subprocess
import sys

import pytest

from tests.abort_runs import Aborted
from tests.engine_runs import ENVIRONMENT, ROOT
from tests.engines import Engines

ABORTS = 10_000

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_aborted_requests_leave_the_pool_as_it_was(engines: Engines, scheduling: str) -> None:
    words = [str(engines.model), str(engines.artefact(0.3)), str(ABORTS), scheduling]
    command = [sys.executable, "-m", "tests.abort_runs", *words]
    ran = subprocess.run(
        command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-8000:]
    found = Aborted(**json.loads(ran.stdout.splitlines()[-1]))
    assert (found.free_pages, found.left_over) == (found.num_pages, 0)
    assert found.wrong_steps == 0
    moments = (found.in_a_step, found.in_a_prompt, found.unseen, found.preemptions)
    assert min(moments) > 10, found  # or the run no longer tries what it is for
