"""Problems for solvers, their values computed without the solvers' own code, and the same run in another process."""

import hashlib
import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pytest

from tangram_plan.config import GroupingConfig
from tangram_plan.grouping import grouping_problem
from tangram_plan.ir import (
    RHO_ONE,
    BudgetTable,
    HeadGrouping,
    KVHead,
    LayerKind,
    LayerShape,
    ModelShape,
    TangramError,
)
from tangram_plan.solvers import GROUPING_SOLVERS, SPLIT_SOLVERS, GroupingProblem, GroupingSolver, SplitProblem
from tangram_plan.solvers.deal_heads import deal_heads
from tangram_plan.solvers.grouping_problem import COST_SCALE, PAGE_COST_SLOTS, TABLE_COST

Scope = Literal["model", "layer"]


# --- models and budgets


def make_shape(num_layers: int, num_kv_heads: int) -> ModelShape:
    layers = tuple(LayerShape(LayerKind.FULL, num_kv_heads, 2 * num_kv_heads, layer) for layer in range(num_layers))
    return ModelShape("hand", layers, 64)


def make_budgets(shape: ModelShape, rho: Sequence[int], *, sink: int = 4, window: int = 8) -> BudgetTable:
    return BudgetTable(sink, window, dict(zip(shape.kv_heads(), rho, strict=True)))


def budget_tables(num_heads: int) -> dict[str, list[int]]:
    """Tables of every kind: flat, at both ends, seeded, with ties."""
    rng = np.random.default_rng(num_heads)
    return {
        "all equal": [20000] * num_heads,
        "nothing kept": [0] * num_heads,
        "everything kept": [RHO_ONE] * num_heads,
        "uniform": rng.integers(0, RHO_ONE + 1, num_heads).tolist(),
        "skewed": [int(x) for x in RHO_ONE * rng.beta(0.5, 2, num_heads)],
        "ties": rng.choice([0, 9000, 40000], num_heads).tolist(),
        "one large": [0] * (num_heads - 1) + [RHO_ONE],
    }


# --- clustering


class GroupingCase(NamedTuple):
    """One cell of the matrix.

    Args:
        problem: what the solver gets.
        shape: the model it is made from.
    """

    problem: GroupingProblem
    shape: ModelShape


def make_case(
    num_layers: int,
    num_kv_heads: int,
    rho: Sequence[int],
    *,
    ranks: int = 1,
    scope: Scope = "model",
    max_groups: int = 24,
    max_groups_per_layer: int | None = None,
    page_slots: int | Literal["auto"] = "auto",
    contexts: tuple[int, ...] = (200, 1000, 5000),
    sink: int = 4,
) -> GroupingCase:
    shape = make_shape(num_layers, num_kv_heads)
    config = GroupingConfig(
        scope=scope, max_groups=max_groups, max_groups_per_layer=max_groups_per_layer, page_slots=page_slots
    )
    budgets = make_budgets(shape, rho, sink=sink)
    return GroupingCase(grouping_problem(shape, budgets, config, contexts, tensor_parallel=ranks, seed=0), shape)


def limited_cases() -> dict[str, GroupingCase]:
    """Limits on the groups that touch a layer: from one to as many as it has KV heads, and pages that runs just fit."""
    cases = {
        f"{table}, {limit} groups per layer": make_case(3, 4, rho, max_groups=6, max_groups_per_layer=limit)
        for table, rho in budget_tables(12).items()
        for limit in (1, 2, 4)
    }
    for layers, heads, limit in ((4, 8, 2), (2, 16, 4)):
        rho = budget_tables(layers * heads)["uniform"]
        cases[f"{layers} layers of {heads}, limit {limit}"] = make_case(layers, heads, rho, max_groups_per_layer=limit)
    cases["runs fill their pages"] = make_case(
        2, 8, budget_tables(16)["uniform"], page_slots=64, max_groups_per_layer=2
    )
    return cases


def grouping_cases() -> dict[str, GroupingCase]:
    """The matrix that every clustering solver joins."""
    cases = {
        f"{table}, {scope}, {ranks} ranks": make_case(3, 4, rho, ranks=ranks, scope=scope)
        for table, rho in budget_tables(12).items()
        for scope in ("model", "layer")
        for ranks in (1, 2, 4)
    }
    for seed in range(12):
        rho = np.random.default_rng(seed).integers(0, RHO_ONE + 1, 48).tolist()
        cases[f"48 heads in few groups, seed {seed}"] = make_case(6, 8, rho, ranks=1 + seed % 2, max_groups=3 + seed)
    cases["one head"] = make_case(1, 1, [30000])
    cases["one head that keeps nothing"] = make_case(1, 1, [0], sink=0)
    cases["more heads than a page holds"] = make_case(2, 8, budget_tables(16)["uniform"], page_slots=32, max_groups=9)
    cases["exactly as many groups as needed"] = make_case(
        2, 4, budget_tables(8)["skewed"], page_slots=48, max_groups=4, scope="layer"
    )
    cases["one head to a page"] = make_case(2, 4, budget_tables(8)["uniform"], page_slots=16, max_groups=8)
    return cases


def objective_by_hand(grouping: HeadGrouping, budgets: BudgetTable, contexts: Sequence[int]) -> Fraction:
    """Mean over contexts of allocated / ideal, pages priced, plus the price of tables; from the formula, in fractions."""
    ranks = len(grouping.groups[0].members_by_rank)
    total = Fraction(TABLE_COST * len(grouping.groups), COST_SCALE)
    for context in contexts:
        ideal = Fraction(sum(_kept(budgets, rho, context) for rho in budgets.rho.values()), ranks)
        for group in grouping.groups:
            rho = max(budgets.rho[kv_head] for members in group.members_by_rank for kv_head in members)
            page_tokens = grouping.page_slots // len(group.members_by_rank[0]) // 16 * 16
            num_pages = math.ceil(Fraction(_kept(budgets, rho, context), page_tokens))
            total += num_pages * (grouping.page_slots + Fraction(PAGE_COST_SLOTS)) / ideal / len(contexts)
    return total


def _kept(budgets: BudgetTable, rho: int, context: int) -> int:
    protected = budgets.sink_tokens + budgets.window_tokens
    scaled = math.ceil(Fraction(rho * max(0, context - protected), RHO_ONE))
    return min(context, max(1, protected + scaled))


def best_of_all_groupings(problem: GroupingProblem) -> int | None:
    """The least cost over every size of page, every set partition of the KV heads and, with ranks, every pairing of columns.

    Groups that touch a layer are counted on one rank only.
    None if no grouping is allowed.
    """
    rho = problem.budgets.rho
    partitions = [
        [(max(rho[head] for head in group), len(group)) for group in groups]
        for groups in _groupings_of_ranks(problem.ranks)
        if len(groups) <= problem.max_groups
        and (not problem.within_layers or all(len({head.layer for head in group}) == 1 for group in groups))
        and (problem.max_groups_per_layer is None or most_groups_of_a_layer(groups) <= problem.max_groups_per_layer)
    ]
    ranks = len(problem.ranks)
    costs: list[int] = []
    for slots in problem.page_slots:
        known: dict[tuple[int, int], int] = {}
        for groups in {tuple(sorted(groups)) for groups in partitions}:
            if any(16 * size // ranks > slots for _, size in groups):
                continue
            for group in groups:
                if group not in known:
                    known[group] = problem.cost(group[0], group[1] // ranks, slots)
            costs.append(sum(known[group] for group in groups))
    return min(costs, default=None)


def most_groups_of_a_layer(groups: Iterable[Iterable[KVHead]]) -> int:
    touched = Counter(layer for group in groups for layer in {head.layer for head in group})
    return max(touched.values())


def _groupings_of_ranks(ranks: Sequence[Sequence[KVHead]]) -> Iterator[list[tuple[KVHead, ...]]]:
    """Every grouping that takes equally many KV heads from every rank; a group is given by its heads on all ranks."""
    first, *others = ranks
    for groups in set_partitions(first):
        sizes = [len(group) for group in groups]
        for shares in itertools.product(*(list(_shares(rank, sizes)) for rank in others)):
            yield [tuple(itertools.chain(*parts)) for parts in zip(groups, *shares, strict=True)]


def set_partitions(items: Sequence[KVHead]) -> Iterator[list[list[KVHead]]]:
    if not items:
        yield []
        return
    first, *rest = items
    for groups in set_partitions(rest):
        yield [[first], *groups]
        for index in range(len(groups)):
            yield [*groups[:index], [first, *groups[index]], *groups[index + 1 :]]


def _shares(items: Sequence[KVHead], sizes: Sequence[int]) -> Iterator[list[tuple[KVHead, ...]]]:
    """Every way to hand out items in shares of these sizes."""
    if not sizes:
        yield []
        return
    for share in itertools.combinations(items, sizes[0]):
        for others in _shares([item for item in items if item not in share], sizes[1:]):
            yield [share, *others]


# --- static splits


def split_problems() -> dict[str, SplitProblem]:
    """The matrix that every solver of static splits joins."""
    rng = np.random.default_rng(0)
    problems = {
        "one head": SplitProblem((1000,), 7, 0),
        "one head without tokens": SplitProblem((0,), 7, 0),
        "no tokens": SplitProblem((0, 0, 0), 8, 0),
        "one split each": SplitProblem((5, 900, 0, 40), 4, 0),
        "one to spare": SplitProblem((5, 900, 0, 40), 5, 0),
        "some heads without tokens": SplitProblem((0, 700, 0, 300), 12, 0),
        "more splits than tokens": SplitProblem((3, 2, 1), 100, 0),
        "equal heads": SplitProblem((4096,) * 8, 264, 0),
        "equal heads, nearly one split each": SplitProblem((4096,) * 8, 9, 0),
        "one large head": SplitProblem((131072, 12, 12, 12, 12, 12, 12, 12), 132, 0),
        # All shares round up: 1.5 of a split each, 12 in sum.
        "rounding exceeds the limit": SplitProblem((300,) * 6, 9, 0),
    }
    for heads, most in ((2, 5), (4, 66), (8, 16), (8, 264), (32, 132)):
        tokens = tuple(rng.integers(0, 40000, heads).tolist())
        problems[f"{heads} seeded heads, {most} splits"] = SplitProblem(tokens, most, 0)
    return problems


def all_splits(num_heads: int, max_splits: int) -> Iterator[tuple[int, ...]]:
    """Every way to give each head at least one split, and at most so many together."""
    counts = range(1, max_splits - num_heads + 2)
    return (splits for splits in itertools.product(counts, repeat=num_heads) if sum(splits) <= max_splits)


# --- other processes


def digest_of_groupings() -> str:
    """Hash of what every clustering solver returns for every case."""
    return _digest(
        [name, solver, GROUPING_SOLVERS[solver]().solve(case.problem)]
        for name, case in grouping_cases().items()
        for solver in GROUPING_SOLVERS
    )


def digest_of_limited_groupings() -> str:
    """Hash of what `cp_sat` returns where groups per layer are limited."""
    return _digest([name, GROUPING_SOLVERS["cp_sat"]().solve(case.problem)] for name, case in limited_cases().items())


def digest_of_splits() -> str:
    return _digest(
        [name, solver, SPLIT_SOLVERS[solver]().solve(problem)]
        for name, problem in split_problems().items()
        for solver in SPLIT_SOLVERS
    )


def digest_of_dealt_heads() -> str:
    return _digest(
        [name, ranks, sorted(deal_heads(make_budgets(make_shape(6, 24), rho), ranks).layers.items())]
        for name, rho in budget_tables(6 * 24).items()
        for ranks in (2, 3, 4, 8)
    )


def digest_elsewhere(function: str, hash_seed: int) -> str:
    """What a function of this module returns in a fresh process with another order of strings in sets."""
    code = f"from tests.solver_cases import {function}; print({function}())"
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _digest(values: Iterator[list[object]]) -> str:
    return hashlib.sha256("\n".join(map(repr, values)).encode()).hexdigest()


def check_optimal(solver: GroupingSolver, case: GroupingCase) -> None:
    """The solver finds the best of all groupings there are, and knows it; or says that there is none."""
    best = best_of_all_groupings(case.problem)
    if best is None:
        with pytest.raises(TangramError, match="do not fit"):
            solver.solve(case.problem)
        return
    solution = solver.solve(case.problem)
    assert round(solution.objective * COST_SCALE) == case.problem.solution_cost(solution) == best
    assert solution.bound == solution.objective
    assert solution.status == "optimal"
