"""Where the KV heads stand in each tensor of an attention module. A name or a layout that is not known is refused."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tangram_plan.ir import LayerKind, LayerShape, MismatchError, TangramError

from .safetensors_file import Tensor

_ATTENTION_TENSOR = re.compile(r"(?P<prefix>(?:[^.]+\.)*)layers\.(?P<layer>\d+)\.self_attn\.(?P<part>.+)")
# What may stand before `layers` in the decoder's names; towers for vision and audio, talkers and MTP heads have other words.
_DECODER_PREFIXES = {"model", "language_model", "text_model", "llm", "thinker", "decoder"}

_O_PROJ = ("o_proj", "out_proj", "dense")
_NORMS = {"q_norm": "q", "q_layernorm": "q", "k_norm": "k", "k_layernorm": "k"}
_WEIGHT_DTYPES = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8"}  # one element per weight: not packed
_MATRIX_SCALES = {"weight_scale", "weight_scale_inv", "weight_zero_point"}
_TENSOR_SCALES = {"input_scale", "output_scale", "k_scale", "v_scale"}
_GATED_MODELS = {"qwen3_next", "qwen3_5", "qwen3_5_moe"}  # q_proj gives each head its query, then its gate
_FUSED_MODELS = {"phi3"}  # qkv_proj has the rows of q, then of k, then of v

_Segments = tuple[int, tuple[int, ...]] | None  # dimension and widths; None: the tensor is the same for every order


@dataclass(frozen=True)
class MovedLayer:
    """A layer whose heads move: one that the order names, or one that reads such a layer's KV cache."""

    index: int
    layer: LayerShape
    heads: tuple[int, ...]
    head_dim: int


class AttentionPart(NamedTuple):
    """What the name of an attention tensor says."""

    prefix: str  # of the decoder, with its last dot
    layer: int
    part: str  # inside the attention module, such as `q_proj.weight`


def attention_part(name: str) -> AttentionPart | None:
    """The parts of a tensor's name; None if it is not in an attention module of a decoder."""
    match = _ATTENTION_TENSOR.fullmatch(name)
    if match is None or not set(match["prefix"].split(".")[:-1]) <= _DECODER_PREFIXES:
        return None
    return AttentionPart(match["prefix"], int(match["layer"]), match["part"])


@dataclass(frozen=True)
class Layout:
    """Where the heads stand in the attention tensors of one architecture."""

    model_type: str
    scale_block: tuple[int, int] | None

    def head_segments(self, tensor: Tensor, part: str, layer: MovedLayer) -> _Segments:
        """The dimension along which heads stand, and the widths of the segments (q, k, v of a fused tensor) along it.

        Args:
            tensor: a tensor of the attention module.
            part: its name inside the module, such as `q_proj.weight`.
            layer: whose attention it is.

        Raises:
            TangramError: the name or the layout is not known.
        """
        module, _, leaf = part.rpartition(".")
        if part == "rotary_emb.inv_freq":
            return None
        if part == "sinks":
            _check_shape(tensor, (layer.layer.num_q_heads,))
            return 0, tensor.shape
        if module in _NORMS and leaf in ("weight", "bias"):
            return _norm_segments(tensor, _NORMS[module], layer)
        if leaf in _TENSOR_SCALES and math.prod(tensor.shape) == 1:
            return None
        widths = self._widths(module, layer)
        if widths is None:
            raise _unknown(tensor)
        dim = 1 if module in _O_PROJ else 0
        if leaf == "bias":
            return self._bias_segments(tensor, dim, widths)
        if leaf == "weight":
            return self._weight_segments(tensor, dim, widths)
        if leaf in _MATRIX_SCALES:
            return self._scale_segments(tensor, dim, widths, len(layer.heads))
        raise _unknown(tensor)

    def _widths(self, module: str, layer: MovedLayer) -> tuple[int, ...] | None:
        q = layer.layer.num_q_heads * layer.head_dim
        kv = layer.layer.num_kv_heads * layer.head_dim
        if module in _O_PROJ:
            return (q,)
        if module == "qkv_proj" and self.model_type in _FUSED_MODELS:
            return q, kv, kv
        gated_q = 2 * q if self.model_type in _GATED_MODELS else q
        return {"q_proj": (gated_q,), "k_proj": (kv,), "v_proj": (kv,)}.get(module)

    def _bias_segments(self, tensor: Tensor, dim: int, widths: tuple[int, ...]) -> _Segments:
        if dim == 1:  # the bias of o is added after the heads are summed
            return None
        _check_shape(tensor, (sum(widths),))
        return 0, widths

    def _weight_segments(self, tensor: Tensor, dim: int, widths: tuple[int, ...]) -> _Segments:
        if tensor.dtype not in _WEIGHT_DTYPES:
            raise _unknown(tensor, got=f"packed weights ({tensor.dtype})")
        if len(tensor.shape) != 2:
            raise MismatchError("wrong shape", where=tensor.name, got=list(tensor.shape), expected="a matrix")
        _check_shape(tensor, (sum(widths), tensor.shape[1]) if dim == 0 else (tensor.shape[0], sum(widths)))
        return dim, widths

    def _scale_segments(self, tensor: Tensor, dim: int, widths: tuple[int, ...], num_kv_heads: int) -> _Segments:
        """Scales stand one per tensor, one per row, or one per block of `scale_block`."""
        length = tensor.shape[dim] if dim < len(tensor.shape) else 1
        if length == 1:
            return None
        if length == sum(widths):
            return dim, widths
        block = self.scale_block[dim] if self.scale_block else 0
        if not block or any(width % (num_kv_heads * block) for width in widths) or length * block != sum(widths):
            raise _unknown(
                tensor, got="scales that several KV heads share, or whose block is not in quantization_config"
            )
        return dim, tuple(width // block for width in widths)


def check_complete(layer: MovedLayer, modules: set[str], where: str) -> None:
    """That q, k and o were found: a layer of which only a part moves is wrong. Models that use k as v have no v."""
    fused, shared = "qkv_proj" in modules, layer.layer.kind is LayerKind.SHARED
    needed = {"q": fused or "q_proj" in modules, "k": fused or shared or "k_proj" in modules}
    needed["o"] = not modules.isdisjoint(_O_PROJ)
    missing = [f"{name}_proj" for name, found in needed.items() if not found]
    if missing:
        what = f"layer {layer.index} has no {', '.join(missing)}"
        expected = f"tensors named like model.layers.{layer.index}.self_attn.{missing[0]}.weight"
        raise TangramError(what, where=where, expected=expected)


def scale_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a weight that share one scale, if the config says so."""
    quantization = config.get("quantization_config")
    block = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block):
        return block[0], block[1]
    return None


def _norm_segments(tensor: Tensor, which: str, layer: MovedLayer) -> _Segments:
    """A norm is `head_dim` wide and shared by all heads, or has values of its own for each head (OLMo 2, Cohere)."""
    num_heads = layer.layer.num_q_heads if which == "q" else layer.layer.num_kv_heads
    if tensor.shape == (layer.head_dim,):
        return None
    if tensor.shape not in {(num_heads * layer.head_dim,), (num_heads, layer.head_dim)}:
        raise _unknown(tensor, got=f"shape {list(tensor.shape)}")
    return 0, tensor.shape[:1]


def _check_shape(tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise MismatchError(
            "wrong shape", where=tensor.name, got=list(tensor.shape), expected=f"{list(expected)} by config.json"
        )


def _unknown(tensor: Tensor, got: object = None) -> TangramError:
    """An attention tensor that would have to move, or not, and we cannot tell how."""
    fix = (
        "plan without a head order (grouping.reorder_heads: false, or tensor_parallel: 1), or use a checkpoint in bf16"
    )
    return TangramError("cannot reorder this attention tensor", where=tensor.name, got=got, fix=fix)
