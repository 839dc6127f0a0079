"""Small ragged prefill problems for the generated kernels of a plan, run and compared with the reference.

What makes them hard on purpose: requests without a past, without a chunk and with a chunk of one token, pasts that end just
before, at and after the edge of a page, pages in scattered order, and a pool in which every slot without a token is
NaN. The lengths of the groups owe nothing to the page law: kernels must take them as they are given.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from tangram_plan.ir import Plan, gather_kernel_name, prefill_kernel_name

from .generated_kernels import GeneratedKernels, KernelRun
from .head_tables import HeadTables
from .kernel_problem import max_error, sample_heads, sample_layers
from .library_attention import flash_attention_3
from .prefill import PastGather, Prefill, PrefillPath, PrefillStep, make_prefill_step
from .prefill_reference import prefill_attention
from .reference import HeadPlace, PageTable, local_heads, page_views, slots_of, torch_dtype

MAX_PAST = 150  # of a request, roughly: the interpreter is slow
EDGES = (-1, 0, 1)  # about the end of a page, in tokens


class Request(NamedTuple):
    """One request of a step."""

    past: int  # tokens of its shortest group; others hold more, if it has a past at all
    chunk: int  # tokens


@dataclass(frozen=True)
class Problem:
    """Inputs of the attention of some chunks for some KV heads of one layer and rank; D elements a head.

    Args:
        rank: whose KV heads.
        layer: theirs.
        heads: local KV heads.
        places: where the plan says that they lie.
        q: [num_tokens, len(places) * gqa_ratio, D].
        k: [num_tokens, len(places), D], the chunks' keys.
        v: the same, their values.
        sinks: float32 [len(places) * gqa_ratio], if the model has them.
        pool: flat.
        page_table: of the batch.
        step: its chunks, on the CPU.
        expected: float64 [num_tokens, len(places) * gqa_ratio, D], by the reference.
    """

    rank: int
    layer: int
    heads: tuple[int, ...]
    places: tuple[HeadPlace, ...]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    pool: torch.Tensor
    page_table: PageTable
    step: PrefillStep
    expected: torch.Tensor


def make_problem(
    plan: Plan,
    requests: Sequence[Request],
    *,
    layer: int = 0,
    rank: int = 0,
    heads: Sequence[int] | None = None,
    gqa_ratio: int | None = None,
    seed: int = 0,
) -> Problem:
    """Random keys and values in a pool that is NaN elsewhere, and what attention makes of them.

    Args:
        plan: gives page geometry and the form of attention.
        requests: of the step.
        layer: whose KV heads.
        rank: whose.
        heads: local KV heads; by default all of them.
        gqa_ratio: query heads per KV head; by default the layer's own.
        seed: of the random numbers.
    """
    all_places = local_heads(plan, rank, layer)
    heads = tuple(range(len(all_places)) if heads is None else heads)
    places = tuple(all_places[head] for head in heads)
    gqa_ratio = plan.model.layers[layer].gqa_ratio if gqa_ratio is None else gqa_ratio
    generator = torch.Generator().manual_seed(seed)
    layout, dtype = plan.layout, torch_dtype(plan.layout)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    step = make_prefill_step(_held(plan, requests), [request.chunk for request in requests], "cpu")
    pool, page_table = _filled_pool(plan, places, step, generator)
    num_tokens = step.chunk_starts[-1]
    q = normal(num_tokens, len(places) * gqa_ratio, layout.head_dim)
    k, v = (normal(num_tokens, len(places), layout.head_dim) for _ in range(2))
    has_sinks = plan.model.attention.has_sinks
    sinks = torch.randn(len(places) * gqa_ratio, generator=generator) if has_sinks else None
    lengths = step.held_tokens, step.chunk_starts
    expected = prefill_attention(
        plan, places, q, k, v, pool, page_table, *lengths, sinks=sinks, compute_dtype=torch.float64
    )
    return Problem(rank, layer, heads, places, q, k, v, sinks, pool, page_table, step, expected)


def _held(plan: Plan, requests: Sequence[Request]) -> list[list[int]]:
    """Tokens of every request's past, per group: groups differ, by up to a page, and by amounts that are no power of two."""
    groups = range(len(plan.grouping.groups))
    return [[past + 13 * (group_id % 5) if past else 0 for group_id in groups] for past, _ in requests]


def _filled_pool(
    plan: Plan, places: Sequence[HeadPlace], step: PrefillStep, generator: torch.Generator
) -> tuple[torch.Tensor, PageTable]:
    """A pool that holds the past of some KV heads and is NaN elsewhere; nobody has page 0."""
    layout, groups = plan.layout, plan.grouping.groups
    in_use = {place.group_id for place in places}
    tokens_per_page = [layout.tokens_per_page(group.num_members) for group in groups]
    counts = [
        -(-tokens // tokens_per_page[group_id]) if group_id in in_use else 0
        for row in step.held_tokens
        for group_id, tokens in enumerate(row)
    ]
    page_ids = 1 + torch.randperm(sum(counts), generator=generator)
    page_indptr = torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32)
    page_table = PageTable(page_ids.to(torch.int32), page_indptr)
    pool = torch.full(((1 + sum(counts)) * layout.page_elements,), float("nan"), dtype=torch_dtype(layout))
    views = page_views(pool, layout)
    for request, row in enumerate(step.held_tokens):
        for group_id, column in places:
            pages = page_table.pages(request * len(groups) + group_id)
            where = slots_of(pages, column, tokens_per_page[group_id], row[group_id])
            for part in views.keys, views.values:
                part[where] = torch.randn(row[group_id], layout.head_dim, generator=generator).to(pool.dtype)
    return pool, page_table


def prefill_error(kernels: GeneratedKernels, problem: Problem, path: PrefillPath) -> float:
    """Largest relative error of a problem's output by one path."""
    tables, device = _tables_of_heads(kernels.tables, problem), kernels.device
    prefill = Prefill(kernels, _room(problem), path=path, rank=problem.rank, tables=tables)
    q = _strided(problem.q, device)
    k, v, pool, table, step = _inputs(problem, device)
    sinks = None if problem.sinks is None else problem.sinks.to(device)
    out = torch.full_like(problem.q, float("nan"), device=device)
    prefill.attend(problem.layer, q, k, v, pool, table, step, out, sinks=sinks)
    return max_error(out.cpu(), problem.expected)


def gather_error(kernels: GeneratedKernels, problem: Problem) -> float:
    """0 if every request's past and chunk are copied bit by bit, KV head after KV head; else infinite."""
    tables = _tables_of_heads(kernels.tables, problem)
    past = PastGather(kernels, _room(problem), rank=problem.rank, tables=tables)
    inputs = _inputs(problem, kernels.device)
    for request, (start, end) in enumerate(pairwise(problem.step.chunk_starts)):
        if start == end:
            continue
        found = past.gather(problem.layer, request, *inputs)
        parts = [_past_and_chunk(kernels.plan, problem, request, *column) for column in enumerate(problem.places)]
        keys, values = (torch.cat(part) for part in zip(*parts, strict=True))
        indptr = list(accumulate((len(key) for key, _ in parts), initial=0))
        is_right = torch.equal(found.keys[:, 0].cpu(), keys) and torch.equal(found.values[:, 0].cpu(), values)
        if not is_right or found.kv_indptr.tolist() != indptr:
            return float("inf")
    return 0.0


def _past_and_chunk(
    plan: Plan, problem: Problem, request: int, place: int, head_place: HeadPlace
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one request and KV head, past first."""
    group_id, column = head_place
    groups = plan.grouping.groups
    pages = problem.page_table.pages(request * len(groups) + group_id)
    tokens_per_page = plan.layout.tokens_per_page(groups[group_id].num_members)
    where = slots_of(pages, column, tokens_per_page, problem.step.held_tokens[request][group_id])
    views = page_views(problem.pool, plan.layout)
    rows = slice(*problem.step.chunk_starts[request : request + 2])
    keys, values = (
        torch.cat([views.keys[where], problem.k[rows, place]]),
        torch.cat([views.values[where], problem.v[rows, place]]),
    )
    return keys, values


def _room(problem: Problem) -> int:
    """Tokens of past and chunk over all KV heads of a problem, of the request that has most."""
    step = problem.step
    return max(
        sum(held[place.group_id] + end - start for place in problem.places)
        for held, (start, end) in zip(step.held_tokens, pairwise(step.chunk_starts), strict=True)
    )


def _inputs(problem: Problem, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PageTable, PrefillStep]:
    """Keys, values, pool, page table and chunks on a device."""
    step = problem.step
    return (
        _strided(problem.k, device),
        _strided(problem.v, device),
        problem.pool.to(device),
        PageTable(*(part.to(device) for part in problem.page_table)),
        step._replace(held=step.held.to(device), chunk_indptr=step.chunk_indptr.to(device)),
    )


def _strided(part: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor on a device, whose rows lie apart, as those of a model's joint projection do."""
    apart = torch.full((len(part), part.shape[1] + 1, part.shape[2]), float("nan"), dtype=part.dtype, device=device)
    apart[:, :-1] = part.to(device)
    return apart[:, :-1]


def edge_requests(plan: Plan, places: Sequence[HeadPlace], step_tokens: int) -> list[Request]:
    """Requests whose pasts end about the edge of a page, and whose chunks are of all kinds."""
    sizes = {plan.layout.tokens_per_page(plan.grouping.groups[place.group_id].num_members) for place in places}
    edge = min(MAX_PAST, min(sizes))
    return [
        Request(0, step_tokens),
        Request(0, 1),
        Request(37, 0),
        *(Request(edge + past, chunk) for past, chunk in zip(EDGES, (1, 3, step_tokens + 2), strict=True)),
        Request(0, 0),
        Request(MAX_PAST, 17),
        Request(0, 9),
    ]


def prefill_runs(kernels: GeneratedKernels) -> Iterator[KernelRun]:
    """The check of the prefill kernels of an artefact."""
    plan = kernels.plan
    form = plan.model.attention
    is_torch_enough = form.logit_softcap is None and not form.has_sinks
    has_library = is_torch_enough or flash_attention_3(plan.layout, form, kernels.device) is not None
    for gqa_ratio in sorted(_gqa_ratios(kernels)):
        attention, gather = prefill_kernel_name(plan.layout, gqa_ratio), gather_kernel_name(plan.layout)
        step_tokens = int(kernels.modules[attention].STEP_TOKENS.value)
        for number, layer in enumerate(sample_layers(plan)):
            places = local_heads(plan, 0, layer)
            heads = sample_heads(plan, places)
            steps = [edge_requests(plan, [places[head] for head in heads], step_tokens), [Request(9, 0), Request(0, 0)]]
            if number:  # further layers differ in their heads alone
                steps = [[Request(step_tokens, 3), Request(0, 5)]]
            for requests in steps:
                problem = make_problem(plan, requests, layer=layer, heads=heads, gqa_ratio=gqa_ratio, seed=layer)
                yield KernelRun((gather,), partial(gather_error, kernels, problem))
                yield KernelRun((attention,), partial(prefill_error, kernels, problem, PrefillPath.PAGED))
                if has_library:
                    yield KernelRun((gather,), partial(prefill_error, kernels, problem, PrefillPath.GATHER))


def _gqa_ratios(kernels: GeneratedKernels) -> set[int]:
    """Query heads per KV head that prefill kernels were generated for."""
    return {int(module.GQA_RATIO.value) for name, module in kernels.modules.items() if name.startswith("prefill_")}


def _tables_of_heads(tables: HeadTables, problem: Problem) -> HeadTables:
    """Head tables of a problem's KV heads alone."""
    key = problem.rank, problem.layer
    return replace(
        tables,
        planned_layers=(problem.layer,),
        group_id={key: tuple(tables.group_id[key][head] for head in problem.heads)},
        column={key: tuple(tables.column[key][head] for head in problem.heads)},
    )
