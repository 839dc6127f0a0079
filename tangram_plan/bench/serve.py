"""`bench serve`: an engine with a plan beside stock vLLM, one after the other, on the same requests, with equal bytes for keys and values."""

import asyncio
import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from rich.table import Table

from tangram_plan.ir import KVDtype, Plan, TangramError, load_artefact, most_pages
from tangram_plan.runtime.engine_args import engine_args
from tangram_plan.runtime.vllm_plugin.installed import check_vllm
from tangram_plan.runtime.vllm_plugin.refusals import least_token_budget
from tangram_plan.terminal import log, new_table

from .timing import read_bandwidth

WORKLOAD = re.compile(r"(\d+)x(\d+)\+(\d+)")
FIRST_TOKEN_ID = 1000  # below are special tokens of most vocabularies
WARM_UP_TOKENS = 16
STOCK, PLAN = "stock", "plan"


@dataclass(frozen=True)
class Workload:
    """Requests of one kind.

    Args:
        requests: how many.
        prompt_tokens: of each, random.
        new_tokens: of each answer.
    """

    requests: int
    prompt_tokens: int
    new_tokens: int

    def __str__(self) -> str:
        return f"{self.requests}x{self.prompt_tokens}+{self.new_tokens}"

    @property
    def tokens(self) -> int:
        """Of prompt and answer of a request."""
        return self.prompt_tokens + self.new_tokens

    @classmethod
    def parse(cls, text: str) -> "Workload":
        """Of `REQUESTSxPROMPT+NEW`, as `16x65536+1024`.

        Raises:
            TangramError: it is not of this form.
        """
        found = WORKLOAD.fullmatch(text)
        numbers = [int(number) for number in found.groups()] if found else [0]
        if min(numbers) < 1:
            raise TangramError(
                "workload has another form",
                where="--workload",
                got=text,
                expected="REQUESTSxPROMPT+NEW, as in 16x65536+1024",
            )
        return cls(*numbers)


@dataclass
class Answer:
    """When a request arrived, and when its tokens came; seconds."""

    arrival: float
    tokens: list[float] = field(default_factory=list)


def bench_serve(
    artefact: Path,
    model: str,
    options: Sequence[str],
    workloads: Sequence[Workload],
    *,
    kv_gib: float,
    rate: float | None = None,
    seed: int = 0,
    engines: Sequence[str] = (STOCK, PLAN),
    quiet: bool,
) -> dict[str, Any]:
    """Serve every workload by each engine, in one run.

    Args:
        artefact: folder that `build` wrote.
        model: folder or hub id.
        options: any of `vllm serve` that are the engine's, for both; what this chooses may be chosen otherwise.
        workloads: one after the other.
        kv_gib: GiB for keys and values, of each engine.
        rate: requests per second of a Poisson process; by default all arrive at once.
        seed: of prompts and arrivals.
        engines: which are measured, in this order.
        quiet: says nothing while it runs.

    Returns:
        `plan`, `gpu`, `read_bandwidth_gb_s` (both None without a GPU), and `runs` = list of {workload, engine, seconds (from the
        first arrival to the last token), prefill_seconds (to the last first token), requests_per_second, step_ms (median time
        between the tokens of a request), bound_ms (weights and retained keys and values of the requests in flight over the
        read bandwidth), ttft_median, ttft_p99 (seconds to the first token), in_flight (most at once), kv_share (bytes that a
        request of the workload takes, over those of the full cache), preemptions, speedup (over stock, if it ran)}.

    Raises:
        TangramError: there is no vLLM, or something is refused.
    """
    plan = load_artefact(artefact)
    room = _room(plan, workloads, kv_gib)
    check_vllm()
    common = {"model": model, **room, **_given(options)}
    arguments = {STOCK: common, PLAN: engine_args(artefact, **common)}
    bandwidth, gpu = _gpu()
    runs: list[dict[str, Any]] = []
    for name in engines:
        for workload, measured in asyncio.run(_serve_all(arguments[name], workloads, rate, seed)):
            run = {"workload": str(workload), "engine": name, **measured}
            run["kv_share"] = kv_share(plan, workload) if name == PLAN else 1.0
            run["bound_ms"] = bandwidth and _bound_ms(plan, model, workload, run["in_flight"], name, bandwidth)
            runs.append(run)
            log(_line(run), quiet=quiet)
    stock = {run["workload"]: run["seconds"] for run in runs if run["engine"] == STOCK}
    for run in runs:
        run["speedup"] = stock[run["workload"]] / run["seconds"] if run["workload"] in stock else None
    return {
        "plan": str(artefact),
        "gpu": gpu,
        "read_bandwidth_gb_s": bandwidth,
        "kv_gib": kv_gib,
        "rate": rate,
        "seed": seed,
        "arguments": {name: str(value) for name, value in common.items()},
        "runs": runs,
    }


def serve_table(figures: dict[str, Any]) -> Table:
    """What `bench_serve` measured."""
    table = new_table(
        f"{figures['kv_gib']} GiB of keys and values, {figures['gpu'] or 'CPU'}",
        "workload",
        "engine",
        "KV bytes",
        "seconds",
        "prefill",
        "speed-up",
        "in flight",
        "token, ms",
        "over bound",
        "first token, s (median, p99)",
    )
    for run in figures["runs"]:
        table.add_row(
            run["workload"],
            run["engine"],
            f"{run['kv_share']:.1%}",
            f"{run['seconds']:.2f}",
            f"{run['prefill_seconds']:.2f}",
            f"{run['speedup']:.2f}x" if run["speedup"] else "",
            str(run["in_flight"]),
            f"{run['step_ms']:.2f}",
            f"{run['step_ms'] / run['bound_ms']:.2f}x" if run["bound_ms"] else "",
            f"{run['ttft_median']:.2f}, {run['ttft_p99']:.2f}",
        )
    return table


def kv_share(plan: Plan, workload: Workload) -> float:
    """Bytes of the pages of a request at its end, all layers, over those of the full cache without padding or metadata."""
    pages = plan.num_pages(workload.prompt_tokens, workload.tokens) * plan.layout.page_bytes * plan.tensor_parallel
    return pages / (workload.tokens * full_token_bytes(plan))


def full_token_bytes(plan: Plan) -> int:
    """Of a token's keys and values in all planned layers."""
    return plan.model.num_kv_heads * plan.layout.kv_bytes


def retained_bytes(plan: Plan, prompt_tokens: int, num_tokens: int) -> int:
    """Keys and values that a decode step reads of one request, all layers and ranks."""
    tokens = sum(
        group.num_members * plan.group_tokens(index, prompt_tokens, num_tokens)
        for index, group in enumerate(plan.grouping.groups)
    )
    return tokens * plan.tensor_parallel * plan.layout.kv_bytes


def arrivals(count: int, rate: float | None, seed: int) -> list[float]:
    """Seconds from the start, of a Poisson process."""
    random, at, times = Random(seed), 0.0, []
    for _ in range(count):
        times.append(at)
        at += random.expovariate(rate) if rate else 0.0
    return times


def weight_bytes(model: str, dtype: KVDtype) -> int:
    """What a decode step reads of a model's weights: all but embeddings that are looked up."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        built = auto.from_config(AutoConfig.from_pretrained(model))
    parameters = sum(parameter.numel() for parameter in built.parameters())
    looked_up = built.get_input_embeddings().weight
    if looked_up is not built.get_output_embeddings().weight:
        parameters -= looked_up.numel()
    return int(parameters * dtype.itemsize)


async def _serve_all(
    arguments: Mapping[str, Any], workloads: Iterable[Workload], rate: float | None, seed: int
) -> list[tuple[Workload, dict[str, Any]]]:
    from tangram_plan.runtime.vllm_plugin.compat import LoadLogger, start_engine

    load = LoadLogger()
    engine = start_engine(arguments, load)
    try:
        await _serve(engine, Workload(1, WARM_UP_TOKENS, WARM_UP_TOKENS), None, seed)
        found = []
        for workload in workloads:
            load.reset()
            answers = await _serve(engine, workload, rate, seed)
            measured = {**measure(answers), "in_flight": load.most_running, "preemptions": load.preemptions}
            found.append((workload, measured))
        return found
    finally:
        engine.shutdown()


async def _serve(engine: Any, workload: Workload, rate: float | None, seed: int) -> list[Answer]:
    random = Random(seed)
    vocabulary = range(FIRST_TOKEN_ID, engine.model_config.get_vocab_size())
    prompts = [random.choices(vocabulary, k=workload.prompt_tokens) for _ in range(workload.requests)]
    start = time.perf_counter()
    times = arrivals(workload.requests, rate, seed)
    return await asyncio.gather(
        *(
            _ask(engine, f"{workload}-{number}-{start}", prompt, workload.new_tokens, start + at)
            for number, (prompt, at) in enumerate(zip(prompts, times, strict=True))
        )
    )


async def _ask(engine: Any, name: str, prompt: list[int], new_tokens: int, arrival: float) -> Answer:
    from tangram_plan.runtime.vllm_plugin.compat import greedy

    answer = Answer(arrival)
    await asyncio.sleep(arrival - time.perf_counter())
    async for output in engine.generate({"prompt_token_ids": prompt}, greedy(new_tokens), name):
        answer.tokens += [time.perf_counter()] * len(output.outputs[0].token_ids)
    return answer


def measure(answers: Sequence[Answer]) -> dict[str, Any]:
    """Times of `bench_serve`'s `runs`."""
    start = min(answer.arrival for answer in answers)
    first = sorted(answer.tokens[0] - answer.arrival for answer in answers)
    gaps = [b - a for answer in answers for a, b in zip(answer.tokens, answer.tokens[1:], strict=False)]
    seconds = max(answer.tokens[-1] for answer in answers) - start
    return {
        "seconds": seconds,
        "prefill_seconds": max(answer.tokens[0] for answer in answers) - start,
        "requests_per_second": len(answers) / seconds,
        "step_ms": statistics.median(gaps) * 1e3 if gaps else 0.0,
        "ttft_median": statistics.median(first),
        "ttft_p99": first[min(len(first) - 1, int(0.99 * len(first)))],
    }


def _given(options: Sequence[str]) -> dict[str, Any]:
    from tangram_plan.runtime.vllm_plugin.compat import parse_engine_options

    return parse_engine_options(options)


def _room(plan: Plan, workloads: Sequence[Workload], kv_gib: float) -> dict[str, Any]:
    """Arguments of both engines: room for the workloads, and the same size of a step."""
    longest, most = (max(getattr(workload, name) for workload in workloads) for name in ("tokens", "requests"))
    longest_answer = max(workload.new_tokens for workload in workloads)
    if longest_answer > plan.max_new_tokens:
        raise TangramError(
            "the plan admits no answer of this length",
            where="--workload",
            got=longest_answer,
            expected=f"at most {plan.max_new_tokens}",
            fix="build the plan with a larger max_new_tokens",
        )
    kv_bytes, least = int(kv_gib * 2**30), most_pages(plan, longest) * plan.layout.page_bytes
    if least > kv_bytes:
        raise TangramError(
            "not one request fits", where="--kv-gib", got=kv_gib, expected=f"at least {least / 2**30:.2f}"
        )
    return {
        "kv_cache_memory_bytes": kv_bytes,
        "max_model_len": longest,
        "max_num_seqs": most,
        "max_num_batched_tokens": least_token_budget(plan, most),
        "dtype": plan.layout.dtype.value,
    }


def _bound_ms(plan: Plan, model: str, workload: Workload, in_flight: int, engine: str, bandwidth: float) -> float:
    """Of a decode step in the middle of the answers."""
    tokens = workload.prompt_tokens + workload.new_tokens // 2
    one = retained_bytes(plan, workload.prompt_tokens, tokens) if engine == PLAN else tokens * full_token_bytes(plan)
    return (weight_bytes(model, plan.layout.dtype) + in_flight * one) / (bandwidth * 1e6)


def _gpu() -> tuple[float | None, str | None]:
    """Bandwidth of a plain read, and the GPU's name, if there is one; measured in a process of its own, whose memory is free again."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        return executor.submit(_measure_gpu).result()


def _measure_gpu() -> tuple[float | None, str | None]:
    import torch

    if not torch.cuda.is_available():
        return None, None
    return read_bandwidth(), torch.cuda.get_device_name()


def _line(run: dict[str, Any]) -> str:
    bound = f", bound {run['bound_ms']:.2f}" if run["bound_ms"] else ""
    return (
        f"{run['workload']}, {run['engine']}: {run['seconds']:.2f} s ({run['prefill_seconds']:.2f} to the last first token), "
        f"{run['step_ms']:.2f} ms a token{bound}, {run['in_flight']} in flight, {run['preemptions']} preempted"
    )
