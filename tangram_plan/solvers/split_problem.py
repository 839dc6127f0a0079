"""Static splits as a problem that every solver shares.

One layer on one rank, one request: KV head h reads L[h] tokens (its group's law) and is cut into s[h] splits of equal
length, each of which is a CTA's work:

    minimise    makespan = max_h ceil(L[h] / s[h])
    subject to  s[h] >= 1,   sum_h s[h] <= N        (N: CTAs in flight over requests decoded together)

The optimum has a closed form. A makespan of T >= 1 takes at least s[h] = max(1, ceil(L[h] / T)) splits of every KV head,
and as many suffice; their sum falls as T rises. So the least makespan is the least T at which the sum is at most N, found by
bisection, and these s[h] are the fewest splits that reach it.
"""

from bisect import bisect_left
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

    def fewest_splits(self) -> tuple[int, ...]:
        """The least makespan with the fewest splits, by the closed form."""
        makespans = range(1, max(*self.tokens, 1) + 1)
        fits = bisect_left(makespans, True, key=lambda makespan: sum(self._splits_at(makespan)) <= self.max_splits)
        return self._splits_at(makespans[fits])

    def _splits_at(self, makespan: int) -> tuple[int, ...]:
        return tuple(max(1, -(-tokens // makespan)) for tokens in self.tokens)
