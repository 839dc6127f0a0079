"""What a page is: bytes, and where in it a token's key, value, position and score lie."""

from dataclasses import dataclass
from enum import StrEnum

from .page_law import tokens_per_page

SLOT_METADATA_BYTES = 8  # position and score


class KVDtype(StrEnum):
    """Element type of keys and values in the cache."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is KVDtype.FLOAT32 else 2


@dataclass(frozen=True)
class PageLayout:
    """One pool for the whole model; every page has the same bytes, whatever group it belongs to.

    A page of a group with m members and t tokens per page holds token i of column c in slot `c * t + i`; the
    `page_slots - m * t` slots that are left over count as allocated. In the page lie, one after the other:
    keys [page_slots, head_dim], values [page_slots, head_dim], positions int32 [page_slots], scores float32 [page_slots].

    Args:
        page_slots: head-token slots of a page.
        head_dim: elements of one key or value.
        dtype: element type of keys and values.
    """

    page_slots: int
    head_dim: int
    dtype: KVDtype

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's key and value, of one KV head."""
        return 2 * self.head_dim * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of one head-token slot: key, value, position, score."""
        return self.kv_bytes + SLOT_METADATA_BYTES

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_slots * self.slot_bytes

    @property
    def page_elements(self) -> int:
        """Distance of two pages in the pool, in elements of `dtype`."""
        return self.page_bytes // self.dtype.itemsize

    @property
    def position_word(self) -> int:
        """Where the positions of a page begin, in 4-byte words; its scores begin `page_slots` words later."""
        return self.page_slots * self.kv_bytes // 4

    def tokens_per_page(self, num_members: int) -> int:
        """Tokens of each member that fit into a page of a group with so many members."""
        return tokens_per_page(self.page_slots, num_members)
