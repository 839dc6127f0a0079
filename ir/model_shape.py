"""What a plan needs to know of a model: which layers keep a full KV cache, and the shape of each."""

import hashlib
import json
import math
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
class AttentionForm:
    """How planned layers turn scores into probabilities: `softmax(cap(softmax_scale * q k))`, RoPE and norms being in q and k.

    Args:
        softmax_scale: what `q k` is multiplied by.
        logit_softcap: `cap(x) = logit_softcap * tanh(x / logit_softcap)` (Gemma 2); None: `cap(x) = x`.
        has_sinks: every query head has one more logit of its own, which joins the sum and has no value (gpt-oss).
    """

    softmax_scale: float
    logit_softcap: float | None = None
    has_sinks: bool = False

    @classmethod
    def plain(cls, head_dim: int) -> "AttentionForm":
        """`softmax(q k / sqrt(head_dim))`, as nearly every model has it."""
        return cls(1 / math.sqrt(head_dim))  # not `**`: its last bit is the platform's, and the plan hash has it

    def is_plain(self, head_dim: int) -> bool:
        """Whether this is `plain(head_dim)`, up to the float32 that a config may have gone through."""
        unscaled = math.isclose(self.softmax_scale**2 * head_dim, 1, rel_tol=1e-6)
        return unscaled and self.logit_softcap is None and not self.has_sinks


_PLAIN = AttentionForm(math.nan)  # the default of a field cannot know `head_dim`: see `ModelShape.__post_init__`


@dataclass(frozen=True)
class ModelShape:
    """The attention shape of a causal language model, as read from its `config.json`.

    Args:
        model_type: the architecture's name in `config.json`.
        layers: every decoder layer, in order.
        head_dim: width of one head, in elements.
        identity: further architecture values (hidden size, vocabulary, RoPE base ...) that tell models of one shape apart.
        attention: what the softmax of the planned layers computes; `AttentionForm.plain(head_dim)` if left out.
    """

    model_type: str
    layers: tuple[LayerShape, ...]
    head_dim: int
    identity: tuple[tuple[str, str], ...] = ()
    attention: AttentionForm = _PLAIN

    def __post_init__(self) -> None:
        if self.attention is _PLAIN:
            object.__setattr__(self, "attention", AttentionForm.plain(self.head_dim))

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
        """Hash of everything above: equal for equal architectures, whatever file the config came from.

        Plain attention adds nothing to the text, and floats have the digits that GGUF files keep.
        """
        layers = [[layer.kind.value, layer.num_kv_heads, layer.num_q_heads, layer.kv_owner] for layer in self.layers]
        parts: list[object] = [self.model_type, layers, self.head_dim, self.identity]
        if not self.attention.is_plain(self.head_dim):
            scale, cap = self.attention.softmax_scale, self.attention.logit_softcap
            parts.append([f"{scale:.7g}", None if cap is None else f"{cap:.7g}", self.attention.has_sinks])
        text = json.dumps(parts, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
