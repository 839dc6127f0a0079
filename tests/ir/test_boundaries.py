from itertools import pairwise

import pytest

from tangram_plan.ir import next_boundary

CHUNKS = [1, 2, 16, 64]


def _boundaries(prompt_tokens: int, chunk_tokens: int) -> list[int]:
    """All of a prompt, 0 among them."""
    boundaries = [0]
    while boundaries[-1] < prompt_tokens:
        boundaries.append(next_boundary(prompt_tokens, boundaries[-1], chunk_tokens))
    return boundaries


@pytest.mark.parametrize(
    ("prompt_tokens", "boundaries"),
    [
        (1, [0, 1]),
        (2, [0, 2]),
        (16, [0, 16]),
        (17, [0, 17]),  # one token alone would be a decode step
        (18, [0, 16, 18]),
        (33, [0, 16, 33]),
        (50, [0, 16, 32, 48, 50]),
    ],
)
def test_boundaries_of_chunks_of_16_by_hand(prompt_tokens: int, boundaries: list[int]) -> None:
    assert _boundaries(prompt_tokens, 16) == boundaries


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_boundaries_are_the_multiples_below_the_last_token_and_the_end(chunk_tokens: int) -> None:
    for prompt_tokens in range(1, 301):
        multiples = [n for n in range(1, prompt_tokens - 1) if n % chunk_tokens == 0]
        assert _boundaries(prompt_tokens, chunk_tokens) == [0, *multiples, prompt_tokens]


@pytest.mark.parametrize("chunk_tokens", CHUNKS[1:])
def test_no_chunk_is_longer_than_one_more_token_and_none_is_a_single_token(chunk_tokens: int) -> None:
    for prompt_tokens in range(2, 301):
        sizes = [end - start for start, end in pairwise(_boundaries(prompt_tokens, chunk_tokens))]
        assert min(sizes) > 1
        assert max(sizes) <= chunk_tokens + 1


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_the_next_boundary_is_the_same_from_wherever_one_asks(chunk_tokens: int) -> None:
    for prompt_tokens in range(1, 301):
        for start, end in pairwise(_boundaries(prompt_tokens, chunk_tokens)):
            assert {next_boundary(prompt_tokens, at, chunk_tokens) for at in range(start, end)} == {end}
