"""Runs generated kernels in a process of their own, in which Triton interprets from the first import on.

The functions are module-level so that a worker process can be given them by name; a test calls `interpreter.submit(...)`.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from tangram_plan.codegen import emit
from tangram_plan.ir import KVDtype, Plan, Schedule
from tangram_plan.runtime.decode import DecodeStep
from tangram_plan.runtime.decode_problem import Batch, decode_error, decode_runs, make_problem, plan_error
from tangram_plan.runtime.generated_kernels import GeneratedKernels
from tangram_plan.runtime.head_tables import int32
from tangram_plan.runtime.kernel_check import find_errors, run_kernels
from tangram_plan.runtime.kernel_problem import max_error
from tangram_plan.runtime.page_table_problem import page_table_error
from tangram_plan.runtime.reference import torch_dtype

TOLERANCES = {KVDtype.FLOAT32: 1e-5, KVDtype.FLOAT16: 2e-3, KVDtype.BFLOAT16: 1.6e-2}


def load(plan: Plan) -> GeneratedKernels:
    """The kernels of a plan, freshly generated."""
    with tempfile.TemporaryDirectory() as directory:
        emit(plan, "0" * 64, Path(directory))
        return GeneratedKernels(Path(directory), plan)


def run_layer(plan: Plan, rank: int, layer: int, batch: Batch, num_ctas: int, splits: Sequence[int]) -> list[float]:
    """Errors of a whole layer, and of the plan of the step, by tile queue and by static splits."""
    kernels = load(plan)
    problem = make_problem(plan, batch, rank=rank, layer=layer)
    head_splits = [splits[head % len(splits)] for head in problem.heads]
    return [
        *(plan_error(kernels, batch, schedule, rank, num_ctas) for schedule in Schedule),
        decode_error(kernels, problem, Schedule.TILE_QUEUE, num_ctas=num_ctas),
        decode_error(kernels, problem, Schedule.STATIC_SPLITS, splits=head_splits),
    ]


def run_page_table(plan: Plan, batch: Batch) -> float:
    """Error of the page tables of a batch."""
    return page_table_error(load(plan), batch)


def held_in_kernel(plan: Plan, batch: Batch) -> list[list[int]]:
    """Tokens that every KV head of layer 0 holds of every request, as the generated page law computes them."""
    step = DecodeStep(load(plan), Schedule.STATIC_SPLITS, len(batch))
    prompts, totals = (int32(lengths) for lengths in zip(*batch, strict=True))
    step.plan(prompts, totals, int32([0] * (len(batch) * len(plan.grouping.groups) + 1)))
    rows = step.segments[0].view(len(batch), -1, step.segments.shape[-1])  # a split for each KV head
    held: list[list[int]] = (rows[..., 3] + (rows[..., 7] >= 0)).tolist()  # ends, without the new token
    return held


def run_with_page_ids(plan: Plan, page_ids: Sequence[int], num_pages: int) -> tuple[float, float]:
    """Errors of both schedules for one request whose only KV head's pages are these, in a pool of so many pages.

    Only the pages in use are touched, so a pool larger than memory costs nothing; that the new token was written where it
    should be is looked up in its page.
    """
    kernels = load(plan)
    layout = plan.layout
    small = make_problem(plan, [(1, len(page_ids) * layout.tokens_per_page(1))])
    pool = torch.empty(num_pages * layout.page_elements, dtype=torch_dtype(layout))
    pages, where = pool.view(num_pages, -1), torch.tensor(page_ids)
    small_pages = small.page_table.page_ids.long()
    table = small.page_table._replace(page_ids=where.to(torch.int32))
    errors = []
    for schedule in (Schedule.TILE_QUEUE, Schedule.STATIC_SPLITS):
        pages[where] = small.pool.view(-1, layout.page_elements)[small_pages]
        step, out = DecodeStep(kernels, schedule, 1, num_ctas=3), torch.full_like(small.q, float("nan"))
        step.plan(small.prompt_tokens, small.num_tokens, table.page_indptr)
        step.attend(0, small.q, small.k, small.v, small.score, pool, table, out)
        expected_pages = small.expected_pool.view(-1, layout.page_elements)[small_pages]
        assert torch.equal(pages[where].view(torch.uint8), expected_pages.view(torch.uint8))
        errors.append(max_error(out, small.expected))
    return errors[0], errors[1]


def run_as_generated(plan: Plan) -> dict[str, dict[str, object]]:
    """What the kernel check's interpreter half says of an artefact."""
    with tempfile.TemporaryDirectory() as folder:
        emit(plan, "0" * 64, Path(folder))
        return run_kernels(Path(folder), plan)


def run_mutated(plan: Plan, name_part: str, old: str, new: str) -> dict[str, dict[str, object]]:
    """What the kernel check's interpreter half says of decoding by an artefact in which a line of some kernels was changed."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        paths = [path for path in emit(plan, "0" * 64, directory) if path.suffix == ".py" and name_part in path.name]
        assert paths
        for path in paths:
            source = path.read_text()
            assert old in source
            path.write_text(source.replace(old, new))
        return find_errors(decode_runs(GeneratedKernels(directory, plan)))
