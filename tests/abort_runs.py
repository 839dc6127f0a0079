"""The scheduler of an engine, and nobody who computes: requests are aborted between steps and inside them.

`python -m tests.abort_runs MODEL ARTEFACT ABORTS ASYNC` prints what it found as JSON. It runs in a process of its own, as engines do.
"""

import json
import random
import sys
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

NUM_PAGES = 500  # too few for all that run: some are preempted
MAX_TOKENS = 1024


@dataclass
class Aborted:
    """What came of it.

    Args:
        num_pages: of the pool, the null page not counted.
        free_pages: in the end.
        left_over: requests that the manager of pages still knows in the end.
        steps: that were scheduled.
        wrong_steps: of these, after which another number of pages was free than the plan says.
        in_a_step: aborts of requests that were being computed.
        in_a_prompt: aborts of requests that were in the middle of their prompt.
        unseen: aborts of requests that never ran.
        preemptions: of all requests.
    """

    num_pages: int = NUM_PAGES
    free_pages: int = -1
    left_over: int = -1
    steps: int = 0
    wrong_steps: int = 0
    in_a_step: int = 0
    in_a_prompt: int = 0
    unseen: int = 0
    preemptions: int = 0


def _scheduler(model: str, artefact: str, *, is_async: bool) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from tangram_plan.runtime.engine_args import engine_args
    from tangram_plan.runtime.reference import torch_dtype
    from tangram_plan.runtime.vllm_plugin.scheduler import make_scheduler
    from tangram_plan.runtime.vllm_plugin.spec import PageSpec, load_plan, spec_head_size

    arguments = {
        "model": model,
        "max_model_len": MAX_TOKENS,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "async_scheduling": is_async,
        "enforce_eager": True,
    }
    config = EngineArgs(**engine_args(artefact, **arguments)).create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_PAGES + 1
    layout = load_plan(artefact).layout
    spec = PageSpec(
        block_size=layout.page_slots,
        num_kv_heads=1,
        head_size=spec_head_size(layout),
        dtype=torch_dtype(layout),
        artefact=artefact,
    )
    pool = KVCacheConfig(NUM_PAGES + 1, [], [KVCacheGroupSpec(["pool"], spec)])
    return make_scheduler(
        config,
        kv_cache_config=pool,
        structured_output_manager=StructuredOutputManager(config),
        block_size=layout.page_slots,
    )


class Engine:
    """Schedules steps, and answers in the model's place; with async scheduling a step is scheduled before the last one is answered."""

    def __init__(self, scheduler: Any, *, is_async: bool) -> None:
        self.scheduler, self.depth = scheduler, 2 if is_async else 1
        self.in_flight: deque[tuple[Any, dict[str, list[int]]]] = deque()
        self.found = Aborted()

    def schedule(self) -> None:
        """A step, and a look at the pool."""
        from tangram_plan.ir import reserve

        output = self.scheduler.schedule()
        sampled = {
            name: [] if self.scheduler.requests[name].is_prefill_chunk else [1] for name in output.num_scheduled_tokens
        }
        self.in_flight.append((output, sampled))
        held = [
            reserve(self.scheduler.plan, request.num_prompt_tokens, request.num_computed_tokens).num_pages
            for request in self.scheduler.running
        ]
        self.found.steps += 1
        self.found.wrong_steps += self.free_pages() != NUM_PAGES - sum(held)
        self.found.preemptions += len(output.preempted_req_ids or ())

    def answer(self, most: int) -> None:
        """Steps, until at most so many are in flight."""
        from vllm.v1.outputs import ModelRunnerOutput

        while len(self.in_flight) > most:
            output, sampled = self.in_flight.popleft()
            index = {name: place for place, name in enumerate(sampled)}
            self.scheduler.update_from_output(output, ModelRunnerOutput(list(sampled), index, list(sampled.values())))

    def abort(self, name: str) -> None:
        """A request, as when its client leaves; it may have ended by itself."""
        from vllm.v1.request import RequestStatus

        request = self.scheduler.requests.get(name)
        if request is None:
            return
        self.found.in_a_step += any(name in sampled for _, sampled in self.in_flight)
        self.found.in_a_prompt += 0 < request.num_computed_tokens < request.num_prompt_tokens
        self.found.unseen += request.status == RequestStatus.WAITING
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def free_pages(self) -> int:
        """Of the pool."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def _run(engine: Engine, aborts: int) -> Aborted:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    chance = random.Random(0)
    alive: list[str] = []
    for number in range(aborts):
        params = SamplingParams(max_tokens=chance.randint(2, 128), ignore_eos=True)
        prompt = [1] * chance.choice([chance.randint(1, 60), chance.randint(60, 800)])
        alive.append(str(number))
        engine.scheduler.add_request(Request(alive[-1], prompt, params, None))
        for _ in range(chance.randint(0, 3)):
            engine.schedule()
            if chance.random() < 0.5 and alive:
                engine.abort(alive.pop(chance.randrange(len(alive))))
            engine.answer(engine.depth - 1)
        while len(alive) > chance.randint(0, 24):
            engine.abort(alive.pop(chance.randrange(len(alive))))
    for name in alive:
        engine.abort(name)
    engine.answer(0)
    (manager,) = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    engine.found.free_pages = engine.free_pages()
    engine.found.left_over = sum(bool(pages) for pages in manager.req_to_blocks.values()) + len(manager._max_tokens)
    return engine.found


def _main(model: str, artefact: str, aborts: str, is_async: str) -> None:
    scheduler = _scheduler(model, artefact, is_async=is_async == "async")
    print(json.dumps(asdict(_run(Engine(scheduler, is_async=is_async == "async"), int(aborts)))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
