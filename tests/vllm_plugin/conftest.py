import os
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the plugin runs in vLLM")

from tangram_plan.ir import Plan, load_artefact
from tests.engine_runs import Query, Run, Served
from tests.engines import ALONE, TEXT_TOKENS, Engines


@pytest.fixture(scope="session")
def engines_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of this test run, or the one that TANGRAM_ENGINES names, where models and plans may lie already."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = Path(os.environ.get("TANGRAM_ENGINES", shared / "engines"))
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def engines(engines_folder: Path) -> Engines:
    """Of SmolLM2."""
    return Engines.start(engines_folder)


@pytest.fixture(scope="session")
def tiny(engines_folder: Path) -> Engines:
    """Of a tiny Qwen3."""
    return Engines.start_tiny(engines_folder, "qwen3")


@pytest.fixture(scope="session")
def stock(engines: Engines) -> Served:
    """Without a plan."""
    return engines.served("stock", Run(str(engines.model), "", engines.loads()))


@pytest.fixture(scope="session")
def keeping_all(engines: Engines) -> Served:
    """From a plan that keeps everything."""
    return engines.served("keeping-all", Run(str(engines.model), str(engines.artefact(1.0)), engines.loads()))


@pytest.fixture(scope="session")
def compressing(engines: Engines) -> Served:
    """From a plan that compresses: the loads, then each of some prompts alone, a text, and needles, in this order."""
    tokens, prompts = engines.tokens(), engines.prompts()
    needle, question, hay = tokens["needle"], tokens["question"], tokens["text"][:900]
    loads = [
        *engines.loads(),
        *([Query(prompts[number])] for number in ALONE),
        [Query(tokens["text"][:TEXT_TOKENS], logprobs=20, prompt_logprobs=1)],
        [
            Query(prompt, len(tokens["answer"]))
            for prompt in (needle + hay + question, hay + needle + question, hay + question)
        ],
    ]
    return engines.served("compressing", Run(str(engines.model), str(engines.artefact(0.3)), loads))


@pytest.fixture(scope="session")
def plan(engines: Engines) -> Plan:
    """The plan that compresses."""
    return load_artefact(engines.artefact(0.3))
