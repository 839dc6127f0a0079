from pathlib import Path

import pytest

pytest.importorskip("torch", reason="kernels take torch tensors")

from tangram_plan.codegen import emit
from tangram_plan.runtime.head_tables import HeadTables, load_head_tables
from tests.plans import valid_plan

PLAN = valid_plan(tensor_parallel=2, num_ctas=24, batches=(1, 4, 16))


@pytest.fixture
def tables(tmp_path: Path) -> HeadTables:
    emit(PLAN, "0" * 64, tmp_path)
    return load_head_tables(tmp_path)


@pytest.mark.parametrize(
    ("num_requests", "splits"), [(1, [3, 1]), (2, [3, 1]), (4, [3, 1]), (5, [1, 1]), (16, [1, 1]), (17, [1, 1])]
)
def test_splits_are_those_of_the_next_larger_batch_else_of_the_largest(
    tables: HeadTables, num_requests: int, splits: list[int]
) -> None:
    assert tables.splits_of(0, num_requests)[0] == tuple(splits)


@pytest.mark.parametrize("rank", [0, 1])
def test_split_tables_hold_every_layers_splits(tables: HeadTables, rank: int) -> None:
    split_head, split_indptr = tables.split_tables(rank, 1, "cpu")
    by_layer = tables.splits_of(rank, 1).values()
    assert split_indptr.diff().tolist() == [count for splits in by_layer for count in splits]
    assert split_head.tolist() == [
        head for splits in by_layer for head, count in enumerate(splits) for _ in range(count)
    ]


def test_step_tables_hold_every_layers_places(tables: HeadTables) -> None:
    head_indptr, group_id, column = tables.step_tables(1, "cpu")
    for index, layer in enumerate(PLAN.model.planned_layers):
        heads = slice(*head_indptr[index : index + 2].tolist())
        found = (group_id[heads].tolist(), column[heads].tolist())
        assert found == tuple(part.tolist() for part in tables.layer_tables(1, layer, "cpu"))
