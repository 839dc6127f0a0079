from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram_plan.ir import RHO_ONE, RetentionLaw, pages, tokens_per_page

TOKENS = st.integers(0, 2**31)
RHOS = st.integers(0, RHO_ONE)
LAWS = st.builds(RetentionLaw, st.integers(0, 100), st.integers(0, 10_000), RHOS)

ONE_PERCENT = RetentionLaw(sink_tokens=4, window_tokens=32, rho=655)
NEARLY_ALL = RetentionLaw(sink_tokens=4, window_tokens=32, rho=65470)
HALF = RetentionLaw(sink_tokens=4, window_tokens=8, rho=32768)
NOTHING = RetentionLaw(sink_tokens=0, window_tokens=0, rho=0)


# --- kept


@pytest.mark.parametrize(
    ("law", "prompt", "kept"),
    [
        # Up to sink + window everything is kept, also when the window is longer than the prompt.
        *[(law, prompt, prompt) for law in (ONE_PERCENT, NEARLY_ALL) for prompt in (0, 1, 2, 3, 31, 32, 33, 35, 36)],
        (ONE_PERCENT, 37, 37),  # 36 + ceil(0.00999)
        (ONE_PERCENT, 136, 37),  # 36 + ceil(0.9994)
        (ONE_PERCENT, 137, 38),  # 36 + ceil(1.0094)
        (ONE_PERCENT, 131_072, 1346),  # 36 + ceil(131036 * 655 / 65536 = 1309.64)
        (NEARLY_ALL, 136, 136),  # 36 + ceil(99.899)
        (NEARLY_ALL, 1036, 1035),  # 36 + ceil(998.993)
        (HALF, 100, 56),  # 12 + 44
        (HALF, 101, 57),  # 12 + ceil(44.5)
        (NOTHING, 0, 0),
        (NOTHING, 1, 1),
        (NOTHING, 1_000_000, 1),
    ],
)
def test_kept_is_what_a_hand_computes(law: RetentionLaw, prompt: int, kept: int) -> None:
    assert law.kept(prompt) == kept


@pytest.mark.parametrize(
    ("rho", "prompt", "kept"),
    [
        (RHO_ONE, 32_768, 32_768),  # rho * P = 2^31: one above int32
        (RHO_ONE, 2**31, 2**31),
        (1, 2**31, 2**15),
        (1, 2**31 + 1, 2**15 + 1),
        (RHO_ONE - 1, 2**31, 2**31 - 2**15),
        (RHO_ONE - 1, 2**31 - 1, 2**31 - 2**15),  # 2^31 - 2^15 - 1 + 2^-16, rounded up
    ],
)
def test_kept_is_exact_beyond_32_bits(rho: int, prompt: int, kept: int) -> None:
    assert RetentionLaw(0, 0, rho).kept(prompt) == kept


@given(LAWS, TOKENS)
def test_kept_is_the_exact_ceiling(law: RetentionLaw, prompt: int) -> None:
    protected = law.sink_tokens + law.window_tokens
    scaled = ceil(Fraction(law.rho, 65536) * max(0, prompt - protected))
    assert law.kept(prompt) == min(prompt, max(1, protected + scaled))


@given(LAWS, TOKENS, TOKENS)
def test_kept_is_monotone_in_the_prompt(law: RetentionLaw, one: int, other: int) -> None:
    assert law.kept(min(one, other)) <= law.kept(max(one, other))


@given(LAWS, RHOS, TOKENS)
def test_kept_is_monotone_in_rho(law: RetentionLaw, rho: int, prompt: int) -> None:
    other = RetentionLaw(law.sink_tokens, law.window_tokens, rho)
    low, high = sorted((law, other), key=lambda candidate: candidate.rho)
    assert low.kept(prompt) <= high.kept(prompt)


@given(LAWS, TOKENS)
def test_no_head_is_left_with_nothing_and_none_keeps_more_than_there_is(law: RetentionLaw, prompt: int) -> None:
    assert min(prompt, 1) <= law.kept(prompt) <= prompt


@given(st.integers(0, 100), st.integers(0, 10_000), TOKENS)
def test_rho_one_keeps_everything(sink: int, window: int, prompt: int) -> None:
    assert RetentionLaw(sink, window, RHO_ONE).kept(prompt) == prompt


# --- held


@pytest.mark.parametrize(
    ("num_tokens", "held"),
    [
        (0, 0),
        (12, 12),  # n < P: the law at n
        (40, 26),  # 12 + 14
        (99, 56),  # 12 + ceil(43.5)
        (100, 56),  # n = P
        (101, 57),  # n > P: decode appends
        (130, 86),
    ],
)
def test_held_follows_the_law_up_to_the_prompt_and_grows_by_one_after_it(num_tokens: int, held: int) -> None:
    assert HALF.held(100, num_tokens) == held


@given(LAWS, TOKENS, st.integers(0, 2**20))
def test_decode_appends_and_never_evicts(law: RetentionLaw, prompt: int, answer: int) -> None:
    assert law.held(prompt, prompt + answer) == law.kept(prompt) + answer


@given(LAWS, TOKENS, TOKENS)
def test_held_during_prefill_is_the_law_of_what_was_computed(law: RetentionLaw, one: int, other: int) -> None:
    assert law.held(max(one, other), min(one, other)) == law.kept(min(one, other))


# --- pages


@pytest.mark.parametrize(
    ("held", "per_page", "count"), [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2), (2**31, 16, 2**27), (1, 2**31, 1)]
)
def test_pages_round_up(held: int, per_page: int, count: int) -> None:
    assert pages(held, per_page) == count


@given(st.integers(0, 2**40), st.integers(1, 2**12))
def test_pages_are_the_fewest_that_hold_the_tokens(held: int, sixteens: int) -> None:
    count = pages(held, 16 * sixteens)
    assert (count - 1) * 16 * sixteens < held <= count * 16 * sixteens


@pytest.mark.parametrize(
    ("page_slots", "num_members", "tokens"),
    [
        (16, 1, 16),
        (16, 2, 0),
        (24, 1, 16),  # eight slots are left over
        (512, 1, 512),
        (512, 3, 160),  # 512 / 48 = 10.67
        (512, 32, 16),
        (512, 33, 0),
        (768, 5, 144),  # 768 / 80 = 9.6
        (768, 1, 768),
    ],
)
def test_tokens_per_page_are_whole_sixteens_that_fit(page_slots: int, num_members: int, tokens: int) -> None:
    assert tokens_per_page(page_slots, num_members) == tokens


@given(st.integers(1, 2**20), st.integers(1, 512))
def test_tokens_per_page_cannot_be_raised(page_slots: int, num_members: int) -> None:
    tokens = tokens_per_page(page_slots, num_members)
    assert tokens % 16 == 0
    assert tokens * num_members <= page_slots < (tokens + 16) * num_members
