"""The page law: how many tokens a KV head or head group keeps, and how many pages that takes.

This is the only place where these formulas are written; planner, allocator, reference and simulator import them, and
generated kernels are tested against them. For a prompt of P tokens and n tokens so far (all counts in tokens, exact
Python or int64 integers: `rho * P` leaves int32 from 32,768 tokens on):

    kept(P)    = min(P, max(1, sink + window + ceil(rho * max(0, P - sink - window) / 65536)))
    held(P, n) = kept(min(P, n)) + max(0, n - P)                                decode appends and never evicts
    pages      = ceil(held / tokens_per_page)

kept is monotone in P and in rho, and never below min(P, 1), so that no head is left with nothing.
"""

from dataclasses import dataclass

RHO_ONE = 65536  # fixed-point 1.0: rho is an integer in [0, RHO_ONE]
PAGE_TOKEN_ALIGNMENT = 16  # tokens per page are a multiple of this


@dataclass(frozen=True)
class RetentionLaw:
    """How much of a prompt is kept.

    Args:
        sink_tokens: first tokens, always kept.
        window_tokens: most recent tokens, always kept, on top of the scaled part.
        rho: part kept of all other tokens, as an integer over `RHO_ONE`.
    """

    sink_tokens: int
    window_tokens: int
    rho: int

    def kept(self, prompt_tokens: int) -> int:
        """Tokens kept of a prompt, at its end or at any boundary before it."""
        protected = self.sink_tokens + self.window_tokens
        scaled = -(-self.rho * max(0, prompt_tokens - protected) // RHO_ONE)
        return min(prompt_tokens, max(1, protected + scaled))

    def held(self, prompt_tokens: int, num_tokens: int) -> int:
        """Tokens in the cache when `num_tokens` of prompt and answer have been computed."""
        return self.kept(min(prompt_tokens, num_tokens)) + max(0, num_tokens - prompt_tokens)


def pages(held_tokens: int, tokens_per_page: int) -> int:
    """Pages that hold so many tokens."""
    return -(-held_tokens // tokens_per_page)


def tokens_per_page(page_slots: int, num_members: int) -> int:
    """Tokens of each member in a page of `page_slots` head-token slots; 0 if so many members do not fit."""
    return PAGE_TOKEN_ALIGNMENT * (page_slots // (PAGE_TOKEN_ALIGNMENT * num_members))
