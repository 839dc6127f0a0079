"""What makes each product of the compiler valid. Called by the pipeline after every stage, by the tests, and on load."""

import math
from collections.abc import Iterable
from itertools import product

from .boundaries import SHORTEST_CHUNK
from .budget_table import BudgetTable
from .cta_partition import CtaPartition
from .errors import VerifyError
from .head_grouping import HeadGrouping
from .head_order import HeadOrder
from .memory_use import REPORT_CONTEXTS, memory_use
from .model_shape import KVHead, LayerKind, ModelShape
from .page_law import PAGE_TOKEN_ALIGNMENT, RHO_ONE, tokens_per_page
from .page_layout import PageLayout
from .plan import KEEP_EVERYTHING, Plan


def verify_model_shape(shape: ModelShape) -> None:
    """Every planned layer has whole GQA groups, and every shared layer reads one that owns its cache."""
    if not shape.planned_layers:
        raise VerifyError(
            "no layer keeps a full KV cache", where=shape.model_type, expected="at least one full-attention layer"
        )
    if shape.head_dim < 1:
        raise VerifyError("head_dim is not positive", where=shape.model_type, got=shape.head_dim)
    form = shape.attention
    for name, value in (("softmax scale", form.softmax_scale), ("logit soft cap", form.logit_softcap)):
        if value is not None and not 0 < value < math.inf:
            raise VerifyError(f"{name} is not a positive number", where=shape.model_type, got=value)
    for index, layer in enumerate(shape.layers):
        where = f"layer {index}"
        if layer.num_kv_heads and layer.num_q_heads % layer.num_kv_heads:
            raise VerifyError(
                "query heads do not divide over KV heads",
                where=where,
                got=f"{layer.num_q_heads} over {layer.num_kv_heads}",
            )
        if layer.kind is LayerKind.SHARED and not 0 <= layer.kv_owner < index:
            raise VerifyError("a shared layer reads no earlier layer", where=where, got=f"owner {layer.kv_owner}")
        if layer.kind is LayerKind.SHARED and shape.layers[layer.kv_owner].kind is LayerKind.SHARED:
            raise VerifyError("a shared layer reads another shared layer", where=where, got=f"owner {layer.kv_owner}")
        if layer.kind is not LayerKind.SHARED and layer.kv_owner != index:
            raise VerifyError(
                "a layer with its own cache names another owner", where=where, got=f"owner {layer.kv_owner}"
            )


def verify_budgets(budgets: BudgetTable, shape: ModelShape) -> None:
    """Exactly the planned KV heads have a law, with a rho that a fraction can have."""
    _check_same_heads(budgets.rho, shape, what="a budget")
    for kv_head, rho in budgets.rho.items():
        if not 0 <= rho <= RHO_ONE:
            raise VerifyError("rho is out of range", where=_name(kv_head), got=rho, expected=f"0 to {RHO_ONE}")
    if budgets.sink_tokens < 0 or budgets.window_tokens < 0:
        raise VerifyError(
            "sink or window is negative", where="budgets", got=f"{budgets.sink_tokens} and {budgets.window_tokens}"
        )


def verify_head_order(order: HeadOrder, shape: ModelShape) -> None:
    """The order of every layer that it names is a permutation of that layer's KV heads."""
    for layer, heads in order.layers.items():
        if layer not in shape.planned_layers or sorted(heads) != list(range(shape.layers[layer].num_kv_heads)):
            raise VerifyError("head order is not a permutation", where=f"layer {layer}", got=list(heads))


def verify_grouping(grouping: HeadGrouping, budgets: BudgetTable, shape: ModelShape, tensor_parallel: int) -> None:
    """Every KV head has exactly one column, on the rank that owns it, under a law that covers its own."""
    for layer in shape.planned_layers:
        if tensor_parallel < 1 or shape.layers[layer].num_kv_heads % tensor_parallel:
            raise VerifyError(
                "KV heads do not divide over ranks",
                where=f"layer {layer}",
                got=f"{shape.layers[layer].num_kv_heads} over {tensor_parallel}",
            )
    seen: dict[KVHead, int] = {}
    for group_id, group in enumerate(grouping.groups):
        where = f"group {group_id}"
        if (
            len(group.members_by_rank) != tensor_parallel
            or len({len(members) for members in group.members_by_rank}) != 1
        ):
            raise VerifyError(
                "ranks differ in columns",
                where=where,
                got=[len(m) for m in group.members_by_rank],
                expected=f"{tensor_parallel} equal counts",
            )
        if not group.num_members or not tokens_per_page(grouping.page_slots, group.num_members):
            raise VerifyError(
                "members do not fit into a page",
                where=where,
                got=f"{group.num_members} members, {grouping.page_slots} slots",
            )
        if not 0 <= group.rho <= RHO_ONE:
            raise VerifyError("rho is out of range", where=where, got=group.rho, expected=f"0 to {RHO_ONE}")
    for rank, group_id, _, kv_head in grouping.columns():
        if kv_head in seen:
            raise VerifyError(
                f"{_name(kv_head)} also in group {seen[kv_head]}",
                where=f"group {group_id}",
                expected="each KV head in exactly one group",
            )
        seen[kv_head] = group_id
        if kv_head not in budgets.rho:
            raise VerifyError(f"{_name(kv_head)} has no budget", where=f"group {group_id}")
        owner = shape.rank_of(kv_head, tensor_parallel)
        if owner != rank:
            raise VerifyError(
                f"{_name(kv_head)} is on the wrong rank", where=f"group {group_id}", got=rank, expected=str(owner)
            )
        if grouping.groups[group_id].rho < budgets.rho[kv_head]:
            raise VerifyError(
                f"law is below that of {_name(kv_head)}",
                where=f"group {group_id}",
                got=grouping.groups[group_id].rho,
                expected=f"at least {budgets.rho[kv_head]}",
            )
    _check_same_heads(seen, shape, what="a group")
    laws = [group.rho for group in grouping.groups]
    if laws != sorted(laws, reverse=True):
        raise VerifyError("groups do not stand by falling rho", where="groups", got=laws)


def verify_layout(layout: PageLayout, grouping: HeadGrouping, shape: ModelShape) -> None:
    """The page has the slots that groups were made for, parts that start at 16 bytes, and offsets that 32 bits hold."""
    if layout.page_slots != grouping.page_slots or layout.head_dim != shape.head_dim:
        raise VerifyError(
            "page does not fit groups and model",
            where="page layout",
            got=f"{layout.page_slots} slots, head_dim {layout.head_dim}",
            expected=f"{grouping.page_slots} slots, head_dim {shape.head_dim}",
        )
    if layout.page_slots < 1 or layout.page_slots % PAGE_TOKEN_ALIGNMENT:
        raise VerifyError(
            "page_slots is not aligned",
            where="page layout",
            got=layout.page_slots,
            expected=f"a positive multiple of {PAGE_TOKEN_ALIGNMENT}",
        )
    if layout.page_elements >= 1 << 31:
        raise VerifyError(
            "page is too large for 32-bit offsets in it", where="page layout", got=f"{layout.page_elements} elements"
        )


def verify_partition(partition: CtaPartition, shape: ModelShape, tensor_parallel: int) -> None:
    """Every KV head has a split for every batch size, no layer has more splits than CTAs, and one schedule was chosen for each case."""
    if partition.num_ctas < 1 or partition.tile_tokens < 1 or partition.tile_tokens % PAGE_TOKEN_ALIGNMENT:
        raise VerifyError(
            "CTAs or tile are not valid",
            where="partition",
            got=f"{partition.num_ctas} CTAs, tiles of {partition.tile_tokens} tokens",
            expected=f"at least one, and a positive multiple of {PAGE_TOKEN_ALIGNMENT}",
        )
    step_tokens, num_warps = partition.step_tokens, partition.num_warps
    if (
        step_tokens < PAGE_TOKEN_ALIGNMENT
        or step_tokens.bit_count() != 1
        or num_warps < 1
        or num_warps.bit_count() != 1
    ):
        raise VerifyError(
            "step or warps are not powers of two",
            where="partition",
            got=f"steps of {step_tokens} tokens, {num_warps} warps",
            expected=f"steps of {PAGE_TOKEN_ALIGNMENT} tokens or more",
        )
    if partition.num_stages < 1 or partition.segment_tiles < 0:
        raise VerifyError(
            "stages or tiles of a segment are not valid",
            where="partition",
            got=f"{partition.num_stages} stages, {partition.segment_tiles} tiles",
        )
    sizes = [static.batch for static in partition.static_splits]
    if not sizes or sizes[0] < 1 or sizes != sorted(set(sizes)):
        raise VerifyError("batch sizes do not rise from 1 on", where="partition", got=sizes)
    for static in partition.static_splits:
        where = f"static splits for batch {static.batch}"
        _check_same_heads(static.splits, shape, what="a split")
        if any(count < 1 for count in static.splits.values()):
            raise VerifyError("a KV head has no split", where=where, expected="at least 1 each")
        for layer, rank in product(shape.planned_layers, range(tensor_parallel)):
            local = shape.local_kv_heads(layer, rank, tensor_parallel)
            limit = max(len(local), partition.num_ctas // static.batch)
            if (total := sum(static.splits[kv_head] for kv_head in local)) > limit:
                raise VerifyError(
                    f"layer {layer} has more splits than CTAs", where=where, got=total, expected=f"at most {limit}"
                )
    batches = {static.batch for static in partition.static_splits}
    cases = [(choice.batch, choice.context) for choice in partition.choices]
    if cases != sorted(set(cases)) or {batch for batch, _ in cases} != batches:
        raise VerifyError("schedule choices do not match the batch sizes", where="partition", got=cases)
    for choice in partition.choices:
        if choice.schedule not in choice.estimates:
            raise VerifyError(
                "the chosen schedule has no estimate",
                where=f"batch {choice.batch}, context {choice.context}",
                got=choice.schedule.value,
            )


def verify_plan(plan: Plan) -> None:
    """All of the above, and that the plan does what it is for.

    Raises:
        VerifyError: names the first invariant that does not hold.
    """
    verify_model_shape(plan.model)
    verify_head_order(plan.head_order, plan.model)
    verify_budgets(plan.budgets, plan.model)
    verify_grouping(plan.grouping, plan.budgets, plan.model, plan.tensor_parallel)
    verify_layout(plan.layout, plan.grouping, plan.model)
    verify_partition(plan.partition, plan.model, plan.tensor_parallel)
    verify_serving_limits(plan)
    verify_saves_memory(plan)


def verify_serving_limits(plan: Plan) -> None:
    """A compression chunk holds what is protected in it, and an answer may have a token."""
    protected = plan.budgets.sink_tokens + plan.budgets.window_tokens
    if plan.compress_chunk_tokens < max(SHORTEST_CHUNK, protected):
        raise VerifyError(
            "compression chunk is too short for sink and window, or for telling it from a decode step",
            where="compress_chunk_tokens",
            got=plan.compress_chunk_tokens,
            expected=f"at least {max(SHORTEST_CHUNK, protected)}",
        )
    if plan.max_new_tokens < 1:
        raise VerifyError("no answer fits", where="max_new_tokens", got=plan.max_new_tokens, expected="at least 1")


def verify_saves_memory(plan: Plan) -> None:
    """A plan that is meant to evict frees bytes, at one of the reported contexts at least."""
    if plan.provenance.rule == KEEP_EVERYTHING:
        return
    uses = [memory_use(plan, context) for context in REPORT_CONTEXTS]
    if all(use.allocated_bytes >= use.full_bytes for use in uses):
        raise VerifyError(
            "the plan is meant to evict tokens but saves no byte",
            where="memory",
            got=f"{uses[-1].allocated_over_full:.3f} of the full cache at {uses[-1].context} tokens",
            expected="less than 1",
            fix="allow more groups or smaller pages (grouping.max_groups, grouping.page_slots), or keep less (retention)",
        )


def _check_same_heads(named: Iterable[KVHead], shape: ModelShape, *, what: str) -> None:
    heads, planned = set(named), set(shape.kv_heads())
    if heads != planned:
        missing, extra = sorted(planned - heads), sorted(heads - planned)
        raise VerifyError(
            f"{_name((missing or extra)[0])} {'lacks' if missing else 'should not have'} {what}",
            where=shape.model_type,
            got=f"{len(heads)} KV heads",
            expected=f"{len(planned)}",
        )


def _name(kv_head: KVHead) -> str:
    return f"KV head (layer {kv_head.layer}, head {kv_head.head})"
