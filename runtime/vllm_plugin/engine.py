"""What one worker serves with: its plan, and the attention of its rank."""

from collections.abc import Callable
from typing import Any

from tangram_plan.ir import Plan


class Engine:
    """The runtime of one worker.

    Args:
        plan: of the artefact.
        attention: of the worker's rank.
        prompt_tokens: number of rows -> prompt lengths of the first rows of the engine's batch, 0 where there is no request.
    """

    def __init__(self, plan: Plan, attention: Any, prompt_tokens: Callable[[int], list[int]]) -> None:
        self.plan, self.attention, self.prompt_tokens = plan, attention, prompt_tokens
