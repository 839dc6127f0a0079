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
    split_head, split_indptr = tables.split_tables(0, 0, num_requests, "cpu")
    assert split_indptr.diff().tolist() == splits
    assert split_head.tolist() == [head for head, count in enumerate(splits) for _ in range(count)]


@pytest.mark.parametrize("num_requests", [0, 1, 5])
@pytest.mark.parametrize("rank", [0, 1])
def test_queues_of_the_layers_fill_the_buffer_one_after_the_other(
    tables: HeadTables, rank: int, num_requests: int
) -> None:
    ranges = [tables.queue_range(rank, layer, num_requests) for layer in PLAN.model.planned_layers]
    assert ranges[0][0] == 0
    assert [start for start, _ in ranges[1:]] == [end for _, end in ranges[:-1]]
    assert [end - start for start, end in ranges] == [2 * num_requests + 1] * 3
    assert tables.queue_size(rank, num_requests) == ranges[-1][1]


def test_queue_tables_hold_every_layers_groups(tables: HeadTables) -> None:
    head_indptr, group_id = tables.queue_tables(1, "cpu")
    for index, layer in enumerate(PLAN.model.planned_layers):
        start, end = head_indptr[index : index + 2].tolist()
        assert group_id[start:end].tolist() == tables.layer_tables(1, layer, "cpu").group_id.tolist()
