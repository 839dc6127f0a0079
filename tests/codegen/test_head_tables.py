from dataclasses import replace

import pytest

from tangram_plan.codegen import tabulate
from tangram_plan.ir import KVHead
from tests.plans import valid_plan


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_every_kv_head_is_found_by_its_local_number(tensor_parallel: int) -> None:
    plan = valid_plan(tensor_parallel=tensor_parallel)
    tables = tabulate(plan)
    local = 4 // tensor_parallel
    for rank, group_id, column, kv_head in plan.grouping.columns():
        table = tables.layers[rank, kv_head.layer]
        head = kv_head.head - rank * local
        assert (table.group_ids[head], table.columns[head]) == (group_id, column)


def test_changing_one_heads_splits_changes_only_that_head() -> None:
    plan = valid_plan(tensor_parallel=2)
    (first, *others) = plan.partition.static_splits
    changed = replace(first, splits={**first.splits, KVHead(1, 3): 9})
    tables = tabulate(replace(plan, partition=replace(plan.partition, static_splits=(changed, *others))))
    different = {key: splits for key, splits in tables.splits.items() if splits != tabulate(plan).splits[key]}
    assert list(different) == [(first.batch, 1, 1)]  # batch, rank, layer
    assert different[first.batch, 1, 1][1] == 9  # head 3 is the second head of rank 1
