"""`graph`: the exact optimum without constraints on layers, as a shortest path with at most K arcs.

    nodes   (k, i): k groups cover the first i sorted rows
    arcs    (k, i) -> (k + 1, j) at the cost of a group of rows i to j, for dominant sizes j - i
    path    from (0, 0) to the cheapest (k, rows) with k <= max_groups

One such graph for every size of page (networkx); `grouping_problem` says why paths over sorted rows suffice.
"""

from dataclasses import dataclass

import networkx as nx

from .grouping_problem import COST_SCALE, Arc, GroupingProblem, GroupingSolution, SolverDoesNotApplyError, cut

SINK = (-1, -1)


@dataclass(frozen=True)
class ShortestPath:
    """K-arc shortest path over the sorted rows."""

    def solve(self, problem: GroupingProblem) -> GroupingSolution:
        """The optimum, which is its own bound.

        Raises:
            SolverDoesNotApplyError: the number of groups per layer is limited.
            TangramError: the KV heads do not fit into `max_groups` groups.
        """
        if problem.max_groups_per_layer is not None:
            raise SolverDoesNotApplyError(
                "solver graph cannot limit the groups that touch a layer",
                where="grouping.solver",
                got="graph",
                expected="cp_sat",
            )
        best = min((_shortest(problem, slots) for slots in problem.feasible_page_slots()), key=lambda found: found[0])
        cost, ends, slots = best
        return GroupingSolution(cut(problem.sorted_rows, ends), slots, cost / COST_SCALE, cost / COST_SCALE, "optimal")


def _shortest(problem: GroupingProblem, slots: int) -> tuple[int, list[int], int]:
    """Cost, ends of the groups, and page_slots of the best path for one size of page."""
    graph = _layered_graph(list(problem.arcs(slots)), problem)
    cost, path = nx.single_source_dijkstra(graph, (0, 0), SINK)
    return cost, [row for _, row in path[1:-1]], slots


def _layered_graph(arcs: list[Arc], problem: GroupingProblem) -> nx.DiGraph:
    """Only nodes that rows can reach from the start, and from which the end can still be reached."""
    longest = max(arc.end - arc.start for arc in arcs)
    graph = nx.DiGraph()
    for k in range(problem.max_groups):
        groups_left = problem.max_groups - k - 1
        graph.add_weighted_edges_from(
            ((k, arc.start), (k + 1, arc.end), arc.cost)
            for arc in arcs
            if arc.start <= k * longest and problem.num_rows - arc.end <= groups_left * longest and (k or not arc.start)
        )
    graph.add_weighted_edges_from(((k, problem.num_rows), SINK, 0) for k in range(1, problem.max_groups + 1))
    return graph
