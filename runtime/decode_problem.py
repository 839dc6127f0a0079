"""Small ragged decode problems for the generated kernels of a plan, run and compared with the reference.

What makes them hard on purpose: requests of 0, 1 and about a page and a tile of tokens, a prompt that is only partly computed,
padded rows, pages in scattered order, fewer tiles than CTAs, more splits than tokens, and a pool in which every slot without a
token is NaN, the new token's slot among them. Tables come from the artefact's head tables, as at serving time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from tangram_plan.ir import Plan, Schedule, decode_kernel_name, plan_kernel_name

from .decode import DecodeStep
from .generated_kernels import GeneratedKernels, KernelRun
from .head_tables import HeadTables, int32
from .kernel_problem import max_error, sample_heads, sample_layers
from .reference import (
    HeadPlace,
    PageTable,
    decode_attention,
    lay_out_pages,
    local_heads,
    page_views,
    slots_of,
    torch_dtype,
)

MAX_TOKENS = 600  # of a request, roughly: the interpreter is slow
FEW_CTAS = 7  # fewer than tiles, so that a CTA crosses from pair to pair
MANY_TILES = 20  # of a pair
MANY_CTAS = 300  # so many that every tile is a segment, and partial results are merged in blocks
MAX_SPLITS = 5  # of a KV head, of those that were planned
MANY_PAIRS = 1100  # more than are planned at once
UNEVEN_SPLITS = (5, 2, 4, 3)  # of the KV heads in turn: whatever the plan has, some are shared and some stay empty

Batch = Sequence[tuple[int, int]]  # (prompt tokens, tokens so far) per request


@dataclass(frozen=True)
class Problem:
    """Inputs of one decode step for some KV heads of one layer and rank; R requests, D elements a head.

    Args:
        rank: whose KV heads.
        layer: theirs.
        heads: local KV heads.
        places: where the plan says that they lie.
        q: [R, len(places) * gqa_ratio, D].
        k: [R, len(places), D], the new tokens' keys.
        v: the same, their values.
        score: float32 [R, len(places)], theirs.
        sinks: float32 [len(places) * gqa_ratio], if the model has them.
        pool: flat, before the step.
        page_table: of the batch.
        prompt_tokens: int32 [R].
        num_tokens: int32 [R].
        expected: float64 [R, len(places) * gqa_ratio, D], by the reference.
        expected_pool: flat, after the step.
    """

    rank: int
    layer: int
    heads: tuple[int, ...]
    places: tuple[HeadPlace, ...]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    score: torch.Tensor
    sinks: torch.Tensor | None
    pool: torch.Tensor
    page_table: PageTable
    prompt_tokens: torch.Tensor
    num_tokens: torch.Tensor
    expected: torch.Tensor
    expected_pool: torch.Tensor

    @property
    def batch(self) -> Batch:
        """(prompt tokens, tokens so far) per request."""
        return list(zip(self.prompt_tokens.tolist(), self.num_tokens.tolist(), strict=True))


def make_problem(
    plan: Plan,
    batch: Batch,
    *,
    layer: int = 0,
    rank: int = 0,
    heads: Sequence[int] | None = None,
    gqa_ratio: int | None = None,
    seed: int = 0,
) -> Problem:
    """Random keys and values in a pool that is NaN elsewhere, a new token per request, and what attention makes of them.

    Args:
        plan: gives lengths and page geometry.
        batch: the requests.
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
        return torch.randn(shape, generator=generator)

    prompts, totals = [prompt for prompt, _ in batch], [total for _, total in batch]
    groups = {place.group_id for place in places}
    num_pages = sum(plan.group_pages(group_id, *request) for request in batch for group_id in groups)
    page_table = lay_out_pages(
        plan, prompts, totals, free_pages=1 + torch.randperm(num_pages, generator=generator), groups=groups
    )
    pool = torch.full(((1 + num_pages) * layout.page_elements,), float("nan"), dtype=dtype)  # nobody has page 0
    views = page_views(pool, layout)
    for request, lengths in enumerate(batch):
        for group_id, column in places:
            past = max(0, plan.group_tokens(group_id, *lengths) - 1)
            tokens_per_page = layout.tokens_per_page(plan.grouping.groups[group_id].num_members)
            page_ids = page_table.pages(request * len(plan.grouping.groups) + group_id)
            where = slots_of(page_ids, column, tokens_per_page, past)
            views.keys[where] = normal(past, layout.head_dim).to(dtype)
            views.values[where] = normal(past, layout.head_dim).to(dtype)
    q = normal(len(batch), len(places) * gqa_ratio, layout.head_dim).to(dtype)
    k, v = (normal(len(batch), len(places), layout.head_dim).to(dtype) for _ in range(2))
    score = normal(len(batch), len(places))
    sinks = normal(len(places) * gqa_ratio) if plan.model.attention.has_sinks else None
    expected_pool = pool.clone()
    expected = decode_attention(
        plan,
        places,
        q.double(),
        k,
        v,
        score,
        expected_pool,
        page_table,
        prompts,
        totals,
        sinks=sinks,
        compute_dtype=torch.float64,
    )
    return Problem(
        rank, layer, heads, places, q, k, v, score, sinks, pool, page_table, int32(prompts), int32(totals), expected, expected_pool
    )  # fmt: skip


def decode_error(
    kernels: GeneratedKernels,
    problem: Problem,
    schedule: Schedule,
    *,
    num_ctas: int = FEW_CTAS,
    splits: Sequence[int] | None = None,
) -> float:
    """Largest relative error of a problem's output; infinite if a byte of the pool is wrong after the step.

    The step runs twice on the same buffers, as steps do.
    """
    num_requests, device = len(problem.q), kernels.device
    tables = _tables_of_heads(kernels.tables, problem, num_requests, splits or [1] * len(problem.heads))
    step = DecodeStep(kernels, schedule, num_requests, rank=problem.rank, tables=tables, num_ctas=num_ctas)
    prompts, totals = problem.prompt_tokens.to(device), problem.num_tokens.to(device)
    table = PageTable(*(part.to(device) for part in problem.page_table))
    q, k, v, score = (part.to(device) for part in (problem.q, problem.k, problem.v, problem.score))
    sinks = None if problem.sinks is None else problem.sinks.to(device)
    worst = 0.0
    for _ in range(2):
        pool = problem.pool.to(device, copy=True)
        out = torch.full_like(problem.q, float("nan"), device=device)
        step.plan(prompts, totals, table.page_indptr)
        step.attend(problem.layer, q, k, v, score, pool, table, out, sinks=sinks)
        if not torch.equal(pool.cpu().view(torch.uint8), problem.expected_pool.view(torch.uint8)):
            return float("inf")
        worst = max(worst, max_error(out.cpu(), problem.expected))
    return worst


class Segment(NamedTuple):
    """What a row of `segments` says, but for the link to the CTA's next one."""

    request: int
    head: int
    start: int
    end: int
    first_page: int
    tokens_per_page: int
    column: int
    new_position: int
    slot: int
    first_slot: int
    num_partials: int


def plan_error(kernels: GeneratedKernels, batch: Batch, schedule: Schedule, rank: int, num_ctas: int) -> float:
    """0 if every CTA of every layer of a rank is given exactly the segments that it should have, in order; else infinite."""
    plan, device = kernels.plan, kernels.device
    prompts, totals = (int32(lengths, device) for lengths in zip(*batch, strict=True))
    page_indptr = torch.arange(len(batch) * len(plan.grouping.groups) + 1, dtype=torch.int32, device=device) * 3
    step = DecodeStep(kernels, schedule, len(batch), rank=rank, num_ctas=num_ctas)
    step.segments.fill_(-7)
    step.plan(prompts, totals, page_indptr)
    splits = kernels.tables.splits_of(rank, len(batch))
    for layer, rows in zip(plan.model.planned_layers, step.segments.tolist(), strict=True):
        places = local_heads(plan, rank, layer)
        if schedule is Schedule.TILE_QUEUE:
            expected = queue_segments(plan, batch, places, num_ctas)
        else:
            expected = split_segments(plan, batch, places, splits[layer])
        if [list(_walk(rows, cta)) for cta in range(len(expected))] != expected:
            return float("inf")
    return 0.0


def _walk(rows: list[list[int]], cta: int) -> Iterator[Segment]:
    """The segments of a CTA."""
    row = cta
    while row >= 0 and rows[row][Segment._fields.index("num_partials")]:
        *fields, row = rows[row][: len(Segment._fields) + 1]
        yield Segment(*fields)


def queue_segments(plan: Plan, batch: Batch, places: Sequence[HeadPlace], num_ctas: int) -> list[list[Segment]]:
    """Segments of every CTA by the tile queue, where every (request, group) has three pages."""
    tile_tokens, overhead = plan.partition.tile_tokens, plan.partition.segment_tiles
    pairs = [(request, head) for request in range(len(batch)) for head in range(len(places))]
    held = [plan.group_tokens(places[head].group_id, *batch[request]) for request, head in pairs]
    ends = list(accumulate(overhead + max(1, -(-tokens // tile_tokens)) for tokens in held))
    used = min(num_ctas, ends[-1])
    shares = [(cta * ends[-1] // used, (cta + 1) * ends[-1] // used) for cta in range(used)]
    segments: list[list[Segment]] = [[] for _ in range(num_ctas)]
    for pair, (tokens, pair_end) in enumerate(zip(held, ends, strict=True)):
        pair_start = (ends[pair - 1] if pair else 0) + overhead
        owners = [cta for cta, (start, end) in enumerate(shares) if start < pair_end and end > pair_start]
        for cta in owners:
            start = (max(shares[cta][0], pair_start) - pair_start) * tile_tokens
            end = min((min(shares[cta][1], pair_end) - pair_start) * tile_tokens, tokens)
            partials = cta + pair, owners[0] + pair, len(owners)
            segments[cta].append(_segment(plan, batch, places, *pairs[pair], start, end, *partials))
    return segments


def split_segments(plan: Plan, batch: Batch, places: Sequence[HeadPlace], splits: Sequence[int]) -> list[list[Segment]]:
    """The only segment of every CTA by static splits, where every (request, group) has three pages."""
    segments: list[list[Segment]] = []
    for request, lengths in enumerate(batch):
        for head, num_splits in enumerate(splits):
            tokens = plan.group_tokens(places[head].group_id, *lengths)
            size = -(-tokens // num_splits)
            first_slot = len(segments)
            for split in range(num_splits):
                start, end = (min(edge * size, tokens) for edge in (split, split + 1))
                partials = first_slot + split, first_slot, num_splits
                segments.append([_segment(plan, batch, places, request, head, start, end, *partials)])
    return segments


def _segment(
    plan: Plan,
    batch: Batch,
    places: Sequence[HeadPlace],
    request: int,
    head: int,
    start: int,
    end: int,
    slot: int,
    first_slot: int,
    num_partials: int,
) -> Segment:
    group_id, column = places[head]
    groups = plan.grouping.groups
    has_new = start < end == plan.group_tokens(group_id, *batch[request])
    first_page = 3 * (request * len(groups) + group_id)
    tokens_per_page = plan.layout.tokens_per_page(groups[group_id].num_members)
    new_position = batch[request][1] - 1 if has_new else -1
    return Segment(
        request,
        head,
        start,
        end - has_new,
        first_page,
        tokens_per_page,
        column,
        new_position,
        slot,
        first_slot,
        num_partials,
    )


def edge_batch(plan: Plan, places: Sequence[HeadPlace]) -> Batch:
    """Requests whose lengths lie about the edges of pages, tiles and steps. After a prompt of 1, n tokens are n tokens in every group."""
    sizes = {plan.layout.tokens_per_page(plan.grouping.groups[place.group_id].num_members) for place in places}
    edges = {
        min(sizes),
        min(MAX_TOKENS, max(sizes)),
        min(MAX_TOKENS, plan.partition.tile_tokens),
        min(MAX_TOKENS, plan.partition.step_tokens),
    }
    lengths = sorted({edge + step for edge in edges for step in (-1, 0, 1)})
    prompt = MAX_TOKENS + 37
    return [
        (77, 0),
        (1, 1),
        *((1, n) for n in lengths),
        (1, min(MAX_TOKENS, MANY_TILES * plan.partition.tile_tokens)),
        (prompt, prompt // 2),
        (0, 0),
        (prompt, prompt),
        (prompt, prompt + 9),
    ]


def planned_splits(tables: HeadTables, layer: int, heads: Sequence[int]) -> list[tuple[int, ...]]:
    """Static splits of some local heads of rank 0, of the smallest and of the largest batch, at most `MAX_SPLITS` each."""
    planned = [tables.splits[batch, 0, layer] for batch in (tables.batches[0], tables.batches[-1])]
    return list(dict.fromkeys(tuple(min(splits[head], MAX_SPLITS) for head in heads) for splits in planned))


def decode_runs(kernels: GeneratedKernels) -> Iterator[KernelRun]:
    """The check of the decode kernels of an artefact."""
    plan = kernels.plan
    for schedule in Schedule:
        yield KernelRun((plan_kernel_name(schedule),), partial(_plan_errors, kernels, schedule))
    for gqa_ratio in sorted(_gqa_ratios(kernels) | {plan.model.layers[i].gqa_ratio for i in plan.model.planned_layers}):
        names = (decode_kernel_name(plan.layout, gqa_ratio),)
        for layer in sample_layers(plan):
            places = local_heads(plan, 0, layer)
            heads = sample_heads(plan, places)
            problem_of = partial(make_problem, plan, layer=layer, heads=heads, gqa_ratio=gqa_ratio, seed=layer)
            problem = problem_of(edge_batch(plan, [places[head] for head in heads]))
            few_tiles, no_tiles, few_tokens = problem_of([(1, 1)]), problem_of([(77, 0)]), problem_of([(1, 1), (1, 40)])

            by_queue = partial(decode_error, kernels, schedule=Schedule.TILE_QUEUE)
            yield KernelRun(names, partial(by_queue, problem))
            yield KernelRun(names, partial(by_queue, problem, num_ctas=MANY_CTAS))
            yield KernelRun(names, partial(by_queue, few_tiles, num_ctas=plan.partition.num_ctas))
            yield KernelRun(names, partial(by_queue, no_tiles))

            by_splits = partial(decode_error, kernels, schedule=Schedule.STATIC_SPLITS)
            for splits in planned_splits(kernels.tables, layer, heads):
                yield KernelRun(names, partial(by_splits, problem, splits=splits))
            uneven = [UNEVEN_SPLITS[place % len(UNEVEN_SPLITS)] for place in range(len(heads))]
            yield KernelRun(names, partial(by_splits, few_tokens, splits=uneven))
            yield KernelRun(names, partial(by_splits, no_tiles, splits=uneven))


def _plan_errors(kernels: GeneratedKernels, schedule: Schedule) -> float:
    plan = kernels.plan
    edges = [(prompt, prompt) for prompt in (0, 1, 15, 16, 17, 1000, 32767, 32768, 131071, 2**20)]
    edges += [(77, 0), (1, 33), (5000, 1234), (70000, 70003)]
    many = [(1, n) for n in range(MANY_PAIRS // max(map(len, kernels.tables.group_id.values())))]
    return max(
        plan_error(kernels, batch, schedule, rank, num_ctas)
        for rank in range(plan.tensor_parallel)
        for batch, num_ctas in ((edges, plan.partition.num_ctas), (many, FEW_CTAS), (many[:5], MANY_PAIRS))
    )


def _gqa_ratios(kernels: GeneratedKernels) -> set[int]:
    """Query heads per KV head that decode kernels were generated for."""
    return {int(module.GQA_RATIO.value) for name, module in kernels.modules.items() if name.startswith("decode_")}


def _tables_of_heads(tables: HeadTables, problem: Problem, num_requests: int, splits: Sequence[int]) -> HeadTables:
    """Head tables of a problem's KV heads alone, with these static splits."""
    key = problem.rank, problem.layer
    return replace(
        tables,
        planned_layers=(problem.layer,),
        group_id={key: tuple(tables.group_id[key][head] for head in problem.heads)},
        column={key: tuple(tables.column[key][head] for head in problem.heads)},
        batches=(num_requests,),
        splits={(num_requests, *key): tuple(splits)},
    )
