"""From a config to a `ModelShape`: one function per question, such as "how many KV heads has each layer?"."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tangram_plan.ir import ORIGINAL_ORDER, LayerKind, LayerShape, ModelShape, TangramError, check_head_order

from .attention_form import attention_form
from .decoder import (
    HEAD_DIM,
    HIDDEN_SIZE,
    NUM_KV_HEADS,
    NUM_Q_HEADS,
    ROPE_BASE,
    Decoder,
    find_decoder,
    refuse_unsupported,
)
from .files import load_model_config
from .layer_kinds import block_attention, count_layers, layer_kinds

_DEFAULT_ROPE_BASE = 10000.0


def load_model_shape(model: str, relative_to: Path) -> tuple[ModelShape, Path]:
    """The attention shape of a model to measure or plan for, and the `config.json` it was read from.

    Args:
        model: a folder, a path to the file, or a hub id in the local cache.
        relative_to: the folder that a relative path starts from.

    Raises:
        TangramError: see `load_model_config` and `model_shape_from_config`.
        MismatchError: its KV heads were reordered: profiles and plans speak of the original order.
    """
    config, path = load_model_config(model, relative_to=relative_to)
    check_head_order(config, ORIGINAL_ORDER, where=str(path))
    return model_shape_from_config(config, where=str(path)), path


def model_shape_from_config(config: Mapping[str, Any], where: str) -> ModelShape:
    """The attention shape that a `config.json`, or `PretrainedConfig.to_dict()`, describes.

    Args:
        config: the whole config; a multimodal one is entered through its text config.
        where: what to call the config in errors.

    Raises:
        TangramError: a key is missing or absurd, the architecture is one we do not plan for (encoder-decoder, MLA, ALiBi,
            an unknown layer type), or no layer keeps a full KV cache.
    """
    decoder = find_decoder(config, where)
    refuse_unsupported(decoder)
    num_layers = count_layers(decoder)
    q_heads = _per_layer_counts(decoder, NUM_Q_HEADS, num_layers, minimum=0)
    kinds = layer_kinds(decoder, num_layers)
    kv_heads = _kv_heads_per_layer(decoder, kinds, q_heads)
    kinds = [kind if heads else LayerKind.NONE for kind, heads in zip(kinds, kv_heads, strict=True)]
    owners = _kv_owners(decoder, kinds)
    layers = tuple(_layer_shape(decoder, i, kinds, kv_heads, q_heads, owners) for i in range(num_layers))
    if LayerKind.FULL not in {layer.kind for layer in layers}:
        raise TangramError(
            "nothing to plan", where=where, got="no layer with full attention", fix="serve it uncompressed"
        )
    head_dim = _head_dim(decoder, kinds, q_heads)
    attention = attention_form(decoder, head_dim)
    return ModelShape(decoder.model_type, layers, head_dim, _identity(decoder), attention)


def _kv_heads_per_layer(decoder: Decoder, kinds: list[LayerKind], q_heads: list[int]) -> list[int]:
    config, num_layers = decoder.config, len(kinds)
    if config.get("block_configs") is not None:
        blocks = block_attention(decoder, num_layers)
        return [_kv_heads_of_block(decoder, block, q) for block, q in zip(blocks, q_heads, strict=True)]
    if config.get("multi_query") and not config.get("new_decoder_architecture"):  # GPT-BigCode, Falcon
        return [1 if q else 0 for q in q_heads]
    if config.get("multi_query_attention") is False:  # ChatGLM
        return q_heads
    counts = _per_layer_counts(decoder, NUM_KV_HEADS, num_layers, minimum=0, default=q_heads)
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:  # Gemma 4
        full = decoder.optional_count(("num_global_key_value_heads",)) or 0
        counts = [full if kind is LayerKind.FULL else n for kind, n in zip(kinds, counts, strict=True)]
    return [_override(decoder, i, "num_key_value_heads", n) for i, n in enumerate(counts)]


def _kv_heads_of_block(decoder: Decoder, attention: Mapping[str, Any], q_heads: int) -> int:
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return 0
    if attention.get("num_key_value_heads") is not None:
        return decoder.checked_count(attention["num_key_value_heads"], "block_configs: num_key_value_heads")
    key = "block_configs: n_heads_in_group"
    ratio = decoder.checked_count(attention.get("n_heads_in_group"), key)
    if q_heads % ratio:
        raise decoder.refusal(
            "query heads do not divide into groups", key, got=ratio, expected=f"a divisor of {q_heads}"
        )
    return q_heads // ratio


def _per_layer_counts(
    decoder: Decoder, keys: tuple[str, ...], num_layers: int, *, minimum: int, default: list[int] | None = None
) -> list[int]:
    """One count per layer, from a list or from one number for all layers (which must be at least 1)."""
    key, value = decoder.find(keys)
    if value is None and default is not None:
        return default
    if value is None:
        raise decoder.missing(keys)
    if isinstance(value, list | tuple):
        return [decoder.checked_count(n, key, minimum) for n in decoder.per_layer(value, key, num_layers)]
    return [decoder.checked_count(value, key)] * num_layers


def _override(decoder: Decoder, layer: int, key: str, count: int) -> int:
    """What `per_layer_config`, transformers' overrides for single layers, makes of `count`. Its keys are '5' or '05'."""
    overrides = decoder.config.get("per_layer_config") or {}
    if not isinstance(overrides, Mapping) or not all(str(i).isdecimal() for i in overrides):
        raise decoder.refusal("wrong value", "per_layer_config", expected="an object of layer indices")
    for i, values in overrides.items():
        if int(i) == layer and isinstance(values, Mapping) and values.get(key) is not None:
            return decoder.checked_count(values[key], f"per_layer_config[{i}].{key}")
    return count


def _kv_owners(decoder: Decoder, kinds: list[LayerKind]) -> list[int]:
    """Whose KV cache each layer reads: the last `num_kv_shared_layers` read that of the last layer of their kind before."""
    num_layers = len(kinds)
    num_shared = decoder.optional_count(("num_kv_shared_layers",), minimum=0) or 0
    if num_shared >= num_layers:
        expected = f"less than {num_layers}: the others need a layer that owns a cache"
        raise decoder.refusal("every layer shares its KV", "num_kv_shared_layers", got=num_shared, expected=expected)
    first_shared = num_layers - num_shared
    last_of_kind = {kind: i for i, kind in enumerate(kinds[:first_shared])}
    owners = list(range(num_layers))
    for i in range(first_shared, num_layers):
        if kinds[i] is LayerKind.NONE:
            continue
        if kinds[i] not in last_of_kind:
            what = f"layer {i} shares its KV, but no {kinds[i].value} layer stands before layer {first_shared}"
            raise decoder.refusal(what, "num_kv_shared_layers", got=num_shared)
        owners[i] = last_of_kind[kinds[i]]
    return owners


def _layer_shape(
    decoder: Decoder, i: int, kinds: list[LayerKind], kv_heads: list[int], q_heads: list[int], owners: list[int]
) -> LayerShape:
    if kinds[i] is LayerKind.NONE:
        return LayerShape(LayerKind.NONE, 0, 0, i)
    num_q_heads = _override(decoder, i, "num_attention_heads", q_heads[i])
    num_kv_heads = kv_heads[owners[i]]
    if num_q_heads == 0 or num_q_heads % num_kv_heads:
        got, expected = f"{num_q_heads} query heads", f"a multiple of {num_kv_heads} KV heads"
        raise TangramError(
            f"layer {i}: query heads do not divide over KV heads", where=decoder.where, got=got, expected=expected
        )
    kind = kinds[i] if owners[i] == i else LayerKind.SHARED
    return LayerShape(kind, num_kv_heads, num_q_heads, owners[i])


def _head_dim(decoder: Decoder, kinds: list[LayerKind], q_heads: list[int]) -> int:
    """Width of a head in the layers with full attention, which must be one width, for keys and for values."""
    full_layers = [i for i, kind in enumerate(kinds) if kind is LayerKind.FULL]
    head_dim = decoder.optional_count(("global_head_dim", *HEAD_DIM))  # the first is Gemma 4's, for full attention
    if head_dim is None:
        head_dim = _head_dim_from_hidden_size(decoder, q_heads[full_layers[0]])
    widths = {_override(decoder, i, "head_dim", head_dim) for i in full_layers}
    if len(widths) > 1:
        raise decoder.refusal("full-attention layers differ in head_dim", "per_layer_config", got=sorted(widths))
    (width,) = widths
    v_head_dim = decoder.config.get("v_head_dim")
    if v_head_dim and v_head_dim != width:
        raise decoder.refusal(
            "keys and values differ in width", "v_head_dim", got=v_head_dim, expected=f"head_dim, {width}"
        )
    return width


def _head_dim_from_hidden_size(decoder: Decoder, num_q_heads: int) -> int:
    hidden_size = decoder.optional_count(HIDDEN_SIZE)
    if hidden_size is None:
        raise decoder.missing(("head_dim",))
    if num_q_heads == 0 or hidden_size % num_q_heads:
        raise decoder.refusal(
            "config has no head_dim and hidden_size does not divide over the query heads",
            decoder.find(HIDDEN_SIZE)[0],
            got=hidden_size,
            expected=f"a multiple of {num_q_heads}",
        )
    return hidden_size // num_q_heads


def _identity(decoder: Decoder) -> tuple[tuple[str, str], ...]:
    """What tells models of one shape apart and stands in every form of a config; GGUF files lack RoPE scaling, for one."""
    values = {
        "hidden_size": decoder.optional_count(HIDDEN_SIZE),
        "rope_base": f"{_rope_base(decoder):.7g}",  # GGUF keeps it in float32
        "vocab_size": decoder.optional_count(("vocab_size", "padded_vocab_size")),
    }
    return tuple((key, str(value)) for key, value in values.items() if value is not None)


def _rope_base(decoder: Decoder) -> float:
    """The base of the full-attention layers: in `rope_parameters` since transformers 5, before that at the top level."""
    key, base = decoder.find(ROPE_BASE)
    for name in ("rope_parameters", "rope_scaling"):
        parameters = decoder.config.get(name)
        if not isinstance(parameters, Mapping):
            continue
        if isinstance(parameters.get("full_attention"), Mapping):
            parameters = parameters["full_attention"]
        if parameters.get("rope_theta") is not None:
            key, base = f"{name}.rope_theta", parameters["rope_theta"]
            break
    return _DEFAULT_ROPE_BASE if base is None else decoder.checked_number(base, key)
