"""What the page allocator of a serving engine has to know of a plan, as plain JSON values."""

from tangram_plan.ir import RHO_ONE, Plan


def allocator_config(plan: Plan) -> dict[str, object]:
    """Page geometry and laws of a plan. Counts and sizes carry their unit in their name; `rho` is over `rho_one`."""
    layout = plan.layout
    return {
        "compress_chunk_tokens": plan.compress_chunk_tokens,
        "dtype": str(layout.dtype),
        "groups": [
            {
                "rho": group.rho,
                "num_members": group.num_members,
                "tokens_per_page": layout.tokens_per_page(group.num_members),
            }
            for group in plan.grouping.groups
        ],
        "head_dim": layout.head_dim,
        "max_new_tokens": plan.max_new_tokens,
        "page_bytes": layout.page_bytes,
        "page_slots": layout.page_slots,
        "rho_one": RHO_ONE,
        "sink_tokens": plan.budgets.sink_tokens,
        "slot_bytes": layout.slot_bytes,
        "tensor_parallel": plan.tensor_parallel,
        "window_tokens": plan.budgets.window_tokens,
    }
