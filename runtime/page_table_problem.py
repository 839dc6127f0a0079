"""Small problems for the generated page-table kernel: rows of scattered pages, taken apart and compared with `ir.page_row`."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from tangram_plan.ir import PAGE_TABLE_KERNEL, Plan, group_pages_in_row

from .generated_kernels import GeneratedKernels, KernelRun
from .head_tables import int32
from .page_tables import PageTables

SPARE_PAGES = 3  # by which rows and tables are wider than any request needs
NOTHING = -7  # what is not a page


def page_table_error(kernels: GeneratedKernels, batch: Sequence[tuple[int, int]]) -> float:
    """0 if the tables of a batch of (prompt tokens, tokens so far) are exactly those of `ir.page_row`; else infinite."""
    plan, device = kernels.plan, kernels.device
    places = [group_pages_in_row(plan, *lengths) for lengths in batch]
    counts = [sum(map(len, groups)) for groups in places]
    width = max(counts) + SPARE_PAGES
    rows = torch.full((len(batch), width), NOTHING, dtype=torch.int32)
    ids = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    for row, pages in zip(rows, torch.split(ids, counts), strict=True):
        row[: len(pages)] = pages
    tables = PageTables(kernels, len(batch), width)
    page_ids, page_indptr = tables.of_requests()
    page_ids.fill_(NOTHING)
    prompts, totals = (int32(lengths, device) for lengths in zip(*batch, strict=True))
    tables.fill(rows.to(device), prompts, totals)

    expected = torch.full_like(rows, NOTHING)
    starts = []
    for request, groups in enumerate(places):
        start = 0
        for group in groups:
            starts.append(request * width + start)
            expected[request, start : start + len(group)] = rows[request, group]
            start += len(group)
    same = torch.equal(page_ids.cpu().view_as(expected), expected) and page_indptr.tolist() == starts
    return 0.0 if same else float("inf")


def page_table_runs(kernels: GeneratedKernels) -> Iterator[KernelRun]:
    """The check of the page-table kernel of an artefact."""
    for batch in (_edges(kernels.plan), [(0, 0)], [(1, 1)]):
        yield KernelRun((PAGE_TABLE_KERNEL,), partial(page_table_error, kernels, batch))


def _edges(plan: Plan) -> list[tuple[int, int]]:
    """Prompts that are being computed, have just been, and with answers to a token before, at and after the first pages that they need."""
    sizes = sorted({plan.layout.tokens_per_page(group.num_members) for group in plan.grouping.groups})
    answers = [0, 1, sizes[0], sizes[0] + 1, sizes[-1], 2 * sizes[-1] + 1, min(5 * sizes[-1], plan.max_new_tokens)]
    return [
        (0, 0),
        *((prompt, prompt + answer) for prompt in (1, 17, 1000, 40000) for answer in answers),
        (5000, 1234),
        (1, 1 + min(3000, plan.max_new_tokens)),
        (0, 0),
    ]
