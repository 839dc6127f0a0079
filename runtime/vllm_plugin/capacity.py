"""How much an engine's pool holds, beside what stock vLLM would hold in the same memory: the block that is printed at start."""

from collections.abc import Iterator

from tangram_plan.ir import Plan, TangramError, most_pages, plan_hash

LENGTHS = (4096, 32768)  # tokens of prompt and answer, beside the longest that the engine admits
ANSWER_SHARE = 8  # of these tokens, one in so many is the answer's, if the plan admits such a long one
STOCK_BLOCK_TOKENS = 16


def check_pool(plan: Plan, num_pages: int, max_model_len: int) -> None:
    """That every request which is admitted fits, alone, and so never waits for pages that do not exist.

    Args:
        plan: of the artefact.
        num_pages: of the pool, the null page not counted.
        max_model_len: longest prompt and answer.

    Raises:
        TangramError: one would not.
    """
    most = most_pages(plan, max_model_len)
    if most > num_pages:
        raise TangramError(
            "the longest request does not fit into the pool",
            where="--max-model-len",
            got=f"{max_model_len:,} tokens, up to {most:,} pages",
            expected=f"at most {num_pages:,} pages",
            fix="lower --max-model-len, or give more memory: --gpu-memory-utilization, --kv-cache-memory-bytes",
        )


def capacity_lines(plan: Plan, num_pages: int, max_model_len: int) -> Iterator[str]:
    """The block, line by line; numbers are per rank.

    Args:
        plan: of the artefact.
        num_pages: of the pool, the null page not counted.
        max_model_len: longest prompt and answer.
    """
    pool_bytes = num_pages * plan.layout.page_bytes
    yield f"serving from plan {plan_hash(plan)[:16]}: {plan.provenance.rule}"
    yield (
        f"pool: {num_pages:,} pages of {plan.layout.page_bytes:,} bytes, {pool_bytes / 2**30:.2f} GiB a rank;"
        f" answers up to {plan.max_new_tokens:,} tokens"
    )
    yield f"{'prompt + answer':>20}  {'pages':>9}  {'of full':>7}  {'requests that fit':>17}  {'stock vLLM':>10}"
    for length in [*(length for length in LENGTHS if length < max_model_len), max_model_len]:
        answer = min(plan.max_new_tokens, length // ANSWER_SHARE)
        pages = plan.num_pages(length - answer, length)
        full_bytes = stock_bytes(plan, length)
        share = pages * plan.layout.page_bytes / full_bytes
        request = f"{length - answer:,} + {answer:,}"
        fit, stock = num_pages // pages, pool_bytes // full_bytes
        yield f"{request:>20}  {pages:>9,}  {share:>7.1%}  {fit:>17,}  {stock:>10,}"


def stock_bytes(plan: Plan, num_tokens: int) -> int:
    """Keys and values of every token, on each rank, in whole blocks."""
    blocks = -(-num_tokens // STOCK_BLOCK_TOKENS)
    return blocks * STOCK_BLOCK_TOKENS * plan.model.num_kv_heads // plan.tensor_parallel * plan.layout.kv_bytes
