"""`proportional`: the paper's Algorithm 1 (Tangram, arXiv 2606.06302): tau = sum L / N, s[h] = max(1, round(L[h] / tau)).

Rounding up may exceed N; the surplus is taken back from the KV heads with the most splits.
"""

from dataclasses import dataclass

from .split_problem import SplitProblem


@dataclass(frozen=True)
class ProportionalSplits:
    """Rounded shares."""

    def solve(self, problem: SplitProblem) -> tuple[int, ...]:
        """Splits per KV head."""
        tau = max(1, sum(problem.tokens)) / problem.max_splits
        splits = [max(1, round(tokens / tau)) for tokens in problem.tokens]
        while sum(splits) > problem.max_splits:
            splits[splits.index(max(splits))] -= 1
        return tuple(splits)
