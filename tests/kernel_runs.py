"""Runs generated kernels in a process of their own, in which Triton interprets from the first import on.

The functions are module-level so that a worker process can be given them by name; a test calls `interpreter.submit(...)`.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tangram_plan.codegen import emit
from tangram_plan.ir import KVDtype, Plan
from tangram_plan.runtime.kernel_problem import (
    Batch,
    GeneratedKernels,
    expected_queue,
    make_problem,
    max_error,
    run_all,
)
from tangram_plan.runtime.reference import torch_dtype

TOLERANCES = {KVDtype.FLOAT32: 1e-5, KVDtype.FLOAT16: 2e-3, KVDtype.BFLOAT16: 1.6e-2}


def load(plan: Plan) -> GeneratedKernels:
    """The kernels of a plan, freshly generated."""
    with tempfile.TemporaryDirectory() as directory:
        emit(plan, "0" * 64, Path(directory))
        return GeneratedKernels(Path(directory), plan)


def run_layer(
    plan: Plan, rank: int, layer: int, batch: Batch, num_ctas: int, splits: Sequence[int]
) -> tuple[float, float]:
    """Errors of (tile queue, static splits) for a whole layer, whose queue is computed by the generated kernel too."""
    kernels = load(plan)
    problem = make_problem(plan, batch, rank=rank, layer=layer)
    tile_indptr = kernels.tile_queue(batch, rank)[layer]
    assert torch.equal(tile_indptr, expected_queue(plan, batch, [place.group_id for place in problem.places]))
    by_queue = max_error(kernels.run_tile_queue(problem, tile_indptr, num_ctas), problem.expected)
    head_splits = [splits[head % len(splits)] for head in problem.heads]
    return by_queue, max_error(kernels.run_static_splits(problem, head_splits), problem.expected)


def held_in_kernel(plan: Plan, batch: Batch) -> list[list[int]]:
    """Tokens that every KV head of layer 0 holds of every request, as the generated page law computes them; tiles must be one token."""
    assert plan.partition.tile_tokens == 1
    tile_indptr = load(plan).tile_queue(batch)[0]
    held: list[list[int]] = tile_indptr.diff().view(len(batch), -1).tolist()
    return held


def run_with_page_ids(plan: Plan, page_ids: Sequence[int], num_pages: int) -> tuple[float, float]:
    """Errors of both schedules for one request whose only KV head's pages are these, in a pool of so many pages.

    Only the pages in use are touched, so a pool larger than memory costs nothing.
    """
    kernels = load(plan)
    small = make_problem(plan, [(1, len(page_ids) * plan.layout.tokens_per_page(1))])
    pool = torch.empty(num_pages * plan.layout.page_elements, dtype=torch_dtype(plan.layout))
    from_pages = small.pool.view(-1, plan.layout.page_elements)[small.page_table.page_ids.long()]
    pool.view(num_pages, -1)[torch.tensor(page_ids)] = from_pages
    table = small.page_table._replace(page_ids=torch.tensor(page_ids, dtype=torch.int32))
    problem = replace(small, pool=pool, page_table=table)
    queue = expected_queue(plan, problem.batch, [0])
    return (
        max_error(kernels.run_tile_queue(problem, queue, 3), small.expected),
        max_error(kernels.run_static_splits(problem, [2]), small.expected),
    )


def run_mutated(plan: Plan, name_part: str, old: str, new: str) -> dict[str, dict[str, object]]:
    """What the kernel check's interpreter half says of an artefact in which a line of some kernels was changed."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        paths = [path for path in emit(plan, "0" * 64, directory) if path.suffix == ".py" and name_part in path.name]
        assert paths
        for path in paths:
            source = path.read_text()
            assert old in source
            path.write_text(source.replace(old, new))
        return run_all(directory, plan)
