"""The compiler, from top to bottom: `model.yaml` in, one product after the other out.

    model config --.
    profile -------+--> budgets --> head order --> groups --> pages --> partition --> plan --> artefact
    model.yaml ----'

Every stage is a function from products to the next product, and every product is verified before the next stage sees
it. Whoever runs the stages decides what happens between them: stop, dump, report, show progress.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tangram_plan.ir import (
    KEEP_EVERYTHING,
    ModelShape,
    PageLayout,
    Plan,
    Provenance,
    verify_budgets,
    verify_grouping,
    verify_head_order,
    verify_layout,
    verify_model_shape,
    verify_partition,
    verify_plan,
)
from tangram_plan.profiles import Profile, find_profile, load_profile

from .budgets import assign_budgets, check_profile_fits
from .config import BuildConfig
from .device import load_device
from .fitness import check_fitness
from .grouping import group_heads, order_heads, reorder_budgets
from .model_config import load_model_shape
from .partition import partition_work

SEED = 0


class Stage(StrEnum):
    """The products, in the order in which they are made."""

    MODEL = "model"  # ModelShape
    PROFILE = "profile"  # Profile
    FITNESS = "fitness"  # Fitness
    BUDGETS = "budgets"  # BudgetTable, by the checkpoint's head order
    HEAD_ORDER = "head_order"  # HeadOrder
    GROUPS = "groups"  # SolvedGrouping
    PAGES = "pages"  # PageLayout
    PARTITION = "partition"  # CtaPartition
    PLAN = "plan"  # Plan


@dataclass(frozen=True)
class Product:
    """What a stage made."""

    stage: Stage
    value: object


def compile_stages(config: BuildConfig, *, relative_to: Path, force: bool = False) -> Iterator[Product]:
    """Run the stages, one product at a time; the last one is the verified Plan.

    Args:
        config: what the user decided.
        relative_to: folder that paths in the configuration are relative to.
        force: go on although the profile is unstable or was measured on another model of the same shape.

    Raises:
        TangramError: wrong input, or a product that breaks an invariant.
    """
    shape, _ = load_model_shape(config.model, relative_to=relative_to)
    verify_model_shape(shape)
    yield Product(Stage.MODEL, shape)

    profile = load_profile(find_profile(config.profile, relative_to=relative_to))
    yield Product(Stage.PROFILE, profile)

    yield from compile_profile(shape, profile, config, relative_to=relative_to, force=force)


def compile_profile(
    shape: ModelShape, profile: Profile, config: BuildConfig, *, relative_to: Path = Path(), force: bool = False
) -> Iterator[Product]:
    """The stages after both inputs are read; arguments and errors as `compile_stages`."""
    check_profile_fits(profile, shape, force=force)
    yield Product(Stage.FITNESS, check_fitness(profile, config.retention, force=force))

    budgets = assign_budgets(profile, config.retention)
    verify_budgets(budgets, shape)
    yield Product(Stage.BUDGETS, budgets)

    order = order_heads(shape, budgets, config.tensor_parallel, reorder=config.grouping.reorder_heads)
    budgets = reorder_budgets(budgets, order)
    verify_head_order(order, shape)
    verify_budgets(budgets, shape)
    yield Product(Stage.HEAD_ORDER, order)

    ranks = config.tensor_parallel
    solved = group_heads(shape, budgets, config.grouping, config.partition.contexts, tensor_parallel=ranks, seed=SEED)
    grouping = solved.solution.grouping()
    verify_grouping(grouping, budgets, shape, ranks)
    yield Product(Stage.GROUPS, solved)

    layout = PageLayout(grouping.page_slots, shape.head_dim, config.kv_dtype)
    verify_layout(layout, grouping, shape)
    yield Product(Stage.PAGES, layout)

    device = load_device(config.partition.device, relative_to=relative_to)
    partition = partition_work(
        shape, budgets, grouping, layout, device, config.partition, tensor_parallel=ranks, seed=SEED
    )
    verify_partition(partition, shape, ranks)
    yield Product(Stage.PARTITION, partition)

    plan = Plan(
        model=shape,
        tensor_parallel=ranks,
        head_order=order,
        budgets=budgets,
        grouping=grouping,
        layout=layout,
        partition=partition,
        scorer=config.scorer,
        compress_chunk_tokens=config.compress_chunk_tokens,
        max_new_tokens=config.max_new_tokens,
        provenance=Provenance(
            profile=f"{profile.model}/{profile.scorer}",
            profile_hash=profile.hash,
            rule=f"{config.retention.rule} {config.retention.ratio:g}"
            if config.retention.ratio < 1
            else KEEP_EVERYTHING,
            grouping_solver=config.grouping.solver,
            partition_solver=config.partition.solver,
            seed=SEED,
        ),
    )
    verify_plan(plan)
    yield Product(Stage.PLAN, plan)
