"""What a plan needs to know of a model: which layers keep a full KV cache, and the shape of each."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class KVHead(NamedTuple):
    """One (layer, kv_head) pair; both count from 0 over the whole model, never over a rank."""

    layer: int
    head: int


class LayerKind(StrEnum):
    """How a layer keeps keys and values."""

    FULL = "full"  # attends to every earlier token: planned
    SLIDING = "sliding"  # bounded window: left to the engine
    SHARED = "shared"  # reads the cache of `kv_owner`: nothing of its own to keep
    NONE = "none"  # no attention, or a state of constant size (Mamba, linear attention)


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer.

    Args:
        kind: how it keeps keys and values.
        num_kv_heads: KV heads whose cache this layer owns; 0 for `NONE` layers.
        num_q_heads: query heads; a multiple of `num_kv_heads`.
        kv_owner: the layer whose cache is read: the layer itself, or an earlier one for `SHARED` layers.
    """

    kind: LayerKind
    num_kv_heads: int
    num_q_heads: int
    kv_owner: int

    @property
    def gqa_ratio(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads


@dataclass(frozen=True)
class ModelShape:
    """The attention shape of a causal language model, as read from its `config.json`.

    Args:
        model_type: the architecture's name in `config.json`.
        layers: every decoder layer, in order.
        head_dim: width of one head, in elements.
        identity: further architecture values (hidden size, vocabulary, RoPE base ...) that tell models of one shape apart.
    """

    model_type: str
    layers: tuple[LayerShape, ...]
    head_dim: int
    identity: tuple[tuple[str, str], ...] = ()

    @property
    def planned_layers(self) -> tuple[int, ...]:
        """Layers whose KV heads the plan governs."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.kind is LayerKind.FULL and layer.num_kv_heads)

    def kv_heads(self) -> Iterator[KVHead]:
        """Every planned KV head, by layer, then by head."""
        return (KVHead(i, h) for i in self.planned_layers for h in range(self.layers[i].num_kv_heads))

    def rank_of(self, kv_head: KVHead, tensor_parallel: int) -> int:
        """The tensor-parallel rank that owns a KV head: ranks own equal runs of a layer's heads."""
        return kv_head.head * tensor_parallel // self.layers[kv_head.layer].num_kv_heads

    def local_kv_heads(self, layer: int, rank: int, tensor_parallel: int) -> tuple[KVHead, ...]:
        """The KV heads of a layer that a rank owns, by head."""
        per_rank = self.layers[layer].num_kv_heads // tensor_parallel
        return tuple(KVHead(layer, rank * per_rank + head) for head in range(per_rank))

    @property
    def num_kv_heads(self) -> int:
        """Planned KV heads of the whole model."""
        return sum(self.layers[i].num_kv_heads for i in self.planned_layers)

    @property
    def fingerprint(self) -> str:
        """Hash of everything above: equal for equal architectures, whatever file the config came from."""
        layers = [[layer.kind.value, layer.num_kv_heads, layer.num_q_heads, layer.kv_owner] for layer in self.layers]
        text = json.dumps([self.model_type, layers, self.head_dim, self.identity], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
