"""Which layers keep a full KV cache, from whichever scheme the config uses."""

from collections.abc import Mapping
from typing import Any

from tangram_plan.ir import LayerKind, TangramError

from .decoder import LAYER_TYPES, NUM_LAYERS, WINDOW_PATTERN, Decoder

_KIND_OF_LAYER_TYPE = {
    "full_attention": LayerKind.FULL,
    "attention": LayerKind.FULL,
    "global": LayerKind.FULL,
    "sliding_attention": LayerKind.SLIDING,
    "chunked_attention": LayerKind.SLIDING,
    "local": LayerKind.SLIDING,
    "linear_attention": LayerKind.NONE,
    "mamba": LayerKind.NONE,
    "mamba2": LayerKind.NONE,
    "recurrent": LayerKind.NONE,
    "conv": LayerKind.NONE,
    "mlp": LayerKind.NONE,
    "moe": LayerKind.NONE,
}
_TYPE_OF_HYBRID_LETTER = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_TYPE_OF_WINDOW_LETTER = {"L": "sliding_attention", "G": "full_attention"}


def count_layers(decoder: Decoder) -> int:
    """The number of decoder layers, which a hybrid may give only by the types of its layers."""
    if (num_layers := decoder.optional_count(NUM_LAYERS)) is not None:
        return num_layers
    key, layer_types = decoder.find((*LAYER_TYPES, "hybrid_override_pattern"))
    if layer_types is None:
        raise decoder.missing(NUM_LAYERS)
    return decoder.checked_count(len(decoder.checked_list(_spelt_out(layer_types), key)), key)


def layer_kinds(decoder: Decoder, num_layers: int) -> list[LayerKind]:
    """How each layer keeps keys and values, as far as its type says: sharing and layers without KV heads come on top."""
    layer_types = _layer_types(decoder, num_layers)
    for i, layer_type in enumerate(layer_types):
        if not isinstance(layer_type, str) or layer_type not in _KIND_OF_LAYER_TYPE:
            raise TangramError(
                f"{decoder.model_type}: layer {i} is of a type we do not plan for",
                where=decoder.where,
                got=repr(layer_type),
                expected=f"one of {', '.join(_KIND_OF_LAYER_TYPE)}",
            )
    kinds = [_KIND_OF_LAYER_TYPE[layer_type] for layer_type in layer_types]
    blocks = block_attention(decoder, num_layers)
    return [
        LayerKind.SLIDING if block.get("window_length") and kind is LayerKind.FULL else kind
        for kind, block in zip(kinds, blocks, strict=True)
    ]


def block_attention(decoder: Decoder, num_layers: int) -> list[Mapping[str, Any]]:
    """Each layer's `block_configs[i].attention` (DeciLM, Nemotron-NAS); empty where there is none."""
    blocks = decoder.config.get("block_configs")
    if blocks is None:
        return [{}] * num_layers
    attentions = [
        b.get("attention") for b in decoder.per_layer(blocks, "block_configs", num_layers) if isinstance(b, Mapping)
    ]
    if len(attentions) != num_layers or not all(isinstance(attention, Mapping) for attention in attentions):
        raise decoder.refusal("wrong value", "block_configs", expected="an object with `attention` for each layer")
    return [attention for attention in attentions if attention is not None]


def _spelt_out(layer_types: object) -> object:
    """Nemotron-H's `M-M*` as a list of names; anything else as it is."""
    if not isinstance(layer_types, str):
        return layer_types
    return [_TYPE_OF_HYBRID_LETTER.get(letter, letter) for letter in layer_types]


def _layer_types(decoder: Decoder, num_layers: int) -> list[Any]:
    """The type of each layer by name, as `layer_types` spells it, from whichever scheme the config uses."""
    config, layers = decoder.config, range(num_layers)
    key, listed = decoder.find(LAYER_TYPES)
    if listed is not None:
        return decoder.per_layer(listed, key, num_layers)
    if (letters := config.get("hybrid_override_pattern")) is not None:  # Nemotron-H
        return decoder.per_layer(_spelt_out(letters), "hybrid_override_pattern", num_layers)
    if (flags := config.get("attn_type_list")) is not None:  # MiniMax
        flags = decoder.per_layer(flags, "attn_type_list", num_layers)
        return ["full_attention" if flag else "linear_attention" for flag in flags]
    if block_types := config.get("block_types"):  # RecurrentGemma: a short list, repeated; its attention is local
        names = decoder.checked_list(block_types, "block_types")
        return ["sliding_attention" if (name := names[i % len(names)]) == "attention" else name for i in layers]
    if (period := decoder.optional_count(("attn_layer_period",))) is not None:  # Jamba
        offset = decoder.optional_count(("attn_layer_offset",), minimum=0) or 0
        return ["full_attention" if i % period == offset else "linear_attention" for i in layers]
    key, indices = decoder.find(("attn_layer_indices", "full_attn_idxs"))  # Bamba, LFM2
    if indices is not None:
        indices = decoder.checked_list(indices, key)
        return ["full_attention" if i in indices else "linear_attention" for i in layers]
    if (interval := decoder.optional_count(("full_attention_interval",))) is not None:  # Qwen3-Next
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in layers]
    return _windowed_types(decoder, num_layers)


def _windowed_types(decoder: Decoder, num_layers: int) -> list[str]:
    """Layer types of a config that says only which layers have a window, or a chunk, that is smaller than the context."""
    config, layers = decoder.config, range(num_layers)
    if decoder.optional_count(("attention_chunk_size",)) is not None:  # Llama 4
        interval = decoder.optional_count(("no_rope_layer_interval",)) or 4
        flags = config.get("no_rope_layers") or [(i + 1) % interval for i in layers]
        flags = decoder.per_layer(flags, "no_rope_layers", num_layers)
        return ["chunked_attention" if flag else "full_attention" for flag in flags]
    if not config.get("use_sliding_window", "max_window_layers" not in config):  # Qwen2: off unless switched on
        return ["full_attention"] * num_layers
    window = decoder.optional_count(("sliding_window",))
    max_positions = config.get("max_position_embeddings")
    if window is None or (isinstance(max_positions, int) and window >= max_positions):
        return ["full_attention"] * num_layers
    key, pattern = decoder.find(WINDOW_PATTERN)
    if isinstance(pattern, str):  # EXAONE 4
        names = [_TYPE_OF_WINDOW_LETTER.get(letter, letter) for letter in pattern] or ["full_attention"]
        return [names[i % len(names)] for i in layers]
    if pattern is not None:
        interval = decoder.checked_count(pattern, key)
        return ["sliding_attention" if (i + 1) % interval else "full_attention" for i in layers]
    first = decoder.optional_count(("max_window_layers",), minimum=0) or 0  # Qwen2
    return ["sliding_attention" if i >= first else "full_attention" for i in layers]
