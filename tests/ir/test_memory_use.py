from dataclasses import replace

import pytest

from tangram_plan.ir import KVDtype, MemoryUse, PageLayout, memory_use
from tests.small_plans import hand_plan

# 2048 tokens, 12 of them protected: KV heads keep 12 + 1018, 12 + 509, 12 + 255 and 12 + 21.
IDEAL_SLOTS = 1030 + 521 + 267 + 33


@pytest.mark.parametrize(
    ("layout", "slot_bytes", "page_bytes", "page_elements"),
    [
        (PageLayout(256, 128, KVDtype.BFLOAT16), 520, 133_120, 66_560),
        (PageLayout(256, 128, KVDtype.FLOAT16), 520, 133_120, 66_560),
        (PageLayout(64, 96, KVDtype.FLOAT32), 776, 49_664, 12_416),
    ],
)
def test_a_slot_holds_key_value_position_and_score(
    layout: PageLayout, slot_bytes: int, page_bytes: int, page_elements: int
) -> None:
    assert (layout.slot_bytes, layout.page_bytes, layout.page_elements) == (slot_bytes, page_bytes, page_elements)


def test_memory_of_one_rank_is_what_a_hand_computes() -> None:
    # Pages: ceil(1030 / 32) = 33, ceil(521 / 16) = 33, ceil(267 / 32) = 9; of 32 slots of 40 bytes.
    expected = MemoryUse(
        context=2048,
        ideal_slots=IDEAL_SLOTS,
        pages=75,
        allocated_slots=2400,
        allocated_bytes=96_000,
        full_bytes=262_144,
    )
    use = memory_use(hand_plan(), 2048)
    assert use == expected
    assert use.allocated_over_ideal == 2400 / 1851
    assert use.allocated_over_full == 96_000 / 262_144


def test_memory_counts_the_pages_of_all_ranks() -> None:
    # Both ranks: ceil(1030 / 32) = 33 and ceil(521 / 32) = 17.
    use = memory_use(hand_plan(tensor_parallel=2), 2048)
    assert (use.ideal_slots, use.pages, use.allocated_slots, use.full_bytes) == (IDEAL_SLOTS, 100, 3200, 262_144)


def test_pages_of_a_request_grow_by_the_answer_alone() -> None:
    plan = hand_plan()
    assert [plan.group_tokens(group, 2048, 2048 + 10) for group in range(3)] == [1040, 531, 277]
    assert [plan.group_pages(group, 2048, 2048 + 10) for group in range(3)] == [33, 34, 9]
    assert plan.num_pages(2048, 2048 + 10) == 76
    assert plan.num_pages(2048, 0) == 0


def test_ideal_slots_ignore_how_heads_are_grouped() -> None:
    plan = hand_plan()
    other = replace(plan, grouping=replace(plan.grouping, page_slots=320))
    assert memory_use(other, 2048).ideal_slots == IDEAL_SLOTS
