"""Lagrangian bounds on paths with at most K arcs: which arcs can still be part of a better path.

For a price p >= 0 on every arc, let f[i] and b[i] be the cheapest ways from the first row to i and from i to the last at
costs `cost + p`. Then for every path of at most K arcs that uses arc (i, j)

    cost of the path  >=  f[i] + (cost[i, j] + p) + b[j] - p * K

(Handler and Zang, "A dual algorithm for the constrained shortest path problem", Networks 10, 1980). Any p gives a valid
bound; the best one is found by bisection, and the paths met on the way that have at most K arcs are solutions.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .grouping_problem import Arc

UNREACHED = 1 << 62


class PathBounds(NamedTuple):
    """What relaxing the number of arcs tells.

    Args:
        lower: no path of at most K arcs costs less.
        path: the cheapest path of at most K arcs that was met.
        path_cost: its cost.
        through: per arc, no path of at most K arcs that uses it costs less.
    """

    lower: int
    path: tuple[Arc, ...]
    path_cost: int
    through: tuple[int, ...]


def bound_paths(arcs: Sequence[Arc], num_rows: int, max_arcs: int) -> PathBounds | None:
    """Bounds for paths from row 0 to `num_rows`; None if there is no path, or none has so few arcs.

    Args:
        arcs: by rising start.
        num_rows: the end of the path.
        max_arcs: K.
    """
    path = _cheapest(arcs, num_rows, 0)
    if path is None:
        return None
    price, lower = 0, _cost(path)
    most = sum(arc.cost for arc in arcs) + 1  # at this price no saving is worth another arc
    low, high = 0, 1
    while len(path) > max_arcs:  # find a price that is high enough for a path of at most K arcs
        if low >= most:
            return None
        low, high = high, 2 * high
        path = _cheapest(arcs, num_rows, low)
        assert path is not None, "a price closes no arc"
    best_path, low, high = path, low // 2, low
    while high - low > 1:
        middle = (low + high) // 2
        path = _cheapest(arcs, num_rows, middle)
        assert path is not None, "a price closes no arc"
        bound = _cost(path) + middle * (len(path) - max_arcs)
        if bound > lower:
            price, lower = middle, bound
        if len(path) > max_arcs:
            low = middle
        else:
            high = middle
            best_path = min(best_path, path, key=_cost)
    forward = _distances(arcs, num_rows, price)
    mirrored = sorted(Arc(num_rows - arc.end, num_rows - arc.start, arc.cost) for arc in arcs)
    backward = _distances(mirrored, num_rows, price)
    through = tuple(forward[a.start] + a.cost + price + backward[num_rows - a.end] - price * max_arcs for a in arcs)
    return PathBounds(lower, best_path, _cost(best_path), through)


def _cost(path: Sequence[Arc]) -> int:
    return sum(arc.cost for arc in path)


def _distances(arcs: Sequence[Arc], num_rows: int, price: int) -> list[int]:
    """Cheapest way from row 0 to every row, for arcs by rising start."""
    distance = [0] + [UNREACHED] * num_rows
    for arc in arcs:
        distance[arc.end] = min(distance[arc.end], distance[arc.start] + arc.cost + price)
    return distance


def _cheapest(arcs: Sequence[Arc], num_rows: int, price: int) -> tuple[Arc, ...] | None:
    """The cheapest path at this price; of several, one with the fewest arcs; None if no path reaches the end."""
    best: list[tuple[int, int]] = [(0, 0)] + [(UNREACHED, 0)] * num_rows  # cost, number of arcs
    last: list[Arc | None] = [None] * (num_rows + 1)
    for arc in arcs:
        cost, count = best[arc.start]
        found = (cost + arc.cost + price, count + 1)
        if found < best[arc.end]:
            best[arc.end], last[arc.end] = found, arc
    if best[num_rows][0] >= UNREACHED:
        return None
    path: list[Arc] = []
    end = num_rows
    while (arc_in := last[end]) is not None:
        path.append(arc_in)
        end = arc_in.start
    return tuple(reversed(path))
