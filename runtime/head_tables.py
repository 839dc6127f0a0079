"""The generated head tables, and what the kernels are given of them: int32 tensors, made once, before the first step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from tangram_plan.ir import HEAD_TABLES_NAME

from .kernel_modules import load_module


class GroupTables(NamedTuple):
    """Per head group, on every rank alike."""

    rho: torch.Tensor  # int32 [num_groups], part kept over RHO_ONE
    tokens_per_page: torch.Tensor  # int32 [num_groups]


class LayerTables(NamedTuple):
    """Per local KV head of one layer."""

    group_id: torch.Tensor  # int32 [num_kv_heads]
    column: torch.Tensor  # int32 [num_kv_heads]


class SplitTables(NamedTuple):
    """Static splits of the local KV heads of all planned layers of one rank, layer after layer."""

    split_head: (
        torch.Tensor
    )  # int32 [splits of all planned layers], KV head of every split, counted from its layer's first
    split_indptr: torch.Tensor  # int32 [local KV heads of all planned layers + 1], where each KV head's splits begin


class StepTables(NamedTuple):
    """Local KV heads of all planned layers of one rank, layer after layer."""

    head_indptr: torch.Tensor  # int32 [num_layers + 1], where in the others each planned layer begins
    group_id: torch.Tensor  # int32 [local KV heads of all planned layers]
    column: torch.Tensor  # int32 [local KV heads of all planned layers]


@dataclass(frozen=True)
class HeadTables:
    """The constants of a generated `head_tables.py`, whose names are these in capitals.

    Args:
        planned_layers: layers that own a planned cache; one that reads another's cache uses the owner's tables.
        tensor_parallel: ranks.
        rho: per head group, part kept over `RHO_ONE`.
        tokens_per_page: per head group.
        group_id: (rank, layer) -> head group of every local KV head.
        column: (rank, layer) -> place in a page of every local KV head.
        batches: batch sizes that static splits were planned for, rising.
        splits: (batch, rank, layer) -> static splits of every local KV head.
    """

    planned_layers: tuple[int, ...]
    tensor_parallel: int
    rho: tuple[int, ...]
    tokens_per_page: tuple[int, ...]
    group_id: Mapping[tuple[int, int], tuple[int, ...]]
    column: Mapping[tuple[int, int], tuple[int, ...]]
    batches: tuple[int, ...]
    splits: Mapping[tuple[int, int, int], tuple[int, ...]]

    def group_tables(self, device: torch.device | str) -> GroupTables:
        """Law and page geometry of every group."""
        return GroupTables(int32(self.rho, device), int32(self.tokens_per_page, device))

    def layer_tables(self, rank: int, layer: int, device: torch.device | str) -> LayerTables:
        """Where the local KV heads of a layer lie."""
        return LayerTables(int32(self.group_id[rank, layer], device), int32(self.column[rank, layer], device))

    def step_tables(self, rank: int, device: torch.device | str) -> StepTables:
        """Where the local KV heads of all planned layers lie."""
        group_id, column = ([by[rank, layer] for layer in self.planned_layers] for by in (self.group_id, self.column))
        head_indptr = _indptr([len(heads) for heads in group_id])
        return StepTables(int32(head_indptr, device), int32(_flat(group_id), device), int32(_flat(column), device))

    def splits_of(self, rank: int, num_requests: int) -> dict[int, tuple[int, ...]]:
        """Static splits of every planned layer's KV heads, of the smallest planned batch that holds so many requests, else of the largest."""
        batch = next((batch for batch in self.batches if batch >= num_requests), self.batches[-1])
        return {layer: self.splits[batch, rank, layer] for layer in self.planned_layers}

    def split_tables(self, rank: int, num_requests: int, device: torch.device | str) -> SplitTables:
        """`splits_of`, as the kernels read it."""
        layers = self.splits_of(rank, num_requests).values()
        split_head = [head for splits in layers for head, count in enumerate(splits) for _ in range(count)]
        return SplitTables(int32(split_head, device), int32(_indptr(_flat(layers)), device))


def load_head_tables(directory: Path) -> HeadTables:
    """The head tables of an artefact."""
    module = load_module(directory, HEAD_TABLES_NAME)
    return HeadTables(**{field.name: getattr(module, field.name.upper()) for field in fields(HeadTables)})


def int32(values: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor, as the kernels read integers."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def _flat(parts: Iterable[Sequence[int]]) -> list[int]:
    return [value for part in parts for value in part]


def _indptr(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))
