"""`even`: the same number of splits for every KV head, floor(N / heads), whatever it keeps."""

from dataclasses import dataclass

from .split_problem import SplitProblem


@dataclass(frozen=True)
class EvenSplits:
    """What a kernel without knowledge of budgets does."""

    def solve(self, problem: SplitProblem) -> tuple[int, ...]:
        """Splits per KV head."""
        return (max(1, problem.max_splits // len(problem.tokens)),) * len(problem.tokens)
