"""Runs stock vLLM in a process of its own: `serve` starts it and waits, and this file, run as a script, is what it starts.

What pytest does to warnings, and what it imported before, so is no matter to the engine, and its environment is the run's.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ANSWERED = "served.json"
ROOT = Path(__file__).parents[1]
KV_CACHE_BYTES = 256 << 20
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Query:
    """A request.

    Args:
        prompt: its tokens.
        max_tokens: of the answer.
        logprobs: so many most probable tokens are reported at every position of the answer; 0: none.
        prompt_logprobs: the same, of the prompt.
    """

    prompt: list[int]
    max_tokens: int = 24
    logprobs: int = 0
    prompt_logprobs: int = 0


@dataclass(frozen=True)
class Run:
    """An engine, and what is asked of it.

    Args:
        model: folder of the model.
        artefact: of the plan; empty: stock vLLM.
        loads: requests that are sent together; one load after the other.
        arguments: of the engine, beside those of `START`.
        with_plugin: whether vLLM may load its plugins.
        own_process: whether the engine's core runs in a process of its own, as it does in a server.
        interpreted: whether the plan's kernels serve, in Triton's interpreter.
    """

    model: str
    artefact: str
    loads: list[list[Query]]
    arguments: dict[str, Any] = field(default_factory=dict)
    with_plugin: bool = True
    own_process: bool = False
    interpreted: bool = False


@dataclass(frozen=True)
class Step:
    """A step, after the scheduler has given pages to all its requests.

    Args:
        free_pages: in the pool.
        predicted: the same, as the plan says.
        decodes: requests with one token.
        chunks: requests with more.
    """

    free_pages: int
    predicted: int
    decodes: int
    chunks: int


@dataclass(frozen=True)
class Served:
    """What came of a run; lists are per load, and therein per request.

    Args:
        num_pages: of the engine's pool, the null page not counted.
        tokens: of the answers.
        logprobs: per position of an answer, token -> log-probability.
        prompt_logprobs: the same of the prompt, from its second token on.
        preemptions: per load.
        steps: of all loads; none of an engine in its own process.
        free_pages: after each load.
    """

    num_pages: int
    tokens: list[list[list[int]]] = field(default_factory=list)
    logprobs: list[list[list[dict[str, float]]]] = field(default_factory=list)
    prompt_logprobs: list[list[list[dict[str, float]]]] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    free_pages: list[int] = field(default_factory=list)


def serve(run: Run, folder: Path) -> None:
    """Start an engine, ask it, and stop it; what it answered stays in the folder."""
    asked, answered = folder / "run.json", folder / ANSWERED
    asked.write_text(json.dumps(asdict(run)))
    environment = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(run.own_process))}
    if not run.with_plugin:
        environment["VLLM_PLUGINS"] = ""
    if run.interpreted:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "tests.engine_runs", str(asked), str(answered)]
    with (folder / "log.txt").open("w") as log:
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    assert ended.returncode == 0, (folder / "log.txt").read_text()[-8000:]


def read_served(folder: Path) -> Served:
    """What `serve` left."""
    served = json.loads((folder / ANSWERED).read_text())
    return Served(**{**served, "steps": [Step(**step) for step in served["steps"]]})


def _main(asked: Path, answered: Path) -> None:
    from vllm import LLM

    from tangram_plan.runtime.engine_args import engine_args

    run = json.loads(asked.read_text())
    arguments = {
        "model": run["model"],
        "dtype": "float32",
        **_platform_arguments(),
        "max_model_len": 2560,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        **run["arguments"],
    }
    if run["artefact"]:
        arguments = engine_args(run["artefact"], **arguments)
    if run["interpreted"]:
        arguments["worker_cls"] = "tests.interpreted_worker.InterpretedWorker"
    llm = LLM(**arguments)
    scheduler = None if run["own_process"] else llm.llm_engine.engine_core.engine_core.scheduler
    num_pages = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks - 1
    served = Served(num_pages)
    if scheduler and run["artefact"]:
        _watch(scheduler, served)
    for load in run["loads"]:
        _ask(llm, load, served)
        if scheduler:
            served.free_pages.append(_free_pages(scheduler))
    answered.write_text(json.dumps(asdict(served)))


def _platform_arguments() -> dict[str, Any]:
    """CUDA graphs of whole decode steps where they can be; nothing is compiled otherwise, which takes longer than these runs."""
    import torch

    if torch.cuda.is_available():
        return {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    return {"enforce_eager": True}


def _ask(llm: Any, load: Sequence[Mapping[str, Any]], served: Served) -> None:
    from vllm import SamplingParams

    preempted = _preemptions(llm)
    outputs = llm.generate(
        [{"prompt_token_ids": query["prompt"]} for query in load],
        [
            SamplingParams(
                temperature=0,
                max_tokens=query["max_tokens"],
                ignore_eos=True,
                detokenize=False,
                logprobs=query["logprobs"] or None,
                prompt_logprobs=query["prompt_logprobs"] or None,
            )
            for query in load
        ],
        use_tqdm=False,
    )
    served.tokens.append([list(output.outputs[0].token_ids) for output in outputs])
    served.logprobs.append([_plain(output.outputs[0].logprobs) for output in outputs])
    served.prompt_logprobs.append([_plain((output.prompt_logprobs or [None])[1:]) for output in outputs])
    served.preemptions.append(_preemptions(llm) - preempted)


def _plain(logprobs: Sequence[Mapping[int, Any]] | None) -> list[dict[str, float]]:
    return [{str(token): one.logprob for token, one in position.items()} for position in logprobs or []]


def _preemptions(llm: Any) -> int:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def _free_pages(scheduler: Any) -> int:
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def _watch(scheduler: Any, served: Served) -> None:
    """Note, after every step is scheduled, what is free and what should be."""
    from tangram_plan.ir import reserve

    schedule = scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        held = [
            reserve(scheduler.plan, request.num_prompt_tokens, request.num_computed_tokens).num_pages
            for request in scheduler.running
        ]
        new_tokens = output.num_scheduled_tokens.values()
        decodes = sum(new == 1 for new in new_tokens)
        predicted = served.num_pages - sum(held)
        served.steps.append(Step(_free_pages(scheduler), predicted, decodes, len(new_tokens) - decodes))
        return output

    scheduler.schedule = watched


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
