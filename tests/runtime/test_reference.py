import math

import pytest

pytest.importorskip("torch", reason="the reference is plain torch")

import torch

from tangram_plan.ir import KVDtype, PageLayout
from tangram_plan.runtime.decode_problem import make_problem
from tangram_plan.runtime.kernel_problem import max_error
from tangram_plan.runtime.reference import (
    attend,
    decode_attention,
    lay_out_pages,
    local_heads,
    page_views,
    slots_of,
    torch_dtype,
)
from tests.plans import valid_plan


@pytest.mark.parametrize("dtype", list(KVDtype))
def test_parts_of_a_page_fill_it_without_overlap(dtype: KVDtype) -> None:
    layout = PageLayout(page_slots=32, head_dim=24, dtype=dtype)
    pool = torch.zeros(3 * layout.page_elements, dtype=torch_dtype(layout))
    views = page_views(pool, layout)
    assert [part.shape for part in views] == [(3, 32, 24), (3, 32, 24), (3, 32), (3, 32)]
    assert sum(part[0].numel() * part.element_size() for part in views) == layout.page_bytes
    for number, part in enumerate(views, start=1):
        part.fill_(number)
    for number, part in enumerate(views, start=1):
        assert bool((part == number).all())


def test_pages_follow_the_page_law() -> None:
    plan = valid_plan()
    batch = [(100, 100), (77, 0), (1, 200)]
    table = lay_out_pages(plan, *zip(*batch, strict=True), free_pages=torch.arange(1000, 0, -1))
    counts = table.page_indptr.diff().tolist()
    num_groups = len(plan.grouping.groups)
    assert counts == [plan.group_pages(group_id, *request) for request in batch for group_id in range(num_groups)]
    assert table.page_ids.tolist() == list(range(1000, 1000 - sum(counts), -1))


def test_every_local_head_has_its_place() -> None:
    plan = valid_plan(tensor_parallel=2)
    found = {
        (rank, *place)
        for rank in range(2)
        for layer in plan.model.planned_layers
        for place in local_heads(plan, rank, layer)
    }
    assert found == {(rank, group_id, column) for rank, group_id, column, _ in plan.grouping.columns()}


def test_slots_are_those_of_the_page_layout() -> None:
    pages, slots = slots_of(torch.tensor([7, 5]), column=2, tokens_per_page=16, num_tokens=18)
    assert pages.tolist() == [7] * 16 + [5] * 2
    assert slots.tolist() == [*range(32, 48), 32, 33]


def test_attention_of_a_paged_head_is_attention_of_its_tokens() -> None:
    plan = valid_plan(gqa_ratio=2)
    problem = make_problem(plan, [(40, 45), (9, 0)])
    views = page_views(problem.expected_pool, plan.layout)
    for head, (group_id, column) in enumerate(problem.places):
        pages = problem.page_table.pages(group_id)
        tokens_per_page = plan.layout.tokens_per_page(plan.grouping.groups[group_id].num_members)
        where = slots_of(pages, column, tokens_per_page, plan.group_tokens(group_id, 40, 45))
        q = problem.q[0, 2 * head : 2 * head + 2]
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[None], views.keys[where][None], views.values[where][None]
        )
        assert max_error(problem.expected[0, 2 * head : 2 * head + 2], expected[0]) < 1e-5
    assert bool((problem.expected[1] == 0).all())  # a padded row


def test_one_head_gone_wrong_changes_only_that_head() -> None:
    """Per-head data is found by the rank's own heads: what stands in one head's slots changes that head alone."""
    plan = valid_plan(tensor_parallel=2, gqa_ratio=2)
    problem = make_problem(plan, [(60, 61)], rank=1, layer=2)
    group_id, column = problem.places[1]
    tokens_per_page = plan.layout.tokens_per_page(plan.grouping.groups[group_id].num_members)
    page = problem.page_table.pages(group_id)[0]
    page_views(problem.pool, plan.layout).values[page, column * tokens_per_page] += 100
    out = decode_attention(
        plan,
        problem.places,
        problem.q.double(),
        problem.k,
        problem.v,
        problem.score,
        problem.pool,
        problem.page_table,
        [60],
        [61],
        compute_dtype=torch.float64,
    )
    changed = (out != problem.expected).any(-1)[0].tolist()
    assert changed == [False, False, True, True]


def test_no_token_gives_zeros() -> None:
    nothing = torch.zeros(0, 8)
    assert bool((attend(torch.ones(3, 8), nothing, nothing, 1.0) == 0).all())


def test_the_new_token_is_written_to_the_last_slot_of_every_head() -> None:
    plan = valid_plan(gqa_ratio=2)
    problem = make_problem(plan, [(40, 45), (9, 0)])
    before, after = (page_views(pool, plan.layout) for pool in (problem.pool, problem.expected_pool))
    for head, (group_id, column) in enumerate(problem.places):
        tokens_per_page = plan.layout.tokens_per_page(plan.grouping.groups[group_id].num_members)
        held = plan.group_tokens(group_id, 40, 45)
        pages, slots = slots_of(problem.page_table.pages(group_id), column, tokens_per_page, held)
        last = pages[-1], slots[-1]
        assert torch.equal(after.keys[last], problem.k[0, head])
        assert torch.equal(after.values[last], problem.v[0, head])
        assert (int(after.positions[last]), float(after.scores[last])) == (44, float(problem.score[0, head]))
        assert torch.equal(after.keys[pages[:-1], slots[:-1]], before.keys[pages[:-1], slots[:-1]])
    changed = (problem.pool.view(torch.int32) != problem.expected_pool.view(torch.int32)).sum()
    assert changed == len(problem.places) * (2 * plan.layout.head_dim + 2)


def test_soft_cap_and_sinks_worked_by_hand() -> None:
    """Logits 2 ln 2 and 0; a sink of logit 0 takes a share; a cap of ln 2 makes them ln 2 * tanh(2) and 0."""
    q, keys = torch.tensor([[2.0]]), torch.tensor([[math.log(2)], [0.0]])
    values = torch.tensor([[1.0], [0.0]])
    assert attend(q, keys, values, 1.0).item() == pytest.approx(4 / 5)
    assert attend(q, keys, values, 1.0, sinks=torch.zeros(1)).item() == pytest.approx(4 / 6)
    odds = 2 ** math.tanh(2)
    assert attend(q, keys, values, 1.0, logit_softcap=math.log(2)).item() == pytest.approx(odds / (odds + 1))
