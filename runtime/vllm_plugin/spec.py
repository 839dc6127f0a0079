"""What vLLM's memory planning is told: one pool of the plan's pages, and how many of them a request may need."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from tangram_plan.ir import PageLayout, Plan, load_artefact, most_pages

from .compat import FullAttentionSpec


@cache
def load_plan(artefact: str) -> Plan:
    """The plan of an artefact, checked once per process."""
    return load_artefact(Path(artefact))


@dataclass(frozen=True, kw_only=True)
class PageSpec(FullAttentionSpec):
    """A page as vLLM sees it: one head and `page_slots` tokens, so wide that a token's key and value have room for position and score.

    Bytes of a page then are vLLM's own formula, and what it allocates is what the plan says. A row of the block table holds all
    pages of a request, of all layers and groups.

    Args:
        artefact: folder of the artefact.
    """

    artefact: str

    @property
    def plan(self) -> Plan:
        """The plan of the artefact."""
        return load_plan(self.artefact)

    @property
    def prefix_cacheable(self) -> bool:
        """What a page holds depends on the whole prompt."""
        return False

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Of layers that share a pool."""
        return specs[0]

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:  # noqa: ARG002 - vLLM's signature
        """Width of a row; vLLM also looks up a block for every `block_size` tokens, and never uses what it finds."""
        return max(most_pages(self.plan, max_len), -(-max_len // int(self.block_size)))

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Of the request that needs most."""
        return most_pages(self.plan, vllm_config.model_config.max_model_len) * int(self.page_size_bytes)


def spec_head_size(layout: PageLayout) -> int:
    """Half of a slot's elements: `head_size` of a spec whose pages have `layout.page_bytes`."""
    return layout.slot_bytes // (2 * layout.dtype.itemsize)
