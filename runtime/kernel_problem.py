"""Small ragged decode problems for the generated kernels of a plan, run and compared with the reference.

What makes them hard on purpose: requests of 0, 1 and about a page and a tile of tokens, a prompt that is only partly computed,
padded rows, pages in scattered order, fewer tiles than CTAs, more splits than tokens, and a pool in which every slot without a
token is NaN. The tables that the kernels are given come from the artefact's head tables, as at serving time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from tangram_plan.ir import HEAD_TABLES_NAME, QUEUE_NAME, CheckFailedError, Plan, Schedule, kernel_name

from .head_tables import HeadTables, int32, load_head_tables
from .kernel_modules import kernel_files, load_module
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

MAX_LAYERS = 3  # of every GQA ratio
MAX_HEADS = 4  # of every layer
MAX_TOKENS = 600  # of a request, roughly: the interpreter is slow
FEW_CTAS = 7  # fewer than tiles, so that a CTA crosses from pair to pair
MAX_SPLITS = 5  # of a KV head, of those that were planned
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
        pool: flat.
        page_table: of the batch.
        prompt_tokens: int32 [R].
        num_tokens: int32 [R].
        expected: float64 [R, len(places) * gqa_ratio, D], by the reference.
    """

    rank: int
    layer: int
    heads: tuple[int, ...]
    places: tuple[HeadPlace, ...]
    q: torch.Tensor
    pool: torch.Tensor
    page_table: PageTable
    prompt_tokens: torch.Tensor
    num_tokens: torch.Tensor
    expected: torch.Tensor

    @property
    def batch(self) -> Batch:
        """(prompt tokens, tokens so far) per request."""
        return list(zip(self.prompt_tokens.tolist(), self.num_tokens.tolist(), strict=True))


class GeneratedKernels:
    """The generated modules of an artefact, in a process in which Triton interprets (or on a GPU).

    Args:
        directory: artefact directory.
        plan: its plan.
        device: where the kernels run, as torch names it.
    """

    def __init__(self, directory: Path, plan: Plan, device: str = "cpu") -> None:
        self.plan, self.device = plan, device
        self.tables = load_head_tables(directory)
        self.modules = {path.stem: load_module(directory, path.stem) for path in kernel_files(directory)}

    def tile_queue(self, batch: Batch, rank: int = 0) -> dict[int, torch.Tensor]:
        """Cumulative tiles of a batch, by the generated kernel: {layer: int32 [R * num_kv_heads + 1]}."""
        tables, num_requests = self.tables, len(batch)
        prompts, totals = (int32(lengths, self.device) for lengths in zip(*batch, strict=True))
        tile_indptr = int32([-1] * tables.queue_size(rank, num_requests), self.device)
        rho = tables.group_tables(self.device).rho
        self.modules[QUEUE_NAME].launch(prompts, totals, *tables.queue_tables(rank, self.device), rho, tile_indptr)
        return {
            layer: tile_indptr[slice(*tables.queue_range(rank, layer, num_requests))].cpu()
            for layer in tables.planned_layers
        }

    def run_tile_queue(self, problem: Problem, tile_indptr: torch.Tensor, num_ctas: int) -> torch.Tensor:
        """Attention output of a problem by tile queue; every buffer is NaN beforehand."""
        decode, merge = self._pair_of(Schedule.TILE_QUEUE, problem)
        num_slots = num_ctas + problem.q.shape[0] * len(problem.places)
        partial_out, partial_lse, out = self._buffers((num_slots,), problem)
        tile_indptr = tile_indptr.to(self.device)
        decode.launch(*self._inputs(problem), tile_indptr, partial_out, partial_lse, num_ctas=num_ctas)
        merge.launch(partial_out, partial_lse, tile_indptr, out, num_kv_heads=len(problem.places), num_ctas=num_ctas)
        return out.cpu()

    def run_static_splits(self, problem: Problem, splits: Sequence[int]) -> torch.Tensor:
        """Attention output of a problem by so many splits per KV head; every buffer is NaN beforehand."""
        decode, merge = self._pair_of(Schedule.STATIC_SPLITS, problem)
        num_requests = problem.q.shape[0]
        tables = replace(
            self.tables, batches=(num_requests,), splits={(num_requests, problem.rank, problem.layer): tuple(splits)}
        ).split_tables(problem.rank, problem.layer, num_requests, self.device)
        partial_out, partial_lse, out = self._buffers((num_requests, sum(splits)), problem)
        decode.launch(*self._inputs(problem), *tables, partial_out, partial_lse)
        merge.launch(partial_out, partial_lse, tables.split_indptr, out)
        return out.cpu()

    def gqa_ratios(self) -> set[int]:
        """Query heads per KV head that decode kernels were generated for."""
        return {int(module.GQA_RATIO.value) for name, module in self.modules.items() if name.startswith("decode")}

    def _pair_of(self, schedule: Schedule, problem: Problem) -> tuple[ModuleType, ModuleType]:
        decode, merge = names_of(self.plan, schedule, problem.q.shape[1] // len(problem.places))
        return self.modules[decode], self.modules[merge]

    def _inputs(self, problem: Problem) -> tuple[torch.Tensor, ...]:
        inputs = (problem.q, problem.pool, *problem.page_table, problem.prompt_tokens, problem.num_tokens)
        heads = torch.tensor(problem.heads, device=self.device)
        return (
            *(tensor.to(self.device) for tensor in inputs),
            *(table[heads] for table in self.tables.layer_tables(problem.rank, problem.layer, self.device)),
            *self.tables.group_tables(self.device),
        )

    def _buffers(self, slots: tuple[int, ...], problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """NaN-filled partial results (float32 [*slots, gqa_ratio, D]), their logarithms, and output."""
        gqa_ratio, head_dim = problem.q.shape[1] // len(problem.places), problem.q.shape[2]
        nan = float("nan")
        return (
            torch.full((*slots, gqa_ratio, head_dim), nan, device=self.device),
            torch.full((*slots, gqa_ratio), nan, device=self.device),
            torch.full_like(problem.q, nan, device=self.device),
        )


def verify_head_tables(directory: Path, plan: Plan) -> None:
    """Checks the constants of the generated head tables, of every rank and layer.

    Raises:
        CheckFailedError: if one is not what the plan says.
    """
    groups, static_splits = plan.grouping.groups, plan.partition.static_splits
    ranks_and_layers = [(rank, layer) for rank in range(plan.tensor_parallel) for layer in plan.model.planned_layers]
    places = {key: local_heads(plan, *key) for key in ranks_and_layers}
    expected = HeadTables(
        planned_layers=plan.model.planned_layers,
        tensor_parallel=plan.tensor_parallel,
        rho=tuple(group.rho for group in groups),
        tokens_per_page=tuple(plan.layout.tokens_per_page(group.num_members) for group in groups),
        group_id={key: tuple(place.group_id for place in found) for key, found in places.items()},
        column={key: tuple(place.column for place in found) for key, found in places.items()},
        batches=tuple(static.batch for static in static_splits),
        splits={
            (static.batch, rank, layer): tuple(
                static.splits[kv_head] for kv_head in plan.model.local_kv_heads(layer, rank, plan.tensor_parallel)
            )
            for static in static_splits
            for rank, layer in ranks_and_layers
        },
    )
    generated = load_head_tables(directory)
    for field in fields(HeadTables):
        if getattr(generated, field.name) != getattr(expected, field.name):
            raise CheckFailedError(
                "generated constant is not the plan's",
                where=f"{HEAD_TABLES_NAME}.py, {field.name.upper()}",
                fix="build the artefact again",
            )


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
    """Random keys and values in a pool that is NaN elsewhere, and what attention makes of them.

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
    prompts, totals = [prompt for prompt, _ in batch], [total for _, total in batch]
    groups = {place.group_id for place in places}
    num_pages = sum(plan.group_pages(group_id, *request) for request in batch for group_id in groups)
    page_table = lay_out_pages(
        plan, prompts, totals, free_pages=torch.randperm(num_pages, generator=generator), groups=groups
    )
    pool = torch.full((max(1, num_pages) * layout.page_elements,), float("nan"), dtype=dtype)
    views = page_views(pool, layout)
    for request, lengths in enumerate(batch):
        for group_id, column in places:
            held = plan.group_tokens(group_id, *lengths)
            tokens_per_page = layout.tokens_per_page(plan.grouping.groups[group_id].num_members)
            page_ids = page_table.pages(request * len(plan.grouping.groups) + group_id)
            where = slots_of(page_ids, column, tokens_per_page, held)
            views.keys[where] = torch.randn(held, layout.head_dim, generator=generator).to(dtype)
            views.values[where] = torch.randn(held, layout.head_dim, generator=generator).to(dtype)
    q = torch.randn(len(batch), len(places) * gqa_ratio, layout.head_dim, generator=generator).to(dtype)
    expected = decode_attention(
        plan, places, q.double(), pool, page_table, prompts, totals, compute_dtype=torch.float64
    )
    return Problem(rank, layer, heads, places, q, pool, page_table, int32(prompts), int32(totals), expected)


def edge_batch(plan: Plan, places: Sequence[HeadPlace]) -> Batch:
    """Requests whose lengths lie about the edges of pages and tiles. After a prompt of 1, n tokens are n tokens in every group."""
    sizes = {plan.layout.tokens_per_page(plan.grouping.groups[place.group_id].num_members) for place in places}
    edges = {min(sizes), min(MAX_TOKENS, max(sizes)), min(MAX_TOKENS, plan.partition.tile_tokens)}
    lengths = sorted({edge + step for edge in edges for step in (-1, 0, 1)})
    prompt = MAX_TOKENS + 37
    return [
        (77, 0),
        (1, 1),
        *((1, n) for n in lengths),
        (prompt, prompt // 2),
        (0, 0),
        (prompt, prompt),
        (prompt, prompt + 9),
    ]


def max_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest norm of a row's difference over the row's norm; infinite for NaN, and for rows that should be zero and are not."""
    difference = (actual.double() - expected.double()).norm(dim=-1).nan_to_num(nan=float("inf"))
    norm = expected.double().norm(dim=-1)
    relative = torch.where(difference == 0, 0.0, difference / norm)
    return float(relative.max()) if relative.numel() else 0.0


def expected_queue(plan: Plan, batch: Batch, group_ids: Sequence[int]) -> torch.Tensor:
    """Cumulative tiles of one layer, given as the head groups of its KV heads, by the page law: int32 [R * num_kv_heads + 1]."""
    tile = plan.partition.tile_tokens
    tiles = [-(-plan.group_tokens(group_id, *request) // tile) for request in batch for group_id in group_ids]
    return int32([0, *tiles]).cumsum(0, dtype=torch.int32)


def names_of(plan: Plan, schedule: Schedule, gqa_ratio: int) -> tuple[str, str]:
    """The decode and the merge kernel of a schedule."""
    return (
        kernel_name("decode", schedule, plan.layout, gqa_ratio),
        kernel_name("merge", schedule, plan.layout, gqa_ratio),
    )


def sample_layers(plan: Plan) -> list[int]:
    """A few planned layers: those with the highest and the lowest rho and the largest group, then the first ones."""
    groups = plan.grouping.groups

    def of_layer(layer: int) -> list[int]:
        return [place.group_id for place in local_heads(plan, 0, layer)]

    layers = plan.model.planned_layers
    extremes = [
        max(layers, key=lambda layer: max(groups[g].rho for g in of_layer(layer))),
        min(layers, key=lambda layer: min(groups[g].rho for g in of_layer(layer))),
        max(layers, key=lambda layer: max(groups[g].num_members for g in of_layer(layer))),
    ]
    return list(dict.fromkeys([*extremes, *layers]))[:MAX_LAYERS]


def sample_heads(plan: Plan, places: Sequence[HeadPlace]) -> list[int]:
    """A few local heads of a layer: those with the highest and the lowest rho and the last column, then the first ones."""
    heads = range(len(places))
    extremes = [
        max(heads, key=lambda head: plan.grouping.groups[places[head].group_id].rho),
        min(heads, key=lambda head: plan.grouping.groups[places[head].group_id].rho),
        max(heads, key=lambda head: places[head].column),
    ]
    return sorted(list(dict.fromkeys([*extremes, *heads]))[:MAX_HEADS])


def planned_splits(tables: HeadTables, layer: int, heads: Sequence[int]) -> list[tuple[int, ...]]:
    """Static splits of some local heads of rank 0, of the smallest and of the largest batch, at most `MAX_SPLITS` each."""
    planned = [tables.splits[batch, 0, layer] for batch in (tables.batches[0], tables.batches[-1])]
    return list(dict.fromkeys(tuple(min(splits[head], MAX_SPLITS) for head in heads) for splits in planned))


def run_all(directory: Path, plan: Plan, device: str = "cpu") -> dict[str, dict[str, object]]:
    """Finds the largest error of every generated kernel, and why one does not run.

    Args:
        directory: artefact directory.
        plan: its plan.
        device: where the kernels run; on a CPU, in a process in which Triton interprets.

    Returns:
        {name: {"max_error": ..., "failure": ...}}; what was not found is not there.
    """
    kernels = GeneratedKernels(directory, plan, device)
    findings: dict[str, dict[str, object]] = {}
    for names, attempt in _attempts(kernels):
        try:
            found: dict[str, object] = {"max_error": attempt()}
        except Exception as error:  # whatever the interpreter raises is the finding
            found = {"failure": f"on {device}: {type(error).__name__}: {error}".splitlines()[0]}
        for name in names:  # decode and merge share an output: which of the two is wrong, it does not tell
            findings[name] = _worse(findings.get(name, {}), found)
    return findings


def _worse(one: dict[str, object], other: dict[str, object]) -> dict[str, object]:
    errors = [float(str(found["max_error"])) for found in (one, other) if "max_error" in found]
    return one | other | ({"max_error": max(errors)} if errors else {})


def _attempts(kernels: GeneratedKernels) -> Iterator[tuple[tuple[str, ...], Callable[[], float]]]:
    """Every run of the check, as (the kernels that it is about, what runs them and returns the error)."""
    plan = kernels.plan
    yield (QUEUE_NAME,), partial(_queue_error, kernels)
    for gqa_ratio in sorted(
        {plan.model.layers[layer].gqa_ratio for layer in plan.model.planned_layers} | kernels.gqa_ratios()
    ):
        for layer in sample_layers(plan):
            places = local_heads(plan, 0, layer)
            heads = sample_heads(plan, places)
            problem_of = partial(make_problem, plan, layer=layer, heads=heads, gqa_ratio=gqa_ratio, seed=layer)
            problem = problem_of(edge_batch(plan, [places[head] for head in heads]))
            few_tiles, no_tiles, few_tokens = problem_of([(1, 1)]), problem_of([(77, 0)]), problem_of([(1, 1), (1, 40)])

            names = names_of(plan, Schedule.TILE_QUEUE, gqa_ratio)
            yield names, partial(_tile_queue_error, kernels, problem, FEW_CTAS)
            yield names, partial(_tile_queue_error, kernels, few_tiles, plan.partition.num_ctas)
            yield names, partial(_tile_queue_error, kernels, no_tiles, FEW_CTAS)

            names = names_of(plan, Schedule.STATIC_SPLITS, gqa_ratio)
            for splits in planned_splits(kernels.tables, layer, heads):
                yield names, partial(_static_splits_error, kernels, problem, splits)
            uneven = [UNEVEN_SPLITS[place % len(UNEVEN_SPLITS)] for place in range(len(heads))]
            yield names, partial(_static_splits_error, kernels, few_tokens, uneven)
            yield names, partial(_static_splits_error, kernels, no_tiles, uneven)


def _queue_error(kernels: GeneratedKernels) -> float:
    """0 if the tile counts of all layers and ranks are exactly those of the page law, else infinite."""
    plan = kernels.plan
    batch = [(prompt, prompt) for prompt in (0, 1, 15, 16, 17, 1000, 32767, 32768, 131071, 2**20)]
    batch += [(77, 0), (1, 33), (5000, 1234), (70000, 70003)]
    for rank in range(plan.tensor_parallel):
        for layer, found in kernels.tile_queue(batch, rank).items():
            group_ids = [place.group_id for place in local_heads(plan, rank, layer)]
            if not torch.equal(found, expected_queue(plan, batch, group_ids)):
                return float("inf")
    return 0.0


def _tile_queue_error(kernels: GeneratedKernels, problem: Problem, num_ctas: int) -> float:
    tile_indptr = expected_queue(kernels.plan, problem.batch, [place.group_id for place in problem.places])
    return max_error(kernels.run_tile_queue(problem, tile_indptr, num_ctas), problem.expected)


def _static_splits_error(kernels: GeneratedKernels, problem: Problem, splits: Sequence[int]) -> float:
    return max_error(kernels.run_static_splits(problem, splits), problem.expected)
