"""Claims pages for requests, exactly as many as the plan's page law says, and none before or after."""

from collections.abc import Callable
from typing import Any

from tangram_plan.ir import Reservation, reserve

from .compat import FullAttentionManager


class PageManager(FullAttentionManager):
    """vLLM's manager of one kind of cache, counting by the page law; pages come from vLLM's own pool, and go back to it.

    A request's pages are those of its whole prompt, compressed, from its first chunk on, and then those that its answer needs. The
    argument lists of vLLM's methods grow from release to release; what is not needed is passed over.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prompt_tokens: Callable[[str], int] | None = None  # of a request; the scheduler knows
        self._max_tokens: dict[str, int] = {}  # that a request's pages hold

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *_: Any, **__: Any) -> int:
        """Pages that a request lacks for so many tokens."""
        if num_tokens <= self._max_tokens.get(request_id, 0):
            return 0
        return self._reserve(request_id, num_tokens).num_pages - len(self.req_to_blocks.get(request_id, ()))

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *_: Any, **__: Any) -> list[Any]:
        """Claim what a request lacks."""
        if num_tokens <= self._max_tokens.get(request_id, 0):
            return []
        reservation = self._reserve(request_id, num_tokens)
        blocks = self.req_to_blocks[request_id]
        new = self.block_pool.get_new_blocks(reservation.num_pages - len(blocks))
        blocks.extend(new)
        self._max_tokens[request_id] = reservation.max_tokens
        return list(new)

    def cache_blocks(self, *_: Any, **__: Any) -> None:
        """Nothing is found again by its tokens: a page's content depends on the whole prompt."""

    def free(self, request_id: str) -> None:
        """Give a finished or preempted request's pages back."""
        self._max_tokens.pop(request_id, None)
        super().free(request_id)

    def pop_blocks_for_free(self, request_id: str) -> Any:
        """The same, for pages that a step in flight may still write."""
        self._max_tokens.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def _reserve(self, request_id: str, num_tokens: int) -> Reservation:
        assert self.prompt_tokens is not None, "a plan needs the scheduler of this plugin"
        return reserve(self.kv_cache_spec.plan, self.prompt_tokens(request_id), num_tokens)
