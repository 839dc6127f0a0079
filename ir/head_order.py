"""In which order the KV heads of a layer stand in the checkpoint, hence which tensor-parallel rank owns them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from .model_shape import KVHead


@dataclass(frozen=True)
class HeadOrder:
    """A permutation of KV heads inside each layer. Permuting the rows of q, k, v and the columns of o gives the same model.

    Args:
        layers: planned layer -> for every new place, the KV head of the original checkpoint that goes there.
            Empty: the original order.
    """

    layers: Mapping[int, tuple[int, ...]]

    @property
    def hash(self) -> str:
        """What `config.json` holds as `tangram_head_order`; empty for the original order."""
        if all(heads == tuple(sorted(heads)) for heads in self.layers.values()):
            return ""
        text = json.dumps(sorted((layer, list(heads)) for layer, heads in self.layers.items()), separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def original(self, kv_head: KVHead) -> KVHead:
        """The KV head of the original checkpoint that stands at this place."""
        if kv_head.layer not in self.layers:
            return kv_head
        return KVHead(kv_head.layer, self.layers[kv_head.layer][kv_head.head])


ORIGINAL_ORDER = HeadOrder({})
