"""What the kernel checks share: how errors are measured, and which layers and heads of a plan a check makes do with."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from tangram_plan.ir import HEAD_TABLES_NAME, CheckFailedError, Plan

from .head_tables import HeadTables, load_head_tables
from .reference import HeadPlace, local_heads

MAX_LAYERS = 3  # of every GQA ratio
MAX_HEADS = 4  # of every layer


def max_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest norm of a row's difference over the row's norm; infinite for NaN, and for rows that should be zero and are not."""
    difference = (actual.double() - expected.double()).norm(dim=-1).nan_to_num(nan=float("inf"))
    norm = expected.double().norm(dim=-1)
    relative = torch.where(difference == 0, 0.0, difference / norm)
    return float(relative.max()) if relative.numel() else 0.0


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
