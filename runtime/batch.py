"""The requests of one engine step, as the runtime sees them on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tangram_plan.ir import Plan


@dataclass(frozen=True)
class Batch:
    """Requests of a step: first those that decode one token, then those with a chunk.

    A chunk lies in its prompt, up to a boundary, and is compressed; or behind it (a preempted request that is computed again
    replays its prompt chunk by chunk, then its answer), and is appended.

    Args:
        prompt_tokens: prompt length of every request.
        num_tokens: tokens of prompt and answer of every request, those of this step included; 0 for padded rows.
        query_start: where in the step's tokens each request's begin, and where the last ones end.
    """

    prompt_tokens: Sequence[int]
    num_tokens: Sequence[int]
    query_start: Sequence[int]

    @property
    def new_tokens(self) -> list[int]:
        """Tokens of every request in this step; a padded row has none, whatever the engine lets it read."""
        spans = zip(pairwise(self.query_start), self.num_tokens, strict=True)
        return [end - start if total else 0 for (start, end), total in spans]

    @property
    def num_decodes(self) -> int:
        """Requests, from the first on, that decode: their one token is appended. A prompt of one token is no different."""
        for request, new in enumerate(self.new_tokens):
            total = self.num_tokens[request]
            if new > 1 or (new == 1 and 1 < total <= self.prompt_tokens[request]):
                return request
        return len(self.num_tokens)

    def chunks(self, plan: Plan) -> "Chunks":
        """The requests with a chunk, and what the page law says of them."""
        first = self.num_decodes
        prompts, totals, new = self.prompt_tokens[first:], self.num_tokens[first:], self.new_tokens[first:]
        starts = [total - count for total, count in zip(totals, new, strict=True)]
        for prompt, start, total in zip(prompts, starts, totals, strict=True):
            assert total <= prompt or start >= prompt, (
                f"chunk {start}:{total} goes over the end of its prompt of {prompt}"
            )
        groups = range(len(plan.grouping.groups))
        held, kept = (
            [
                [plan.group_tokens(group, prompt, total) for group in groups]
                for prompt, total in zip(prompts, ends, strict=True)
            ]
            for ends in (starts, totals)
        )
        return Chunks(first, self.query_start[first], starts, new, held, kept)


@dataclass(frozen=True)
class Chunks:
    """The chunks of a step; lists are per request with a chunk.

    Args:
        first_request: number of the first of them in the batch.
        first_token: where in the step's tokens theirs begin.
        start: position of each chunk's first token.
        tokens: of each chunk.
        held: tokens in the cache before the chunk, per head group.
        kept: tokens that stay, per head group.
    """

    first_request: int
    first_token: int
    start: Sequence[int]
    tokens: Sequence[int]
    held: Sequence[Sequence[int]]
    kept: Sequence[Sequence[int]]
