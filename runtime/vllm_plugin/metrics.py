"""What an engine with a plan adds to vLLM's `/metrics` and to its log. Imports no vLLM until it is added to an engine.

vLLM's front end is told how full the pool is after every step, and of each request once, when it ends. What was kept of a prompt
is a function of its length (`ir.page_law`). So everything is made of what the front end knows: the engine counts nothing more.
"""

import time
from functools import cache
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge

from tangram_plan.ir import Plan

from . import PLAN_KEY

LOG_SECONDS = 60
LABELS = ("model_name", "engine")  # as vLLM's own


class Families(NamedTuple):
    """The metrics, without labels."""

    pages_used: Gauge
    pages_free: Gauge
    kept: Counter
    evicted: Counter


@cache
def _families() -> Families:
    """Registered once a process, by the first engine with a plan."""
    by_group = (*LABELS, "group")
    once_per_head = "of prompts whose requests ended, counted once for each KV head of the head group"
    return Families(
        Gauge("tangram:num_pages_used", "Pages that requests hold.", LABELS, multiprocess_mode="mostrecent"),
        Gauge("tangram:num_pages_free", "Pages that no request holds.", LABELS, multiprocess_mode="mostrecent"),
        Counter("tangram:kv_tokens_kept", f"Tokens kept {once_per_head}.", by_group),
        Counter("tangram:kv_tokens_evicted", f"Tokens evicted {once_per_head}.", by_group),
    )


class PlanMetrics:
    """Metrics of one engine.

    Args:
        plan: that is served.
        num_pages: of the pool, the null page not counted.
        model_name: label of vLLM's.
        engine: label of vLLM's.
    """

    def __init__(self, plan: Plan, num_pages: int, model_name: str, engine: str) -> None:
        self._plan, self._num_pages = plan, num_pages
        families = _families()
        self._used, self._free = (family.labels(model_name, engine) for family in families[:2])
        self._counters = [
            tuple(family.labels(model_name, engine, str(group_id)) for family in (families.kept, families.evicted))
            for group_id in range(len(plan.grouping.groups))
        ]
        self.set_load(0, 0, 0)
        self._begin_period(time.monotonic())

    def set_load(self, pages_used: int, running: int, waiting: int) -> None:
        """Take in what was so after a step: pages, and requests."""
        self._load = pages_used, running, waiting
        self._used.set(pages_used)
        self._free.set(self._num_pages - pages_used)
        self._is_idle = False

    def count_prompt(self, prompt_tokens: int) -> None:
        """Count a prompt of so many tokens, all of which were computed."""
        self._prompts += 1
        for group_id, (group, (kept, evicted)) in enumerate(
            zip(self._plan.grouping.groups, self._counters, strict=True)
        ):
            heads = group.num_members * self._plan.tensor_parallel
            tokens = self._plan.group_tokens(group_id, prompt_tokens, prompt_tokens)
            kept.inc(tokens * heads)
            evicted.inc((prompt_tokens - tokens) * heads)
            self._kept += tokens * heads
            self._evicted += (prompt_tokens - tokens) * heads

    def log_line(self, now: float) -> str:
        """What to log, at most once in `LOG_SECONDS`; empty if it is too early, or there was no step since the last one.

        Args:
            now: seconds, as of `time.monotonic`.
        """
        seconds = now - self._start
        if seconds < LOG_SECONDS:
            return ""
        line = "" if self._is_idle else self._line(seconds)
        self._begin_period(now)
        return line

    def _line(self, seconds: float) -> str:
        used, running, waiting = self._load
        line = (
            f"Pages: {used:,} used, {self._num_pages - used:,} free; requests: {running} running, {waiting} waiting;"
            f" {self._prompts:,} prompts ended in {seconds:.0f} s"
        )
        if not self._prompts:
            return line
        ratio = self._kept / (self._kept + self._evicted)
        return f"{line}: {self._kept:,} KV tokens kept, {self._evicted:,} evicted, retention ratio {ratio:.3f}"

    def _begin_period(self, now: float) -> None:
        self._start, self._is_idle = now, True
        self._prompts = self._kept = self._evicted = 0


def add_metrics(engine: Any) -> None:
    """Have an engine's front end report what its plan does; nothing where vLLM keeps no statistics.

    A server does it by itself. `LLM` needs `disable_log_stats=False`, and then `add_metrics(llm.llm_engine)`.

    Args:
        engine: vLLM's `LLMEngine` or `AsyncLLM`.

    Raises:
        KeyError: it has no plan.
    """
    from .compat import add_report
    from .spec import load_plan

    plan = load_plan(engine.vllm_config.additional_config[PLAN_KEY])
    add_report(engine, lambda *pool: PlanMetrics(plan, *pool))
