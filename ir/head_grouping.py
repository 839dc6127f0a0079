"""Which KV heads share pages."""

from collections.abc import Iterator
from dataclasses import dataclass

from .model_shape import KVHead


@dataclass(frozen=True)
class HeadGroup:
    """KV heads, of any layers, that share one page table and one law; a member's place in the page is its column.

    Args:
        rho: part kept, over `RHO_ONE`: the largest of the members'. Members with a smaller budget use the slack.
        members_by_rank: per tensor-parallel rank, the members in column order. Every rank has the same number of
            columns and the same law, because one scheduler counts pages for all of them.
    """

    rho: int
    members_by_rank: tuple[tuple[KVHead, ...], ...]

    @property
    def num_members(self) -> int:
        """Columns of a page: KV heads of the group on one rank."""
        return len(self.members_by_rank[0])


@dataclass(frozen=True)
class HeadGrouping:
    """All head groups of a plan.

    Args:
        groups: by falling rho; a group's place is its `group_id`.
        page_slots: head-token slots of a page, the same for every group.
    """

    groups: tuple[HeadGroup, ...]
    page_slots: int

    def columns(self) -> Iterator[tuple[int, int, int, KVHead]]:
        """Every (rank, group_id, column, KV head)."""
        for group_id, group in enumerate(self.groups):
            for rank, members in enumerate(group.members_by_rank):
                for column, kv_head in enumerate(members):
                    yield rank, group_id, column, kv_head
