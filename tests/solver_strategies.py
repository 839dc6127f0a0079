"""Random small problems for solvers, few enough to try every solution."""

from hypothesis import strategies as st

from tangram_plan.ir import RHO_ONE
from tests.solver_cases import GroupingCase, Scope, make_case

PAGES: tuple[int, ...] = (16, 32, 48, 64, 80, 96, 112, 128)
SHAPES = ((1, 1, 1), (1, 4, 1), (1, 7, 1), (2, 3, 1), (3, 2, 1), (7, 1, 1), (1, 4, 2), (2, 4, 2), (3, 2, 2), (1, 8, 4))
budgets = st.one_of(st.integers(0, RHO_ONE), st.sampled_from([0, 1, 2000, 20000, RHO_ONE]))


@st.composite
def small_cases(draw: st.DrawFn) -> GroupingCase:
    """Up to seven KV heads on one rank, four on each of two, two on each of four."""
    num_layers, num_kv_heads, ranks = draw(st.sampled_from(SHAPES))
    num_heads = num_layers * num_kv_heads
    scopes: tuple[Scope, Scope] = ("model", "layer")
    return make_case(
        num_layers,
        num_kv_heads,
        draw(st.lists(budgets, min_size=num_heads, max_size=num_heads)),
        ranks=ranks,
        scope=draw(st.sampled_from(scopes)),
        max_groups=draw(st.integers(1, 7)),
        page_slots=draw(st.sampled_from(["auto", *PAGES])),
        contexts=draw(st.sampled_from([(64,), (40, 300), (64, 700, 5000)])),
        sink=draw(st.sampled_from([0, 4])),
    )


@st.composite
def small_limited_cases(draw: st.DrawFn) -> GroupingCase:
    """Up to eight KV heads on one rank, of which only so many groups may touch a layer."""
    num_layers, num_kv_heads = draw(st.sampled_from([(1, 4), (1, 7), (2, 3), (3, 2), (2, 4), (7, 1)]))
    num_heads = num_layers * num_kv_heads
    return make_case(
        num_layers,
        num_kv_heads,
        draw(st.lists(budgets, min_size=num_heads, max_size=num_heads)),
        max_groups=draw(st.integers(1, 7)),
        max_groups_per_layer=draw(st.integers(1, num_kv_heads)),
        page_slots=draw(st.sampled_from(["auto", *PAGES])),
        contexts=draw(st.sampled_from([(64,), (40, 300), (64, 700, 5000)])),
        sink=draw(st.sampled_from([0, 4])),
    )
