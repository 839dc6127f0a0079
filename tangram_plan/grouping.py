"""Grouping: which rank owns which KV head, and which KV heads share pages."""

import time
from dataclasses import dataclass

from tangram_plan.ir import ORIGINAL_ORDER, BudgetTable, HeadOrder, ModelShape, TangramError

from .config import GroupingConfig
from .solvers import GROUPING_SOLVERS, GroupingProblem, GroupingSolution
from .solvers.grouping_problem import page_slots_candidates


@dataclass(frozen=True)
class SolvedGrouping:
    """A solution and what it took to find it; the seconds go to reports, never into a plan."""

    solution: GroupingSolution
    seconds: float


def order_heads(shape: ModelShape, budgets: BudgetTable, tensor_parallel: int, *, reorder: bool) -> HeadOrder:
    """The order of KV heads that the plan is made for: the checkpoint's, or one that deals equal budgets to every rank.

    Raises:
        TangramError: the KV heads of a layer do not divide over the ranks.
    """
    for layer in shape.planned_layers:
        if shape.layers[layer].num_kv_heads % tensor_parallel:
            divisors = [
                n for n in range(1, shape.layers[layer].num_kv_heads + 1) if shape.layers[layer].num_kv_heads % n == 0
            ]
            raise TangramError(
                "KV heads do not divide over tensor-parallel ranks",
                where=f"tensor_parallel, layer {layer}",
                got=f"{shape.layers[layer].num_kv_heads} KV heads over {tensor_parallel} ranks",
                expected=f"tensor_parallel: {' or '.join(map(str, divisors))}",
            )
    if not reorder or tensor_parallel == 1:
        return ORIGINAL_ORDER
    from .solvers.deal_heads import deal_heads

    return deal_heads(budgets, tensor_parallel)


def reorder_budgets(budgets: BudgetTable, order: HeadOrder) -> BudgetTable:
    """The same laws, each at the new place of its KV head."""
    rho = {kv_head: budgets.rho[order.original(kv_head)] for kv_head in budgets.rho}
    return BudgetTable(budgets.sink_tokens, budgets.window_tokens, rho)


def group_heads(
    shape: ModelShape,
    budgets: BudgetTable,
    config: GroupingConfig,
    contexts: tuple[int, ...],
    *,
    tensor_parallel: int,
    seed: int,
) -> SolvedGrouping:
    """Cluster KV heads into head groups and choose the size of a page.

    Args:
        shape: gives layers and their KV heads.
        budgets: laws, in the plan's head order.
        config: solver and limits.
        contexts: prompt lengths to optimise for, in tokens.
        tensor_parallel: ranks that must share one page law.
        seed: seed of the solver.

    Raises:
        TangramError: the limits leave no grouping.
    """
    problem = grouping_problem(shape, budgets, config, contexts, tensor_parallel=tensor_parallel, seed=seed)
    start = time.perf_counter()
    solution = GROUPING_SOLVERS[config.solver]().solve(problem)
    return SolvedGrouping(solution, time.perf_counter() - start)


def grouping_problem(
    shape: ModelShape,
    budgets: BudgetTable,
    config: GroupingConfig,
    contexts: tuple[int, ...],
    *,
    tensor_parallel: int,
    seed: int,
) -> GroupingProblem:
    """The problem that `group_heads` hands to a solver; arguments are the same."""
    ranks = tuple(
        tuple(
            kv_head for layer in shape.planned_layers for kv_head in shape.local_kv_heads(layer, rank, tensor_parallel)
        )
        for rank in range(tensor_parallel)
    )
    return GroupingProblem(
        budgets=budgets,
        ranks=ranks,
        contexts=contexts,
        max_groups=config.max_groups,
        max_groups_per_layer=config.max_groups_per_layer,
        within_layers=config.scope == "layer",
        page_slots=page_slots_candidates(len(ranks[0])) if config.page_slots == "auto" else (config.page_slots,),
        seed=seed,
    )
