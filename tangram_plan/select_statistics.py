"""Which of a profile's statistics go into an artefact: those that the plan's scorer needs, in the plan's head order."""

from collections.abc import Mapping

from tangram_plan.ir import Plan, needed_statistics, verify_statistics
from tangram_plan.profiles import Profile, StatisticArray


def select_statistics(profile: Profile, plan: Plan) -> Mapping[str, StatisticArray]:
    """What `OUT/statistics.npz` holds: float32 [kv_heads, ...] by name; nothing if the profile lacks one of them.

    Args:
        profile: by the checkpoint's head order.
        plan: names KV heads by their place in its own.

    Raises:
        MismatchError: the profile's statistics are of another shape of model.
    """
    needed = needed_statistics(plan)
    if not set(needed) <= set(profile.statistics):
        return {}
    row_of = {kv_head: row for row, kv_head in enumerate(profile.kv_heads)}
    rows = [row_of[plan.head_order.original(kv_head)] for kv_head in plan.model.kv_heads()]
    selected = {name: profile.statistics[name][rows] for name in needed}
    shapes = {name: values.shape for name, values in selected.items()}
    verify_statistics(shapes, plan, where=f"profile of {profile.model} by {profile.scorer}")
    return selected
