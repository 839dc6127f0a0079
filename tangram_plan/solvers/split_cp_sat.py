"""`cp_sat`: the least makespan and, of all splits that reach it, the fewest (fewer partial results to merge), by OR-Tools.

x[h, s] = 1 if KV head h is cut into s splits:

    minimise    (N + 1) * makespan + sum_{h, s} s * x[h, s]
    subject to  sum_s x[h, s] = 1                                     for every KV head h
                makespan >= ceil(L[h] / s) if x[h, s]
                sum_{h, s} s * x[h, s] <= N
                ceil(sum L / N) <= makespan <= ceil(sum L / (N - H))  H KV heads

The upper bound holds because sum_h ceil(L[h] / T) <= sum L / T + H; it leaves each KV head a few values of s. The search
starts from the closed form of `split_problem`, which is already the optimum: CP-SAT proves it, and is the place for
constraints that the closed form cannot hold.
"""

from dataclasses import dataclass

from ortools.sat.python import cp_model

from .cp_sat_solver import deterministic_solver
from .split_problem import SplitProblem, split_tokens

DETERMINISTIC_SECONDS = 5.0


@dataclass(frozen=True)
class CpSatSplits:
    """Min-max by CP-SAT."""

    def solve(self, problem: SplitProblem) -> tuple[int, ...]:
        """Splits per KV head: the start of the search, if the limit of time is reached before another solution is found."""
        num_heads, total = len(problem.tokens), sum(problem.tokens)
        if problem.max_splits == num_heads or not total:
            return (1,) * num_heads
        lower = -(-total // problem.max_splits)
        upper = min(max(problem.tokens), -(-total // (problem.max_splits - num_heads)))
        model = cp_model.CpModel()
        makespan = model.new_int_var(min(lower, upper), upper, "makespan")
        start = problem.fewest_splits()
        model.add_hint(makespan, problem.makespan(start))
        splits = []
        for head, tokens in enumerate(problem.tokens):
            fewest, most = max(1, -(-tokens // upper)), max(1, -(-tokens // lower))
            choices = {
                count: model.new_bool_var(f"{count} splits of KV head {head}") for count in range(fewest, most + 1)
            }
            model.add_exactly_one(choices.values())
            for count, chosen in choices.items():
                model.add(makespan >= split_tokens(tokens, count)).only_enforce_if(chosen)
                model.add_hint(chosen, count == start[head])
            splits.append(choices)
        num_splits = sum(count * chosen for choices in splits for count, chosen in choices.items())
        model.add(num_splits <= problem.max_splits)
        model.minimize((problem.max_splits + 1) * makespan + num_splits)
        solver = deterministic_solver(problem.seed, DETERMINISTIC_SECONDS)
        status = solver.solve(model)
        assert status != cp_model.INFEASIBLE, "the start is a solution"
        if status == cp_model.UNKNOWN:
            return start
        return tuple(
            next(count for count, chosen in choices.items() if solver.boolean_value(chosen)) for choices in splits
        )
