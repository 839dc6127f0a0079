"""Metrics by hand, and those of real engines."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="what vLLM makes its metrics with")

from prometheus_client import REGISTRY

from tangram_plan.ir import Plan
from tangram_plan.runtime.vllm_plugin.metrics import LOG_SECONDS, PlanMetrics
from tests.engine_runs import ENVIRONMENT, KV_CACHE_BYTES, ROOT
from tests.engines import Engines
from tests.plans import valid_plan

# Of every prompt 4 sinks and 8 in the window are kept, and of the rest one head keeps half, and the other three a quarter.
PLAN = valid_plan(num_layers=2, num_kv_heads=2, group_sizes=(1, 3), rho=(32768, 16384), splits=(1, 1))
NUM_PAGES = 100


def sample(model: str, name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"tangram:{name}", {"model_name": model, "engine": "0", **labels})


def kv_tokens(model: str) -> list[tuple[float | None, float | None]]:
    """Kept and evicted, per group."""
    names = "kv_tokens_kept_total", "kv_tokens_evicted_total"
    kept, evicted = ([sample(model, name, group=group) for group in "01"] for name in names)
    return list(zip(kept, evicted, strict=True))


def test_nothing_has_happened_yet() -> None:
    PlanMetrics(PLAN, NUM_PAGES, "idle", "0")
    assert (sample("idle", "num_pages_used"), sample("idle", "num_pages_free")) == (0, 100)
    assert kv_tokens("idle") == [(0, 0), (0, 0)]


def test_pages_are_those_of_the_last_step() -> None:
    metrics = PlanMetrics(PLAN, NUM_PAGES, "pages", "0")
    metrics.set_load(40, 2, 1)
    metrics.set_load(7, 1, 0)
    assert (sample("pages", "num_pages_used"), sample("pages", "num_pages_free")) == (7, 93)


def test_tokens_are_counted_once_for_each_kv_head() -> None:
    metrics = PlanMetrics(PLAN, NUM_PAGES, "tokens", "0")
    metrics.count_prompt(112)  # 12 + 100 / 2 by one head, 12 + 100 / 4 by each of three
    assert kv_tokens("tokens") == [(62, 50), (3 * 37, 3 * 75)]
    metrics.count_prompt(10)
    metrics.count_prompt(1)
    assert kv_tokens("tokens") == [(62 + 11, 50), (3 * (37 + 11), 3 * 75)]


def test_kv_heads_of_all_ranks_count() -> None:
    plan = valid_plan(num_layers=2, num_kv_heads=2, group_sizes=(2,), rho=(32768,), splits=(1,), tensor_parallel=2)
    PlanMetrics(plan, NUM_PAGES, "ranks", "0").count_prompt(112)
    assert kv_tokens("ranks")[0] == (4 * 62, 4 * 50)


def test_engines_do_not_mix() -> None:
    one, other = (PlanMetrics(PLAN, NUM_PAGES, model, "0") for model in ("one", "other"))
    one.count_prompt(1)
    other.set_load(3, 1, 0)
    assert kv_tokens("other") == [(0, 0), (0, 0)]
    assert sample("one", "num_pages_used") == 0


def test_a_line_a_minute_says_what_was_since_the_last_one() -> None:
    metrics = PlanMetrics(PLAN, 2000, "line", "0")
    start = time.monotonic()
    metrics.count_prompt(112)
    metrics.count_prompt(10)
    metrics.set_load(1200, 3, 1)
    assert metrics.log_line(start + LOG_SECONDS - 1) == ""
    assert metrics.log_line(start + LOG_SECONDS) == (
        "Pages: 1,200 used, 800 free; requests: 3 running, 1 waiting; 2 prompts ended in 60 s:"
        " 213 KV tokens kept, 275 evicted, retention ratio 0.436"
    )
    metrics.set_load(0, 0, 0)
    assert metrics.log_line(start + LOG_SECONDS + 59) == ""
    assert metrics.log_line(start + LOG_SECONDS + 70) == (
        "Pages: 0 used, 2,000 free; requests: 0 running, 0 waiting; 0 prompts ended in 70 s"
    )


def test_an_idle_engine_logs_nothing() -> None:
    metrics = PlanMetrics(PLAN, NUM_PAGES, "quiet", "0")
    start = time.monotonic()
    metrics.set_load(5, 1, 0)
    assert metrics.log_line(start + 60)
    assert [metrics.log_line(start + seconds) for seconds in (120, 180, 3600)] == [""] * 3
    metrics.set_load(5, 1, 0)
    assert metrics.log_line(start + 3610) == ""
    assert " in 60 s" in metrics.log_line(start + 3660)


# --- what vLLM says, as it says it


@pytest.fixture(scope="module")
def compat() -> Any:
    """It imports vLLM, which warns of itself."""
    pytest.importorskip("vllm", reason="the plugin runs in vLLM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module("tangram_plan.runtime.vllm_plugin.compat")


def engine(model: str, num_pages: int, *, keeps_statistics: bool = True) -> SimpleNamespace:
    cache, config = SimpleNamespace(num_gpu_blocks=num_pages + 1), SimpleNamespace(served_model_name=model)
    manager = SimpleNamespace(stat_loggers=[], engine_indexes=[0]) if keeps_statistics else None
    return SimpleNamespace(logger_manager=manager, vllm_config=SimpleNamespace(cache_config=cache, model_config=config))


def test_a_share_of_the_pool_is_a_number_of_pages(compat: Any) -> None:
    num_pages = 1009
    served = engine("share", num_pages)
    compat.add_report(served, partial(PlanMetrics, PLAN))
    (report,) = served.logger_manager.stat_loggers
    for free in range(num_pages + 1):
        usage = 1.0 - free / num_pages  # as vLLM's
        step = SimpleNamespace(num_running_reqs=1, num_waiting_reqs=2, num_skipped_waiting_reqs=3, kv_cache_usage=usage)
        report.record(step, None)
        assert (sample("share", "num_pages_used"), sample("share", "num_pages_free")) == (num_pages - free, free)


def test_requests_count_when_they_end_with_an_answer(compat: Any) -> None:
    served = engine("ended", NUM_PAGES)
    compat.add_report(served, partial(PlanMetrics, PLAN))
    (report,) = served.logger_manager.stat_loggers
    answered, aborted_before = (SimpleNamespace(num_prompt_tokens=112, num_generation_tokens=n) for n in (3, 0))
    report.record(None, None)
    report.record(None, SimpleNamespace(finished_requests=[answered, aborted_before, answered]))
    assert kv_tokens("ended") == [(2 * 62, 2 * 50), (2 * 111, 2 * 225)]


def test_an_engine_without_statistics_has_no_metrics(compat: Any) -> None:
    compat.add_report(engine("silent", NUM_PAGES, keeps_statistics=False), partial(PlanMetrics, PLAN))
    assert sample("silent", "num_pages_free") is None


# --- real engines


def predicted(plan: Plan, prompts: Sequence[int], num_heads: int) -> dict[str, tuple[int, int]]:
    """Kept and evicted per group, by the page law; and together they are every token of every KV head."""
    found = {}
    for group_id, group in enumerate(plan.grouping.groups):
        kept = sum(plan.group_tokens(group_id, prompt, prompt) for prompt in prompts) * group.num_members
        found[str(group_id)] = (kept, sum(prompts) * group.num_members - kept)
    assert sum(map(sum, found.values())) == sum(prompts) * num_heads
    return found


RUN = """
import json, os, sys

from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams

from tangram_plan.runtime import engine_args
from tangram_plan.runtime.vllm_plugin import metrics

asked = json.loads(sys.argv[1])
arguments = {"model": asked["model"], "max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 512,
             "kv_cache_memory_bytes": asked["bytes"], "enforce_eager": True, "disable_log_stats": False}
llm = LLM(**engine_args(asked["artefact"], **arguments) if asked["artefact"] else arguments)
if asked["artefact"]:
    metrics.add_metrics(llm.llm_engine)
    metrics.LOG_SECONDS = 0
llm.generate([{"prompt_token_ids": prompt} for prompt in asked["prompts"]],
             SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False), use_tqdm=False)
llm.llm_engine.do_log_stats()
samples = [sample for family in REGISTRY.collect() for sample in family.samples if sample.name.startswith("tangram:")]
print("SAMPLES", json.dumps([[sample.name, sample.labels, sample.value] for sample in samples]))
"""


def run_llm(engines: Engines, artefact: str, prompts: list[list[int]], own_process: bool) -> tuple[Any, str]:
    """Samples of an engine's metrics, and its log."""
    asked = {"model": str(engines.model), "artefact": artefact, "bytes": KV_CACHE_BYTES, "prompts": prompts}
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(own_process)), "VLLM_LOGGING_LEVEL": "INFO"}
    command = [sys.executable, "-c", RUN, json.dumps(asked)]
    environment = os.environ | ENVIRONMENT | environment
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-8000:]
    (samples,) = re.findall(r"^SAMPLES (.*)$", ended.stdout, re.MULTILINE)
    return json.loads(samples), ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("own_process", [False, True])
def test_llm_reports_after_one_call(engines: Engines, plan: Plan, own_process: bool) -> None:
    prompts = engines.prompts()[:6]
    samples, log = run_llm(engines, str(engines.artefact(0.3)), prompts, own_process)
    pages = {name: value for name, _, value in samples if "pages" in name}
    num_pages = KV_CACHE_BYTES // plan.layout.page_bytes - 1
    assert pages == {"tangram:num_pages_used": 0, "tangram:num_pages_free": num_pages}
    expected = predicted(plan, [len(prompt) for prompt in prompts], 30 * 3)
    for number, name in enumerate(("kept", "evicted")):
        counted = {
            labels["group"]: value for found, labels, value in samples if found == f"tangram:kv_tokens_{name}_total"
        }
        assert counted == {group: tokens[number] for group, tokens in expected.items()}
    kept, evicted = (sum(tokens) for tokens in zip(*expected.values(), strict=True))
    assert f"0 waiting; {len(prompts)} prompts ended in" in log
    assert f" s: {kept:,} KV tokens kept, {evicted:,} evicted, retention ratio {kept / (kept + evicted):.3f}" in log


@pytest.mark.slow
def test_without_a_plan_there_is_no_metric(engines: Engines) -> None:
    samples, _ = run_llm(engines, "", engines.prompts()[:1], own_process=False)
    assert samples == []


@pytest.mark.slow
def test_a_server_reports_by_itself(engines: Engines, plan: Plan, tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="the client of the server")
    from tests.vllm_plugin import test_http as http

    prompts = engines.prompts()
    expected = predicted(plan, [len(prompt) for prompt in prompts], 30 * 3)
    with http.served(engines, plan, tmp_path) as server:
        before = scrape(server.port)
        assert pages_of(before) == {"used": 0, "free": http.NUM_PAGES}
        assert {value for (name, _), value in before.items() if "kv_tokens" in name} == {0}
        with server.client as client:
            stream = client.completions.create(
                model=http.MODEL, prompt=prompts[0], max_tokens=100, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(stream))
            during = pages_of(scrape(server.port))
            for _ in stream:
                pass
        for prompt in prompts[1:]:
            server.ask(prompt, max_tokens=4)
        after = scrape(server.port)
    assert during["used"] > 0
    assert during["used"] + during["free"] == http.NUM_PAGES
    assert pages_of(after) == {"used": 0, "free": http.NUM_PAGES}
    for group, (kept, evicted) in expected.items():
        assert after["kv_tokens_kept_total", group] == kept
        assert after["kv_tokens_evicted_total", group] == evicted


def pages_of(samples: dict[tuple[str, str], float]) -> dict[str, float]:
    return {state: samples[f"num_pages_{state}", ""] for state in ("used", "free")}


def scrape(port: int) -> dict[tuple[str, str], float]:
    """(name, group) -> value of our metrics; there is one model and one engine."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode()
    found = re.findall(r"^tangram:(\w+){(.*)} (.+)$", lines, re.MULTILINE)
    samples = {}
    for name, labels, value in found:
        if not name.endswith("_created"):
            values = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            assert (values.pop("model_name"), values.pop("engine")) == ("smollm2", "0")
            samples[name, values.get("group", "")] = float(value)
    return samples
