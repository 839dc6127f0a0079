from dataclasses import replace

import pytest

from tangram_plan.ir import KVDtype, TangramError
from tangram_plan.runtime.vllm_plugin.capacity import capacity_lines, check_pool, stock_bytes
from tests.plans import valid_plan

# All four KV heads in one group that keeps 4 sinks, 8 in the window and half of the rest. A page has 64 slots of 2 * 64 * 2 + 8 = 264
# bytes, so 16,896 bytes and 16 tokens; a token of stock vLLM has 4 * 2 * 64 * 2 = 1,024 bytes.
PLAN = valid_plan(
    num_layers=2,
    num_kv_heads=2,
    dtype=KVDtype.BFLOAT16,
    page_slots=64,
    group_sizes=(4,),
    rho=(32768,),
    splits=(1,),
    max_new_tokens=1024,
)


def rows(num_pages: int, max_model_len: int) -> list[list[str]]:
    """Numbers of the table: prompt, answer, pages, of full, requests that fit, with stock vLLM."""
    _, _, _, *table = capacity_lines(PLAN, num_pages, max_model_len)
    return [line.replace(" + ", " ").split() for line in table]


def test_the_block_says_plan_and_pool() -> None:
    first, second, header, *_ = capacity_lines(PLAN, 1000, 4096)
    assert first.startswith("serving from plan ")
    assert first.endswith(": keep everything")
    assert second == "pool: 1,000 pages of 16,896 bytes, 0.02 GiB a rank; answers up to 1,024 tokens"
    assert " ".join(header.split()) == "prompt + answer pages of full requests that fit stock vLLM"


def test_numbers_are_those_of_a_hand() -> None:
    # 3,584 + 512: 12 + 3,572 / 2 = 1,798 kept, 2,310 held, 145 pages of 16,896 bytes; stock: 4,096 * 1,024 bytes
    # 28,672 + 4,096 would be an eighth, but the plan admits 1,024: 31,744 keep 12 + 15,866, with the answer 16,902 in 1,057 pages
    # 130,976 keep 12 + 65,482, 66,518 with the answer in 4,158 pages; 132,000 tokens of stock's are 8,250 blocks
    assert rows(5000, 132_000) == [
        ["3,584", "512", "145", "58.4%", "34", "20"],
        ["31,744", "1,024", "1,057", "53.2%", "4", "2"],
        ["130,976", "1,024", "4,158", "52.0%", "1", "0"],
    ]


def test_the_longest_request_is_the_last_row_and_none_is_longer() -> None:
    assert [row[:2] for row in rows(100, 4096)] == [["3,584", "512"]]
    assert [row[:2] for row in rows(100, 4097)] == [["3,584", "512"], ["3,585", "512"]]
    assert [row[:2] for row in rows(100, 1)] == [["1", "0"]]


def test_stock_vllm_keeps_whole_blocks_of_a_rank() -> None:
    assert stock_bytes(PLAN, 1) == stock_bytes(PLAN, 16) == 16 * 1024
    assert stock_bytes(PLAN, 17) == 32 * 1024
    half = valid_plan(num_layers=2, num_kv_heads=2, dtype=KVDtype.BFLOAT16, tensor_parallel=2, splits=(1,))
    assert stock_bytes(half, 17) == 16 * 1024


def test_the_longest_request_fits_or_is_refused() -> None:
    # The longest answer needs most: of 2,048 tokens 1,024 are the prompt's, 12 + 506 kept, 1,542 held in 97 pages.
    check_pool(PLAN, 97, 2048)
    with pytest.raises(TangramError) as error:
        check_pool(PLAN, 96, 2048)
    assert str(error.value) == (
        "--max-model-len: the longest request does not fit into the pool: got 2048 tokens, up to 97 pages, expected at most"
        " 96 pages; lower --max-model-len, or give more memory: --gpu-memory-utilization, --kv-cache-memory-bytes"
    ).replace("2048", "2,048")


def test_a_plan_without_long_answers_needs_less() -> None:
    # 2,047 tokens keep 12 + 1,018, with one more 1,031 in 65 pages
    check_pool(replace(PLAN, max_new_tokens=1), 65, 2048)
    with pytest.raises(TangramError):
        check_pool(replace(PLAN, max_new_tokens=1), 64, 2048)
