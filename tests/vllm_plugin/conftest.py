import os

import pytest

pytest.importorskip("vllm", reason="the plugin runs in vLLM")

from tangram_plan.ir import Plan, load_artefact
from tests.engine_runs import Run, Served
from tests.engines import Engines


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    base = tmp_path_factory.getbasetemp()
    return Engines.start((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "engines")


@pytest.fixture(scope="session")
def stock(engines: Engines) -> Served:
    """Without a plan."""
    return engines.served("stock", Run(str(engines.model), "", engines.loads()))


@pytest.fixture(scope="session")
def keeping_all(engines: Engines) -> Served:
    """From a plan that keeps everything."""
    return engines.served("keeping-all", Run(str(engines.model), str(engines.artefact(1.0)), engines.loads()))


@pytest.fixture(scope="session")
def plan(engines: Engines) -> Plan:
    """A plan that compresses."""
    return load_artefact(engines.artefact(0.3))
