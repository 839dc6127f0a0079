"""In which order the KV heads of a layer stand in the checkpoint, hence which tensor-parallel rank owns them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import MismatchError
from .model_shape import KVHead

HEAD_ORDER_KEY = "tangram_head_order"  # under which a reordered model's `config.json` holds `HeadOrder.hash`


@dataclass(frozen=True)
class HeadOrder:
    """A permutation of KV heads inside each layer. Permuting the rows of q, k, v and the columns of o gives the same model.

    Args:
        layers: planned layer -> for every new place, the KV head of the original checkpoint that goes there.
            Layers that are left out keep the original order.
    """

    layers: Mapping[int, tuple[int, ...]]

    @property
    def hash(self) -> str:
        """What `config.json` holds as `tangram_head_order`; empty for the original order, alike for orders that do the same."""
        moved = sorted((i, list(heads)) for i, heads in self.layers.items() if heads != tuple(range(len(heads))))
        if not moved:
            return ""
        return hashlib.sha256(json.dumps(moved, separators=(",", ":")).encode()).hexdigest()

    def original(self, kv_head: KVHead) -> KVHead:
        """The KV head of the original checkpoint that stands at this place."""
        if kv_head.layer not in self.layers:
            return kv_head
        return KVHead(kv_head.layer, self.layers[kv_head.layer][kv_head.head])


ORIGINAL_ORDER = HeadOrder({})


def check_head_order(config: Mapping[str, Any], order: HeadOrder, where: str) -> None:
    """That a model's heads stand in the order a plan was made for.

    Args:
        config: the model's whole `config.json`.
        order: the plan's order.
        where: what to call the config in the error.

    Raises:
        MismatchError: they do not.
    """
    found = config.get(HEAD_ORDER_KEY) or ""
    if found == order.hash:
        return
    if not order.hash:
        fix = "use the original checkpoint, or the plan that this one was reordered for"
    else:
        fix = "reorder the original checkpoint for this plan and serve the result"
    got, expected = found or "the original order", order.hash or "the original order"
    raise MismatchError(
        "KV heads are in another order", where=f"{where}: {HEAD_ORDER_KEY}", got=got, expected=expected, fix=fix
    )
