"""Page tables of a step on a GPU, made of the rows in which a serving engine keeps the pages of its requests."""

import torch

from tangram_plan.ir import PAGE_TABLE_KERNEL

from .generated_kernels import GeneratedKernels
from .reference import PageTable


class PageTables:
    """Room for the page tables of a step; the same addresses at every step, so that a CUDA graph can hold the launch.

    Args:
        kernels: of the artefact; the buffers lie on their device.
        max_requests: of a step, at most.
        max_pages: of a request, at most.
    """

    def __init__(self, kernels: GeneratedKernels, max_requests: int, max_pages: int) -> None:
        device = kernels.device
        self.max_pages = max_pages
        self._launch = kernels.modules[PAGE_TABLE_KERNEL].launch
        self._groups = kernels.tables.group_tables(device)
        self._num_groups = self._groups.rho.numel()
        self._page_ids = torch.zeros(max_requests, max_pages, dtype=torch.int32, device=device)
        self._page_indptr = torch.zeros(max_requests * self._num_groups, dtype=torch.int32, device=device)

    def fill(self, rows: torch.Tensor, prompt_tokens: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Make the tables of a step: one launch.

        Args:
            rows: int32 [R, at least the pages of any request], ids dense; in the order of `ir.page_row`.
            prompt_tokens: int32 [R], prompt lengths; 0 for padded rows.
            num_tokens: int32 [R], tokens so far, the new ones included; 0 for padded rows.
        """
        self._launch(rows, prompt_tokens, num_tokens, *self._groups, self._page_ids, self._page_indptr)

    def of_requests(self, first: int = 0) -> PageTable:
        """The tables of the requests from `first` on, as the kernels read them: `page_indptr` says where pages begin, not where they end."""
        return PageTable(self._page_ids.view(-1), self._page_indptr[first * self._num_groups :])
