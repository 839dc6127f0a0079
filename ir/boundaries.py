"""Where a prompt is compressed: canonical boundaries, the same whatever the engine's token budget and batch are.

A prompt of P tokens is compressed at every multiple of `compress_chunk_tokens` (C) below P - 1, and at P: what is kept is then a
function of tokens, plan and P alone. A last chunk of one token would look like a decode step to the engine, so that the chunk
before takes it: chunks have up to C + 1 tokens, and only a prompt of one token has a chunk of one.
"""

SHORTEST_CHUNK = 2  # of `compress_chunk_tokens`


def longest_chunk(compress_chunk_tokens: int) -> int:
    """Tokens of a chunk, at most."""
    return compress_chunk_tokens + 1


def next_boundary(prompt_tokens: int, computed_tokens: int, compress_chunk_tokens: int) -> int:
    """The first boundary after so many computed tokens of a prompt.

    Args:
        prompt_tokens: tokens of the prompt, more than `computed_tokens`.
        computed_tokens: those in the cache, a boundary or 0.
        compress_chunk_tokens: the plan's.
    """
    multiple = (computed_tokens // compress_chunk_tokens + 1) * compress_chunk_tokens
    return multiple if multiple < prompt_tokens - 1 else prompt_tokens
