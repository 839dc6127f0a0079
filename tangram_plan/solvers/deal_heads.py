"""Which tensor-parallel rank owns which KV head, so that one page law for all ranks wastes least: exact, for any number of ranks.

With one law for all ranks the i-th largest KV head of every rank shares a row whose rho is the largest of them. Sort all
KV heads by falling rho and cut them into blocks of R (the ranks). Row i cannot have less than the rho of the first KV
head of block i: the i - 1 rows before it hold R * (i - 1) heads at most. If every rank owns one KV head of every block,
every row meets that bound, so the assignment is optimal for every grouping.

Such an assignment exists, although each rank must also own an equal number of KV heads of every layer: cut the heads of
each layer, sorted alike, into chunks of R as well (which makes the rows of every single layer optimal, too). Chunks and blocks are the two sides of a bipartite multigraph in which every KV head
is an edge and every node has R edges; by Koenig's theorem (1916) its edges fall into R perfect matchings, and each
matching is a rank.
"""

from collections import defaultdict

import networkx as nx

from tangram_plan.ir import BudgetTable, HeadOrder, KVHead


def deal_heads(budgets: BudgetTable, ranks: int) -> HeadOrder:
    """The order of KV heads that gives every rank one of every block of equal budgets.

    Args:
        budgets: law of every KV head, in the checkpoint's order.
        ranks: tensor-parallel ranks; they divide the KV heads of every layer.
    """
    by_layer: dict[int, list[KVHead]] = defaultdict(list)
    for kv_head in sorted(budgets.rho, key=lambda kv_head: (kv_head.layer, -budgets.rho[kv_head], kv_head.head)):
        by_layer[kv_head.layer].append(kv_head)
    by_budget = sorted(budgets.rho, key=lambda kv_head: (-budgets.rho[kv_head], kv_head))
    chunks = [heads[i : i + ranks] for heads in by_layer.values() for i in range(0, len(heads), ranks)]
    block_of = {kv_head: index // ranks for index, kv_head in enumerate(by_budget)}
    edges: dict[tuple[int, int], list[KVHead]] = defaultdict(list)
    for chunk, kv_heads in enumerate(chunks):
        for kv_head in kv_heads:
            edges[chunk, len(chunks) + block_of[kv_head]].append(kv_head)
    owned: dict[int, list[int]] = {layer: [] for layer in by_layer}
    for _ in range(ranks):
        for kv_head in sorted(_take_matching(edges, len(chunks))):
            owned[kv_head.layer].append(kv_head.head)
    return HeadOrder({layer: tuple(heads) for layer, heads in owned.items()})


def _take_matching(edges: dict[tuple[int, int], list[KVHead]], num_chunks: int) -> list[KVHead]:
    """Remove one perfect matching from the multigraph and return its KV heads."""
    graph = nx.Graph()
    graph.add_nodes_from(range(2 * num_chunks))
    graph.add_edges_from(pair for pair, kv_heads in edges.items() if kv_heads)
    matching = nx.bipartite.hopcroft_karp_matching(graph, top_nodes=range(num_chunks))
    return [edges[chunk, matching[chunk]].pop() for chunk in range(num_chunks)]
