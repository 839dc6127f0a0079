"""Runs generated eviction kernels in a process of their own, in which Triton interprets; see `tests.kernel_runs`."""

import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from tangram_plan.codegen.eviction_kernels import eviction_kernels
from tangram_plan.codegen.head_tables import tabulate
from tangram_plan.codegen.render import render_head_tables, render_kernel
from tangram_plan.ir import HEAD_TABLES_NAME, KERNELS_FOLDER, EvictionRole, Plan, eviction_kernel_name
from tangram_plan.runtime.eviction import Eviction, make_chunks
from tangram_plan.runtime.eviction_problem import (
    Request,
    eviction_error,
    eviction_runs,
    make_problem,
    score_error,
)
from tangram_plan.runtime.generated_kernels import GeneratedKernels
from tangram_plan.runtime.reference import PageTable, torch_dtype


def write_kernels(plan: Plan, directory: Path, roles: Collection[EvictionRole] = tuple(EvictionRole)) -> None:
    """Some eviction kernels of a plan, and its head tables."""
    names = {eviction_kernel_name(role, plan.layout) for role in roles}
    folder = directory / KERNELS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for spec in eviction_kernels(plan):
        if spec.name in names:
            (folder / f"{spec.name}.py").write_text(render_kernel(spec, "0" * 64))
    (folder / f"{HEAD_TABLES_NAME}.py").write_text(render_head_tables(tabulate(plan), "0" * 64))


def load(plan: Plan) -> GeneratedKernels:
    """The eviction kernels of a plan, freshly generated."""
    with tempfile.TemporaryDirectory() as directory:
        write_kernels(plan, Path(directory))
        return GeneratedKernels(Path(directory), plan)


def run_step(plan: Plan, rank: int, layer: int, requests: Sequence[Request], odd_scores: float, seed: int) -> float:
    """Error of one step of a whole layer."""
    problem = make_problem(plan, requests, rank=rank, layer=layer, odd_scores=odd_scores, seed=seed)
    return eviction_error(load(plan), problem)


def run_steps_in_turn(plan: Plan, steps: Sequence[Sequence[Request]]) -> list[bool]:
    """Whether each of some steps of different sizes is right that run one after the other on the same buffers."""
    kernels = load(plan)
    eviction = Eviction(kernels, max(len(step) for step in steps), 500)
    right = []
    for seed, step in enumerate(steps):
        problem = make_problem(plan, step, seed=seed)
        held, kept = [request.held for request in step], [request.kept for request in step]
        starts, tokens = [request.chunk_start for request in step], [request.chunk_tokens for request in step]
        chunks = make_chunks(held, kept, starts, tokens, "cpu")
        pool = problem.pool.clone()
        eviction.evict(0, problem.k, problem.v, problem.scores, pool, problem.page_table, chunks)
        right.append(torch.equal(pool.view(torch.uint8), problem.expected_pool.view(torch.uint8)))
    return right


def run_scores(plan: Plan, num_tokens: int, num_kv_heads: int) -> float:
    """Error of the key-anchor scores."""
    return score_error(load(plan), num_tokens, num_kv_heads)


def run_check(plan: Plan, name_part: str = "", old: str = "", new: str = "") -> dict[str, float]:
    """Largest error of every kernel by the artefact check, in whose files a line was changed; it stops at the first that is not 0."""
    with tempfile.TemporaryDirectory() as folder:
        write_kernels(plan, Path(folder))
        sources = {path: path.read_text() for path in (Path(folder) / KERNELS_FOLDER).glob("*_d*.py")}
        changed = {path: source for path, source in sources.items() if name_part in path.name and old in source}
        assert changed
        for path, source in changed.items():
            path.write_text(source.replace(old, new) if old else source)
        kernels = GeneratedKernels(Path(folder), plan)
    errors: dict[str, float] = {}
    for names, error in eviction_runs(kernels):
        try:
            found = error()
        except Exception:  # whatever the interpreter raises has been noticed
            found = float("inf")
        for name in names:
            errors[name] = max(errors.get(name, 0.0), found)
        if found > 1e-3:
            break
    return errors


def run_beyond_31_bits(plan: Plan, request: Request) -> bool:
    """Whether a step is right whose pages lie at both ends of a pool of more than 2^31 elements; most of it is never touched."""
    kernels, layout = load(plan), plan.layout
    small = make_problem(plan, [request])
    page_ids = small.page_table.page_ids.long()
    num_pages = 2**31 // layout.page_elements + 10
    where = torch.where(page_ids % 2 == 0, page_ids, num_pages - page_ids)
    pool = torch.empty(num_pages * layout.page_elements, dtype=torch_dtype(layout))
    pages = pool.view(num_pages, -1)
    pages[where] = small.pool.view(-1, layout.page_elements)[page_ids]
    chunks = make_chunks([request.held], [request.kept], [request.chunk_start], [request.chunk_tokens], "cpu")
    eviction = Eviction(kernels, 1, chunks.max_candidates)
    table = PageTable(where.to(torch.int32), small.page_table.page_indptr)
    eviction.evict(0, small.k, small.v, small.scores, pool, table, chunks)
    expected = small.expected_pool.view(-1, layout.page_elements)[page_ids]
    return torch.equal(pages[where].view(torch.uint8), expected.view(torch.uint8))
