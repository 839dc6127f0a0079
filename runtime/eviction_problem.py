"""Small ragged problems for the generated eviction kernels of a plan, run and compared with the reference.

What makes them hard on purpose: first, middle and last chunks, a chunk of one token, requests without one, caches that shrink or
keep everything, more candidates than one program has, past tokens in scattered slots, most scores tied, NaN, infinities and
negative zeros among them, pages in scattered order, and a pool of garbage wherever no token lies. Pools are compared to the byte.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from tangram_plan.ir import EvictionRole, Plan, eviction_kernel_name, pages

from .eviction import Eviction, make_chunks
from .eviction_reference import evict, key_anchor_scores
from .generated_kernels import GeneratedKernels, KernelRun
from .head_tables import HeadTables
from .kernel_problem import max_error, sample_heads, sample_layers
from .reference import PageTable, local_heads, page_views, slots_of, torch_dtype

ODD_SCORES = (float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-45, 1.0, 0.5, -0.5)
SCORED_TOKENS = 150  # of the scorer's check
SMALL_CANDIDATES = 140  # of a pair, roughly: the interpreter is slow
EVICTING = (EvictionRole.HISTOGRAM, EvictionRole.PLACE, EvictionRole.COPY)


class Request(NamedTuple):
    """One request of a step."""

    chunk_start: int  # tokens before the chunk
    chunk_tokens: int
    held: tuple[int, ...]  # tokens in the cache before the chunk, per head group
    kept: tuple[int, ...]  # tokens that stay, per head group


def request_by_law(plan: Plan, prompt_tokens: int, chunk_start: int, chunk_tokens: int) -> Request:
    """A request that keeps what the page law says, before the chunk and after it."""
    held, kept = (
        tuple(plan.group_tokens(group_id, prompt_tokens, total) for group_id in range(len(plan.grouping.groups)))
        for total in (chunk_start, chunk_start + chunk_tokens)
    )
    return Request(chunk_start, chunk_tokens, held, kept)


def request_of_any(plan: Plan, chunk_start: int, chunk_tokens: int, held: int, kept: int) -> Request:
    """A request whose groups all hold and keep so many tokens, whatever their law."""
    num_groups = len(plan.grouping.groups)
    return Request(chunk_start, chunk_tokens, (held,) * num_groups, (kept,) * num_groups)


@dataclass(frozen=True)
class Problem:
    """Inputs of one step for some KV heads of one layer and rank; C tokens of all chunks, D elements a head.

    Args:
        rank: whose KV heads.
        layer: theirs.
        heads: local KV heads.
        requests: of the step.
        k: [C, len(heads), D], keys of the chunks.
        v: the same, their values.
        scores: float32 [len(heads), C], theirs.
        pool: flat, before the step.
        page_table: of the batch.
        expected_pool: flat, after the step, by the reference.
    """

    rank: int
    layer: int
    heads: tuple[int, ...]
    requests: tuple[Request, ...]
    k: torch.Tensor
    v: torch.Tensor
    scores: torch.Tensor
    pool: torch.Tensor
    page_table: PageTable
    expected_pool: torch.Tensor


def make_problem(
    plan: Plan,
    requests: Sequence[Request],
    *,
    layer: int = 0,
    rank: int = 0,
    heads: Sequence[int] | None = None,
    odd_scores: float = 0.7,
    seed: int = 0,
) -> Problem:
    """Random tokens in random slots of a pool that is garbage elsewhere, random chunks, and what the reference makes of them.

    Args:
        plan: gives page geometry, sinks and window.
        requests: of the step.
        layer: whose KV heads.
        rank: whose.
        heads: local KV heads; by default all of them.
        odd_scores: part of the scores that is one of `ODD_SCORES`; the others hardly tie.
        seed: of the random numbers.
    """
    all_places = local_heads(plan, rank, layer)
    heads = tuple(range(len(all_places)) if heads is None else heads)
    places = tuple(all_places[head] for head in heads)
    generator = torch.Generator().manual_seed(seed)
    layout, dtype = plan.layout, torch_dtype(plan.layout)
    odd = torch.tensor(ODD_SCORES)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def score(*shape: int) -> torch.Tensor:
        chosen = odd[torch.randint(len(odd), shape, generator=generator)]
        is_odd = torch.rand(shape, generator=generator) < odd_scores
        return torch.where(is_odd, chosen, torch.randn(shape, generator=generator))

    page_table = _scattered_pages(plan, requests, {place.group_id for place in places}, generator)
    num_pages = 1 + page_table.page_ids.numel()  # nobody has page 0
    garbage = torch.randint(256, (num_pages * layout.page_bytes,), dtype=torch.uint8, generator=generator)
    pool = garbage.view(dtype)
    views = page_views(pool, layout)
    for request, (chunk_start, _, held, _) in enumerate(requests):
        for group_id, column in places:
            tokens_per_page = layout.tokens_per_page(plan.grouping.groups[group_id].num_members)
            page_ids = page_table.pages(request * len(held) + group_id)
            where = slots_of(page_ids, column, tokens_per_page, held[group_id])
            views.keys[where] = normal(held[group_id], layout.head_dim)
            views.values[where] = normal(held[group_id], layout.head_dim)
            positions = torch.randperm(chunk_start, generator=generator)[: held[group_id]]
            views.positions[where] = positions.to(torch.int32)
            views.scores[where] = score(held[group_id])
    num_tokens = sum(request.chunk_tokens for request in requests)
    k, v = (normal(num_tokens, len(heads), layout.head_dim) for _ in range(2))
    scores, expected_pool = score(len(heads), num_tokens), pool.clone()
    evict(plan, places, k, v, scores, expected_pool, page_table, *_columns(requests))
    return Problem(rank, layer, heads, tuple(requests), k, v, scores, pool, page_table, expected_pool)


def eviction_error(kernels: GeneratedKernels, problem: Problem) -> float:
    """0 if the kernels leave the pool as the reference does, to the byte, else infinite. They run twice on the same buffers."""
    device = kernels.device
    table = PageTable(*(part.to(device) for part in problem.page_table))
    chunks = make_chunks(*_columns(problem.requests), device)
    eviction = Eviction(
        kernels,
        chunks.requests.numel(),
        chunks.max_candidates,
        rank=problem.rank,
        tables=_tables_of_heads(kernels.tables, problem),
    )
    k, v, scores = (part.to(device) for part in (problem.k, problem.v, problem.scores))
    for _ in range(2):
        pool = problem.pool.to(device, copy=True)
        eviction.evict(problem.layer, k, v, scores, pool, table, chunks)
        if not torch.equal(pool.cpu().view(torch.uint8), problem.expected_pool.view(torch.uint8)):
            return float("inf")
    return 0.0


def score_error(kernels: GeneratedKernels, num_tokens: int, num_kv_heads: int, seed: int = 0) -> float:
    """Largest relative error of a KV head's key-anchor scores."""
    layout, device = kernels.plan.layout, kernels.device
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randn(num_kv_heads, layout.head_dim, generator=generator)
    k = (torch.randn(num_tokens, num_kv_heads, layout.head_dim, generator=generator) + anchors).to(torch_dtype(layout))
    k[:1] = 0.0
    scores = torch.full((num_kv_heads, num_tokens), float("nan"), device=device)
    name = eviction_kernel_name(EvictionRole.SCORE_KEY_ANCHOR, layout)
    kernels.modules[name].launch(k.to(device), anchors.to(device), scores)
    return max_error(scores.cpu(), key_anchor_scores(k, anchors))


def hard_requests(plan: Plan, most: int) -> list[Request]:
    """Requests of all kinds, with about `most` candidates each.

    Args:
        plan: gives the law.
        most: candidates.
    """
    whole, half = most - 1, most // 2
    return [
        request_by_law(plan, whole, 0, half),
        request_by_law(plan, most + 50, most - 30, 0),
        request_by_law(plan, whole, half, whole - half),
        request_by_law(plan, most, most - 1, 1),
        request_of_any(plan, half, half, half - 3, 2 * half - 3),
        request_of_any(plan, 0, 0, 0, 0),
        request_of_any(plan, most, 5, half, half // 3),
        request_of_any(plan, most, 21, 1, 1),
    ]


def eviction_runs(kernels: GeneratedKernels) -> Iterator[KernelRun]:
    """The check of the eviction kernels of an artefact."""
    plan = kernels.plan
    *evicting, scoring = (
        eviction_kernel_name(role, plan.layout) for role in (*EVICTING, EvictionRole.SCORE_KEY_ANCHOR)
    )
    yield KernelRun(
        (scoring,), partial(score_error, kernels, SCORED_TOKENS, len(local_heads(plan, 0, sample_layers(plan)[0])))
    )
    block_candidates = int(kernels.modules[evicting[0]].BLOCK_CANDIDATES.value)
    requests = hard_requests(plan, SMALL_CANDIDATES)
    for layer in sample_layers(plan):
        heads = sample_heads(plan, local_heads(plan, 0, layer))
        problem_of = partial(make_problem, plan, layer=layer, seed=layer)
        yield KernelRun(tuple(evicting), partial(_run, kernels, partial(problem_of, requests, heads=heads)))
        requests = requests[:3]  # the other layers differ in their tables alone
    many = request_of_any(plan, 2 * block_candidates, 150, block_candidates + 20, block_candidates - 120)
    nothing = [request_of_any(plan, 9, 0, 9, 9)]
    for requests in ([many], nothing):
        yield KernelRun(tuple(evicting), partial(_run, kernels, partial(problem_of, requests, heads=heads[:1])))


def _run(kernels: GeneratedKernels, make: "partial[Problem]") -> float:
    return eviction_error(kernels, make())


def _columns(
    requests: Sequence[Request],
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[int], list[int]]:
    """(held, kept, chunk_start, chunk_tokens), each by request."""
    return (
        [request.held for request in requests],
        [request.kept for request in requests],
        [request.chunk_start for request in requests],
        [request.chunk_tokens for request in requests],
    )


def _scattered_pages(
    plan: Plan, requests: Sequence[Request], groups: set[int], generator: torch.Generator
) -> PageTable:
    """Pages for what is held and what stays, in random order, from page 1 on; only of the groups that matter."""
    counts = [
        pages(max(before, after), plan.layout.tokens_per_page(group.num_members)) if group_id in groups else 0
        for request in requests
        for group_id, (group, before, after) in enumerate(
            zip(plan.grouping.groups, request.held, request.kept, strict=True)
        )
    ]
    page_indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
    page_indptr[1:] = torch.tensor(counts, dtype=torch.int32).cumsum(0)
    return PageTable(1 + torch.randperm(sum(counts), generator=generator).to(torch.int32), page_indptr)


def _tables_of_heads(tables: HeadTables, problem: Problem) -> HeadTables:
    """Head tables of a problem's KV heads alone."""
    key = problem.rank, problem.layer
    return replace(
        tables,
        planned_layers=(problem.layer,),
        group_id={key: tuple(tables.group_id[key][head] for head in problem.heads)},
        column={key: tuple(tables.column[key][head] for head in problem.heads)},
    )
