"""vLLM's schedulers with two changes: prefill steps end at the plan's boundaries, and answers at the plan's longest."""

from typing import Any

from tangram_plan.ir import next_boundary

from .capacity import capacity_lines, check_pool
from .compat import AsyncScheduler, Request, Scheduler, errors_in_one_line, log, version_warning
from .manager import PageManager


class CompressedScheduler(Scheduler):
    """For engines that wait for a step before they schedule the next."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        (manager,) = self.kv_cache_manager.coordinator.single_type_managers
        assert isinstance(manager, PageManager), "the plugin is not registered in this process"
        manager.prompt_tokens = lambda request_id: self.requests[request_id].num_prompt_tokens
        self.plan = manager.kv_cache_spec.plan
        self.num_pages = self.kv_cache_config.num_blocks - 1  # the first is the null page
        with errors_in_one_line():
            check_pool(self.plan, self.num_pages, self.max_model_len)
        self.need_mamba_block_aligned_split = True  # asks the method below how many tokens a step takes

    def _mamba_block_aligned_split(
        self, request: Request, num_new_tokens: int, *cached: int, **more_cached: int
    ) -> int:
        """All tokens up to the next boundary, or none: a chunk that does not fit into this step waits."""
        start = request.num_computed_tokens + sum(cached) + sum(more_cached.values())
        if start >= request.num_prompt_tokens:
            return num_new_tokens
        chunk = next_boundary(request.num_prompt_tokens, start, self.plan.compress_chunk_tokens) - start
        return chunk if chunk <= num_new_tokens else 0

    def add_request(self, request: Request) -> None:
        """Take a request in; an answer ends where the width of its row does, as if `max_tokens` said so."""
        request.max_tokens = min(request.max_tokens, self.plan.max_new_tokens)
        super().add_request(request)


class CompressedAsyncScheduler(CompressedScheduler, AsyncScheduler):
    """For engines that schedule a step while the one before it runs."""


def make_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """The `scheduler_cls` of an engine with a plan: the scheduler that its configuration asks for."""
    kind = CompressedAsyncScheduler if vllm_config.scheduler_config.async_scheduling else CompressedScheduler
    scheduler = kind(vllm_config=vllm_config, **kwargs)
    if warning := version_warning():
        log.warning("%s", warning)
    log.info("\n".join(capacity_lines(scheduler.plan, scheduler.num_pages, scheduler.max_model_len)))
    return scheduler
