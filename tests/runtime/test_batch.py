import pytest

from tangram_plan.runtime.batch import Batch, Chunks
from tests.plans import valid_plan

PLAN = valid_plan(num_layers=1, num_kv_heads=2, group_sizes=(1, 1), rho=(32768, 0), sink_tokens=4, window_tokens=8)


def test_requests_that_decode_come_first_and_chunks_follow_the_page_law() -> None:
    # A decode step; a first chunk, a later one, and the replay of an answer.
    batch = Batch([20, 100, 60, 30], [25, 16, 32, 40], [0, 1, 17, 33, 43])
    assert batch.new_tokens == [1, 16, 16, 10]
    assert batch.num_decodes == 1
    assert batch.chunks(PLAN) == Chunks(
        first_request=1,
        first_token=1,
        start=[0, 16, 30],
        tokens=[16, 16, 10],
        held=[[0, 0], [14, 12], [21, 12]],  # 12 + (n - 12) / 2, and 12
        kept=[[14, 12], [22, 12], [31, 22]],  # an answer is appended
    )


@pytest.mark.parametrize(
    ("prompt_tokens", "num_tokens", "new_tokens", "num_decodes"),
    [
        (9, 10, 1, 1),  # first token of the answer
        (9, 12, 3, 0),  # of an answer, computed again
        (9, 9, 9, 0),
        (1, 1, 1, 1),  # a prompt of one token is appended like any token
        (1, 2, 1, 1),
        (9, 5, 1, 0),  # one token in the middle of a prompt is a chunk
        (9, 9, 1, 0),
        (0, 0, 1, 1),  # a padded row
    ],
)
def test_what_decodes(prompt_tokens: int, num_tokens: int, new_tokens: int, num_decodes: int) -> None:
    assert Batch([prompt_tokens], [num_tokens], [0, new_tokens]).num_decodes == num_decodes


def test_a_padded_row_has_no_token_whatever_the_engine_lets_it_read() -> None:
    batch = Batch([5, 0, 0], [7, 0, 0], [0, 1, 2, 3])
    assert batch.new_tokens == [1, 0, 0]
    assert batch.num_decodes == 3
    assert batch.chunks(PLAN).tokens == []


def test_a_step_of_chunks_alone_has_no_decodes() -> None:
    batch = Batch([16, 16], [16, 16], [0, 16, 32])
    assert (batch.num_decodes, batch.chunks(PLAN).first_token) == (0, 0)


def test_a_step_of_nothing_has_neither() -> None:
    batch = Batch([], [], [0])
    assert (batch.num_decodes, batch.chunks(PLAN).tokens) == (0, [])


def test_a_chunk_over_the_end_of_its_prompt_is_a_mistake_of_the_scheduler() -> None:
    with pytest.raises(AssertionError, match="chunk 8:12 goes over the end of its prompt of 10"):
        Batch([10], [12], [0, 4]).chunks(PLAN)
