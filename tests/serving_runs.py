"""A small engine: requests that come, are computed chunk by chunk beside others that decode, are preempted and end.

Every step goes through the generated kernels and through the plain-torch reference, with the same random queries, keys and values.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from tangram_plan.codegen import emit
from tangram_plan.ir import Plan, most_pages, next_boundary, reserve
from tangram_plan.runtime.batch import Batch
from tangram_plan.runtime.generated_kernels import GeneratedKernels
from tangram_plan.runtime.kernel_attention import KernelAttention
from tangram_plan.runtime.kernel_problem import max_error
from tangram_plan.runtime.reference import local_heads, page_views, torch_dtype
from tangram_plan.runtime.reference_attention import ReferenceAttention
from tangram_plan.runtime.serving_scorers import KeyAnchor, Recent, ServingScorer

PADDED_ROWS = 2  # of steps in which all requests decode, as in a CUDA graph


class Arrival(NamedTuple):
    """A request, and when it comes."""

    step: int
    prompt_tokens: int
    new_tokens: int
    preempted_at: int = -1  # tokens after which its pages are taken, once


@dataclass
class Running:
    """A request in flight."""

    prompt_tokens: int
    last_token: int
    preempted_at: int
    num_tokens: int = 0
    pages: list[int] = field(default_factory=list)

    def next_tokens(self, plan: Plan) -> int:
        """Of the next step; a preempted request's answer is computed again in one chunk."""
        if self.num_tokens < self.prompt_tokens:
            return next_boundary(self.prompt_tokens, self.num_tokens, plan.compress_chunk_tokens) - self.num_tokens
        return max(1, self.preempted_at - self.num_tokens) if self.preempted_at > 0 else 1


class Engine:
    """Pages and steps."""

    def __init__(self, plan: Plan, arrivals: Sequence[Arrival], num_pages: int, max_chunks: int) -> None:
        self.plan, self.arrivals, self.max_chunks = plan, arrivals, max_chunks
        self.free = (1 + torch.randperm(num_pages, generator=torch.Generator().manual_seed(1))).tolist()

    def steps(self) -> Iterator[list[tuple[Running, int]]]:
        """(request, tokens) of every step, those that decode first; then, of a step, requests are as long as it leaves them."""
        running: list[Running] = []
        step = 0
        while running or step <= max(arrival.step for arrival in self.arrivals):
            running += [
                Running(arrival.prompt_tokens, arrival.prompt_tokens + arrival.new_tokens, arrival.preempted_at)
                for arrival in self.arrivals
                if arrival.step == step
            ]
            wanted = [(request, request.next_tokens(self.plan)) for request in running]
            decodes = [(request, new) for request, new in wanted if new == 1 and request.num_tokens]
            chunks = [(request, new) for request, new in wanted if (request, new) not in decodes][: self.max_chunks]
            for request, new in [*decodes, *chunks]:
                request.num_tokens += new
                num_pages = reserve(self.plan, request.prompt_tokens, request.num_tokens).num_pages
                request.pages += [self.free.pop() for _ in range(num_pages - len(request.pages))]
            yield [*decodes, *chunks]
            for request in running:
                is_preempted = request.num_tokens == request.preempted_at
                if is_preempted or request.num_tokens == request.last_token:
                    self.free += reversed(request.pages)
                    request.pages = []
                if is_preempted:
                    request.num_tokens, request.preempted_at = 0, -request.preempted_at
            running = [request for request in running if request.num_tokens < request.last_token]
            step += 1


def run_engine(
    plan: Plan,
    arrivals: Sequence[Arrival],
    *,
    device: str = "cpu",
    scorer: str = "recent",
    max_chunks: int = 10,
    rank: int = 0,
) -> float:
    """Largest relative error of an output; infinite where a byte of the pool is another than the reference's.

    Slots that nobody wrote are NaN.
    """
    with tempfile.TemporaryDirectory() as directory:
        emit(plan, "0" * 64, Path(directory))
        kernels = GeneratedKernels(Path(directory), plan, device)
    max_tokens = max(arrival.prompt_tokens + arrival.new_tokens for arrival in arrivals)
    width = most_pages(plan, max_tokens)
    max_requests = len(arrivals) + PADDED_ROWS
    heads = {layer: len(local_heads(plan, rank, layer)) for layer in plan.model.planned_layers}
    generator = torch.Generator().manual_seed(0)
    dtype = torch_dtype(plan.layout)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    anchors = {layer: normal(count, plan.layout.head_dim).float() for layer, count in heads.items()}
    on_device: ServingScorer = Recent()
    on_host: ServingScorer = Recent()
    if scorer == "key_anchor":
        on_host = KeyAnchor(anchors)
        on_device = KeyAnchor({layer: anchor.to(device) for layer, anchor in anchors.items()})
    reference = ReferenceAttention(plan, rank, on_host)
    attention = KernelAttention(
        kernels,
        on_device,
        rank=rank,
        max_requests=max_requests,
        max_tokens=max_tokens,
        max_chunk_tokens=max(plan.compress_chunk_tokens + 1, plan.max_new_tokens),
    )
    engine = Engine(plan, arrivals, width * len(arrivals), max_chunks)
    pool = torch.full(((1 + len(engine.free)) * plan.layout.page_elements,), float("nan"), dtype=dtype)
    device_pool = pool.to(device, copy=True)
    attention.warm_up(device_pool)
    device_rows = torch.zeros(max_requests, width, dtype=torch.int32, device=device)
    worst = 0.0
    for requests in engine.steps():
        if not requests:
            continue
        padding = PADDED_ROWS if all(new == 1 for _, new in requests) else 0
        rows = torch.zeros(len(requests) + padding, width, dtype=torch.int32)
        for row, (request, _) in zip(rows, requests, strict=False):
            row[: len(request.pages)] = torch.tensor(request.pages)
        query_start = [0]
        for _, new in requests:
            query_start.append(query_start[-1] + new)
        query_start += range(query_start[-1] + 1, query_start[-1] + 1 + padding)
        batch = Batch(
            [request.prompt_tokens for request, _ in requests] + [0] * padding,
            [request.num_tokens for request, _ in requests] + [0] * padding,
            query_start,
        )
        device_rows[: len(rows)] = rows.to(device)
        host_step, device_step = reference.begin(batch, rows), attention.begin(batch, device_rows)
        for layer, count in heads.items():
            num_q_heads = count * plan.model.layers[layer].gqa_ratio
            q, k, v = (normal(query_start[-1], size, plan.layout.head_dim) for size in (num_q_heads, count, count))
            out, found = torch.full_like(q, float("nan")), torch.full_like(q, float("nan"), device=device)
            reference.attend(layer, q, k, v, pool, host_step, out)
            inputs = q.to(device), k.to(device), v.to(device)
            attention.attend(layer, *inputs, device_pool, device_step, found)
            worst = max(worst, max_error(found.cpu(), out))
        if not _same_pages(plan, pool, device_pool.cpu(), is_exact=scorer == "recent"):
            return float("inf")
    return worst


def _same_pages(plan: Plan, pool: torch.Tensor, other: torch.Tensor, *, is_exact: bool) -> bool:
    """Whether all pages but page 0 hold the same tokens, and the same scores if they can be the same to the bit."""
    one, two = ([view[1:] for view in page_views(part, plan.layout)] for part in (pool, other))
    same = [
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one, two, strict=True)
    ]
    scores = torch.allclose(one[-1], two[-1], atol=1e-5, equal_nan=True)
    return all(same[:-1]) and (same[-1] if is_exact else scores)
