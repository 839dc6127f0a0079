"""The text form of a plan: canonical JSON that reads and diffs well. `parse_plan(print_plan(plan)) == plan`.

One value has one text: keys stand in the order below, a list or object that fits into one line is one line, numbers are
integers but for the softmax's and the cost model's estimates. The plan hash is the SHA-256 of this text.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .budget_table import BudgetTable
from .cta_partition import CtaPartition, Schedule, ScheduleChoice, ScheduleEstimate, StaticSplits
from .errors import TangramError
from .head_grouping import HeadGroup, HeadGrouping
from .head_order import HeadOrder
from .model_shape import AttentionForm, KVHead, LayerKind, LayerShape, ModelShape
from .page_layout import KVDtype, PageLayout
from .plan import Plan, Provenance

SCHEMA = "tangram-plan/2"
LINE_WIDTH = 120

Json = Mapping[str, Any] | Sequence[Any] | str | int | float | None


def plan_hash(plan: Plan) -> str:
    """SHA-256 of the plan's text, as hex."""
    return hashlib.sha256(print_plan(plan).encode()).hexdigest()


def print_plan(plan: Plan) -> str:
    """The canonical text of a plan."""
    return print_json(_plan_to_json(plan))


def print_json(value: Json) -> str:
    """Canonical JSON: whatever fits into a line is a line, all else is broken up; ends with a newline."""
    return _print_json(value, indent=0, reserved=0) + "\n"


def parse_plan(text: str, *, where: str) -> Plan:
    """Read the text of a plan.

    Args:
        text: what `print_plan` returned.
        where: file name for error messages.

    Raises:
        TangramError: not JSON, another schema, unknown or missing fields, or not in canonical form.
    """
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise TangramError(
            "plan is not JSON", where=f"{where}:{error.lineno}", got=error.msg, fix="build it again"
        ) from error
    except RecursionError as error:
        raise TangramError("plan is nested too deeply", where=where, fix="build it again") from error
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        got = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
        raise TangramError(
            "unknown plan schema", where=where, got=got, expected=SCHEMA, fix="build it again with this version"
        )
    try:
        plan = _plan_from_json(raw)
        canonical = print_plan(plan)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise TangramError(
            "plan is damaged", where=where, got=f"{type(error).__name__} {error}", fix="build it again"
        ) from error
    if canonical != text:
        raise TangramError(
            "plan has unknown fields or was edited",
            where=where,
            expected="the text that `build` wrote",
            fix="build it again",
        )
    return plan


def _plan_to_json(plan: Plan) -> Json:
    shape, partition = plan.model, plan.partition
    return {
        "schema": SCHEMA,
        "model": {
            "model_type": shape.model_type,
            "head_dim": shape.head_dim,
            "attention": {
                "softmax_scale": shape.attention.softmax_scale,
                "logit_softcap": shape.attention.logit_softcap,
                "has_sinks": shape.attention.has_sinks,
            },
            "identity": dict(shape.identity),
            "layers": [
                [layer.kind.value, layer.num_kv_heads, layer.num_q_heads, layer.kv_owner] for layer in shape.layers
            ],
        },
        "provenance": {
            "profile": plan.provenance.profile,
            "profile_hash": plan.provenance.profile_hash,
            "rule": plan.provenance.rule,
            "grouping_solver": plan.provenance.grouping_solver,
            "partition_solver": plan.provenance.partition_solver,
            "seed": plan.provenance.seed,
        },
        "scorer": plan.scorer,
        "tensor_parallel": plan.tensor_parallel,
        "compress_chunk_tokens": plan.compress_chunk_tokens,
        "max_new_tokens": plan.max_new_tokens,
        "head_order": {str(layer): list(heads) for layer, heads in sorted(plan.head_order.layers.items())},
        "budgets": {
            "sink_tokens": plan.budgets.sink_tokens,
            "window_tokens": plan.budgets.window_tokens,
            "rho": _per_layer(plan.budgets.rho, shape),
        },
        "page": {
            "page_slots": plan.layout.page_slots,
            "head_dim": plan.layout.head_dim,
            "dtype": plan.layout.dtype.value,
        },
        "groups": [
            {
                "rho": group.rho,
                "members_by_rank": [[list(kv_head) for kv_head in members] for members in group.members_by_rank],
            }
            for group in plan.grouping.groups
        ],
        "partition": {
            "device": partition.device,
            "num_ctas": partition.num_ctas,
            "tile_tokens": partition.tile_tokens,
            "segment_tiles": partition.segment_tiles,
            "step_tokens": partition.step_tokens,
            "num_warps": partition.num_warps,
            "num_stages": partition.num_stages,
            "static_splits": [
                {"batch": static.batch, "splits": _per_layer(static.splits, shape)}
                for static in partition.static_splits
            ],
            "choices": [
                {
                    "batch": choice.batch,
                    "context": choice.context,
                    "schedule": choice.schedule.value,
                    "estimates": {
                        schedule.value: [estimate.predicted_us, estimate.makespan_over_ideal]
                        for schedule, estimate in sorted(choice.estimates.items())
                    },
                }
                for choice in partition.choices
            ],
        },
    }


def _plan_from_json(raw: dict[str, Any]) -> Plan:
    model, page, partition = raw["model"], raw["page"], raw["partition"]
    shape = ModelShape(
        model_type=model["model_type"],
        layers=tuple(LayerShape(LayerKind(kind), kv, q, owner) for kind, kv, q, owner in model["layers"]),
        head_dim=model["head_dim"],
        identity=tuple(model["identity"].items()),
        attention=AttentionForm(**model["attention"]),
    )
    return Plan(
        model=shape,
        tensor_parallel=raw["tensor_parallel"],
        head_order=HeadOrder({int(layer): tuple(heads) for layer, heads in raw["head_order"].items()}),
        budgets=BudgetTable(
            raw["budgets"]["sink_tokens"], raw["budgets"]["window_tokens"], _per_head(raw["budgets"]["rho"])
        ),
        grouping=HeadGrouping(
            groups=tuple(
                HeadGroup(
                    group["rho"],
                    tuple(tuple(KVHead(*kv_head) for kv_head in members) for members in group["members_by_rank"]),
                )
                for group in raw["groups"]
            ),
            page_slots=page["page_slots"],
        ),
        layout=PageLayout(page["page_slots"], page["head_dim"], KVDtype(page["dtype"])),
        partition=CtaPartition(
            device=partition["device"],
            num_ctas=partition["num_ctas"],
            tile_tokens=partition["tile_tokens"],
            segment_tiles=partition["segment_tiles"],
            step_tokens=partition["step_tokens"],
            num_warps=partition["num_warps"],
            num_stages=partition["num_stages"],
            static_splits=tuple(
                StaticSplits(static["batch"], _per_head(static["splits"])) for static in partition["static_splits"]
            ),
            choices=tuple(
                ScheduleChoice(
                    choice["batch"],
                    choice["context"],
                    Schedule(choice["schedule"]),
                    {Schedule(name): ScheduleEstimate(*values) for name, values in choice["estimates"].items()},
                )
                for choice in partition["choices"]
            ),
        ),
        scorer=raw["scorer"],
        compress_chunk_tokens=raw["compress_chunk_tokens"],
        max_new_tokens=raw["max_new_tokens"],
        provenance=Provenance(**raw["provenance"]),
    )


def _per_layer(values: Mapping[KVHead, int], shape: ModelShape) -> dict[str, list[int]]:
    """A value per KV head as {layer: [values]}."""
    return {
        str(layer): [values[KVHead(layer, h)] for h in range(shape.layers[layer].num_kv_heads)]
        for layer in shape.planned_layers
    }


def _per_head(table: Mapping[str, Sequence[int]]) -> dict[KVHead, int]:
    """The inverse of `_per_layer`."""
    return {KVHead(int(layer), head): value for layer, values in table.items() for head, value in enumerate(values)}


def _print_json(value: Json, *, indent: int, reserved: int) -> str:
    """JSON of a value whose first line starts after `reserved` further characters."""
    line = json.dumps(value, ensure_ascii=False)
    if indent + reserved + len(line) < LINE_WIDTH or isinstance(value, str | int | float | None):
        return line
    inner = " " * (indent + 1)
    if isinstance(value, Mapping):
        rows = [
            f"{json.dumps(key)}: {_print_json(item, indent=indent + 1, reserved=len(key) + 4)}"
            for key, item in value.items()
        ]
        return "{\n" + ",\n".join(inner + row for row in rows) + "\n" + " " * indent + "}"
    rows = [_print_json(item, indent=indent + 1, reserved=0) for item in value]
    return "[\n" + ",\n".join(inner + row for row in rows) + "\n" + " " * indent + "]"
