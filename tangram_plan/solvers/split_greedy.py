"""`greedy`: starts with one split each and gives the next to the KV head whose splits are longest, until none is left or none helps."""

from dataclasses import dataclass

from .split_problem import SplitProblem, split_tokens


@dataclass(frozen=True)
class GreedySplits:
    """Longest first."""

    def solve(self, problem: SplitProblem) -> tuple[int, ...]:
        """Splits per KV head."""
        splits = [1] * len(problem.tokens)
        for _ in range(problem.max_splits - len(splits)):
            longest_splits = [split_tokens(tokens, count) for tokens, count in zip(problem.tokens, splits, strict=True)]
            if max(longest_splits) <= 1:
                break
            splits[longest_splits.index(max(longest_splits))] += 1
        return tuple(splits)
