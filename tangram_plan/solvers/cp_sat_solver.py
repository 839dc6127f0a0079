"""CP-SAT as every solver here runs it: one worker, a fixed seed, a limit in deterministic time, hence one result.

The result is the same on every machine for one version of OR-Tools; another version may search in another order.
"""

from ortools.sat.python import cp_model


def deterministic_solver(seed: int, deterministic_seconds: float) -> cp_model.CpSolver:
    """A solver that gives the same solution on every machine, for one version of OR-Tools.

    Args:
        seed: random seed.
        deterministic_seconds: limit in CP-SAT's deterministic time, about a second of one core each.
    """
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = deterministic_seconds
    return solver
