"""Static splits as a problem that every solver shares.

One layer on one rank, one request: KV head h reads L[h] tokens (its group's law) and is cut into s[h] splits of equal
length, each of which is a CTA's work:

    minimise    makespan = max_h ceil(L[h] / s[h])
    subject to  s[h] >= 1,   sum_h s[h] <= N        (N: CTAs in flight over requests decoded together)
"""

from dataclasses import dataclass


def split_tokens(tokens: int, splits: int) -> int:
    """Tokens of the longest of so many splits."""
    return -(-tokens // splits)


@dataclass(frozen=True)
class SplitProblem:
    """What a solver of static splits gets.

    Args:
        tokens: per KV head of one layer and rank, what its group holds at the longest planned context.
        max_splits: N; at least one per KV head.
        seed: seed of the solver.
    """

    tokens: tuple[int, ...]
    max_splits: int
    seed: int

    def makespan(self, splits: tuple[int, ...]) -> int:
        """Tokens of the busiest CTA."""
        return max(split_tokens(tokens, count) for tokens, count in zip(self.tokens, splits, strict=True))
