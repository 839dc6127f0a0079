"""Which page of a request's row is whose, against a row that grows page by page."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram_plan.ir import Plan, group_pages_in_row, most_pages, reserve
from tests.plans import valid_plan

PLANS = [
    valid_plan(),
    valid_plan(num_layers=2, num_kv_heads=2, page_slots=128, rho=(65536,), sink_tokens=0, window_tokens=0),
    valid_plan(num_layers=4, page_slots=64, rho=(30000, 30000, 7, 0), group_sizes=(1, 2, 4, 2, 3, 1, 3), max_new_tokens=40),
    valid_plan(page_slots=256, rho=(50000, 100), group_sizes=(2, 10), max_new_tokens=7),
]  # fmt: skip
ANY_PLAN = st.sampled_from(PLANS)
PROMPTS = st.integers(1, 3000)
ANSWERS = st.integers(0, 400)


def _row_that_grows(plan: Plan, prompt_tokens: int, num_tokens: int) -> list[list[int]]:
    """A row built as an engine does: at every step each group, in turn, takes the pages that it lacks."""
    groups = range(len(plan.grouping.groups))
    places: list[list[int]] = [[] for _ in groups]
    for total in range(prompt_tokens, max(prompt_tokens, num_tokens) + 1):
        for group in groups:
            while len(places[group]) < plan.group_pages(group, prompt_tokens, total):
                places[group].append(sum(map(len, places)))
    return places


def _row_in_closed_form(plan: Plan, prompt_tokens: int, num_tokens: int) -> list[list[int]]:
    """As the module's docstring says, for a request of which the prompt is computed."""
    groups = range(len(plan.grouping.groups))
    per_page = [plan.layout.tokens_per_page(group.num_members) for group in plan.grouping.groups]
    kept = [plan.group_tokens(group, prompt_tokens, prompt_tokens) for group in groups]
    first = [math.ceil(kept[group] / per_page[group]) for group in groups]
    slack = [first[group] * per_page[group] - kept[group] for group in groups]

    def added(group: int, steps: int) -> int:
        return math.ceil(max(0, steps - slack[group]) / per_page[group])

    places = []
    for group in groups:
        pages = [sum(first[:group]) + page for page in range(first[group])]
        for page in range(added(group, num_tokens - prompt_tokens)):
            step = slack[group] + page * per_page[group] + 1
            earlier = sum(added(other, step if other < group else step - 1) for other in groups)
            pages.append(sum(first) + earlier)
        places.append(pages)
    return places


def test_a_row_by_hand() -> None:
    # Page of 64 slots: groups of 1, 2 and 1 heads have 64, 32 and 64 tokens a page. All 63 tokens of the prompt are kept.
    plan = valid_plan(num_layers=1, rho=(65536,), page_slots=64, group_sizes=(1, 2, 1), sink_tokens=0, window_tokens=0)
    assert group_pages_in_row(plan, 63, 63) == [[0], [1, 2], [3]]
    assert group_pages_in_row(plan, 63, 64) == [[0], [1, 2], [3]]
    assert group_pages_in_row(plan, 63, 65) == [[0, 4], [1, 2, 5], [3, 6]]
    assert group_pages_in_row(plan, 63, 97) == [[0, 4], [1, 2, 5, 7], [3, 6]]


@given(ANY_PLAN, PROMPTS, ANSWERS)
def test_every_place_is_one_groups_and_each_has_as_many_as_the_page_law_says(
    plan: Plan, prompt: int, answer: int
) -> None:
    places = group_pages_in_row(plan, prompt, prompt + answer)
    assert sorted(place for group in places for place in group) == list(range(plan.num_pages(prompt, prompt + answer)))
    assert [len(group) for group in places] == [
        plan.group_pages(group, prompt, prompt + answer) for group in range(len(places))
    ]


@given(ANY_PLAN, PROMPTS, ANSWERS, ANSWERS)
def test_a_growing_request_never_moves_a_page(plan: Plan, prompt: int, one: int, other: int) -> None:
    fewer, more = sorted((one, other))
    before, after = (group_pages_in_row(plan, prompt, prompt + answer) for answer in (fewer, more))
    assert [group[: len(old)] for group, old in zip(after, before, strict=True)] == before


@given(ANY_PLAN, PROMPTS, st.data())
def test_a_prompt_in_the_middle_has_all_its_pages(plan: Plan, prompt: int, data: st.DataObject) -> None:
    computed = data.draw(st.integers(0, prompt))
    assert group_pages_in_row(plan, prompt, computed) == group_pages_in_row(plan, prompt, prompt)
    assert reserve(plan, prompt, computed) == reserve(plan, prompt, prompt)


@given(ANY_PLAN, PROMPTS, st.integers(0, 150))
def test_a_row_is_in_the_order_in_which_pages_are_claimed(plan: Plan, prompt: int, answer: int) -> None:
    assert group_pages_in_row(plan, prompt, prompt + answer) == _row_that_grows(plan, prompt, prompt + answer)


@given(ANY_PLAN, PROMPTS, ANSWERS)
def test_the_closed_form_of_the_docstring_is_the_row(plan: Plan, prompt: int, answer: int) -> None:
    assert group_pages_in_row(plan, prompt, prompt + answer) == _row_in_closed_form(plan, prompt, prompt + answer)


@given(ANY_PLAN, PROMPTS, ANSWERS)
def test_a_reservation_lasts_to_its_last_token_and_not_further(plan: Plan, prompt: int, answer: int) -> None:
    reservation = reserve(plan, prompt, prompt + answer)
    assert reservation.max_tokens >= prompt + answer
    assert plan.num_pages(prompt, prompt + answer) == reservation.num_pages
    assert plan.num_pages(prompt, reservation.max_tokens) == reservation.num_pages
    assert plan.num_pages(prompt, reservation.max_tokens + 1) > reservation.num_pages


@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
@pytest.mark.parametrize("max_tokens", [1, 2, 13, 40, 41, 64, 257, 600])
def test_no_request_needs_more_than_the_most(plan: Plan, max_tokens: int) -> None:
    needed = [
        plan.num_pages(prompt, min(prompt + plan.max_new_tokens, max_tokens)) for prompt in range(1, max_tokens + 1)
    ]
    assert most_pages(plan, max_tokens) == max(needed)
