"""From a model's `config.json`, and nothing else, to its `ModelShape`. A layout that is not known is refused by name.

Configs spell one thing in many ways; each question ("how many KV heads has a layer?") is answered by one function here, and
answered alike for the file on the hub, for what transformers writes back and for what it reads out of a GGUF file.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangram_plan.ir import LayerKind, LayerShape, ModelShape, TangramError, user_path

# Under which key a multimodal config keeps its language model.
_DECODER_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")

_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
_NUM_Q_HEADS = (
    "num_attention_heads_per_layer",
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "num_query_heads",
)
_NUM_KV_HEADS = (
    "num_key_value_heads_per_layer",
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "n_kv_heads",
    "kv_n_heads",
    "multi_query_group_num",
)
_HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim", "head_size")
_HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model", "model_dim")
_ROPE_BASE = ("rope_theta", "rotary_emb_base")
_LAYER_TYPES = ("layer_types", "layers_block_type", "attention_layers")
_WINDOW_PATTERN = ("_sliding_window_pattern", "sliding_window_pattern", "global_attn_every_n_layers")

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

# Keys that config files on the hub leave out because the transformers class fills them in.
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "exaone4": {"sliding_window_pattern": 4},
    "falcon": {"multi_query": True},
    "gemma2": {"sliding_window": 4096, "sliding_window_pattern": 2, "head_dim": 256},
    "gemma3": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gemma3n": {"head_dim": 256, "rope_theta": 1e6, "num_kv_shared_layers": 15},
    "gpt_bigcode": {"multi_query": True},
    "gpt_oss": {"sliding_window": 128, "sliding_window_pattern": 2, "rope_theta": 150000.0},
    "mistral": {"sliding_window": 4096},
    "mixtral": {"rope_theta": 1e6},
    "qwen3_next": {"full_attention_interval": 4},
}
_DEFAULT_ROPE_BASE = 10000.0

_ENCODERS = {
    "bert",
    "camembert",
    "clip",
    "clip_text_model",
    "deberta-v2",
    "distilbert",
    "electra",
    "modernbert",
    "mpnet",
    "roberta",
    "siglip",
    "xlm-roberta",
}
_MAX_COUNT = 1 << 22  # a layer count, head count or width above this is a typing error


def load_model_config(model: str, *, relative_to: Path) -> tuple[dict[str, Any], Path]:
    """Read the `config.json` of a folder, of a path to the file, or of a hub id such as `org/name` in the local cache.

    No weights are read, and nothing is downloaded: a plan does not depend on the network.

    Args:
        model: what the user wrote.
        relative_to: the folder that a relative path starts from.

    Returns:
        The config, and the path of the file it was read from.

    Raises:
        TangramError: the file is missing, cannot be read, or does not hold a JSON object.
    """
    path = _config_path(model, relative_to)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TangramError("cannot read the model's config", where=str(path), got=error.strerror) from None
    except (ValueError, RecursionError) as error:
        raise TangramError("broken JSON in the model's config", where=str(path), got=error) from None
    if not isinstance(config, dict):
        raise TangramError("wrong config", where=str(path), got=type(config).__name__, expected="a JSON object")
    return config, path


def model_shape_from_config(config: Mapping[str, Any], where: str) -> ModelShape:
    """The attention shape that a `config.json`, or `PretrainedConfig.to_dict()`, describes.

    Args:
        config: the whole config; a multimodal one is entered through its text config.
        where: what to call the config in errors.

    Raises:
        TangramError: a key is missing or absurd, the architecture is one we do not plan for (encoder-decoder, MLA, an
            unknown layer type), or no layer keeps a full KV cache.
    """
    decoder = _decoder(config, where)
    _refuse_unsupported(decoder)
    num_layers = _num_layers(decoder)
    q_heads = _per_layer_counts(decoder, _NUM_Q_HEADS, num_layers, minimum=0)
    kinds = _layer_kinds(decoder, num_layers)
    kv_heads = _kv_heads_per_layer(decoder, kinds, q_heads)
    kinds = [kind if heads else LayerKind.NONE for kind, heads in zip(kinds, kv_heads, strict=True)]
    owners = _kv_owners(decoder, kinds)
    layers = tuple(_layer_shape(decoder, i, kinds, kv_heads, q_heads, owners) for i in range(num_layers))
    if LayerKind.FULL not in {layer.kind for layer in layers}:
        raise TangramError(
            "nothing to plan", where=where, got="no layer with full attention", fix="serve it uncompressed"
        )
    return ModelShape(decoder.model_type, layers, _head_dim(decoder, kinds, q_heads), _identity(decoder))


# --- where the file is ------------------------------------------------------------------------------------------------


def _config_path(model: str, relative_to: Path) -> Path:
    path = user_path(model, relative_to=relative_to, where="model")
    try:
        if path.is_file():
            return path
        if (path / "config.json").is_file():
            return path / "config.json"
        if path.is_dir():
            raise TangramError("no config.json in the model's folder", where=str(path))
    except OSError as error:
        raise TangramError("cannot open the model", where=repr(model), got=error.strerror) from None
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model) or model.endswith(".json"):
        raise TangramError(
            "no such model", where=str(path), expected="a folder with config.json, or a hub id like org/name"
        )
    if (cached := _cached_config(model)) is None:
        what = "no such folder, and no such model in the Hugging Face cache"
        fix = f"run `hf download {model} config.json` (of huggingface_hub), or give the folder that holds config.json"
        raise TangramError(what, where=str(path), fix=fix)
    return cached


def _cached_config(hub_id: str) -> Path | None:
    """The file in the local Hugging Face cache, whose layout is `models--org--name/snapshots/<revision>/`."""
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    repo = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser() / ("models--" + hub_id.replace("/", "--"))
    try:
        revision = (repo / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    path = repo / "snapshots" / revision / "config.json"
    return path if path.is_file() else None


# --- which part of the config describes the decoder -------------------------------------------------------------------


@dataclass(frozen=True)
class _Decoder:
    """The part of a config that describes the language model, and how to read it without trusting it."""

    config: Mapping[str, Any]
    model_type: str
    where: str

    def find(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        """The first of `keys` that has a value, and the value; `(keys[0], None)` if none has."""
        attention = self.config.get("attn_config")  # MPT, DBRX
        for source in (self.config, attention if isinstance(attention, Mapping) else {}):
            for key in keys:
                if source.get(key) is not None:
                    return key, source[key]
        return keys[0], None

    def optional_count(self, keys: tuple[str, ...], *, minimum: int = 1) -> int | None:
        """The first of `keys` that has a value, as an int; None if none has."""
        key, value = self.find(keys)
        return None if value is None else self.checked_count(value, key, minimum)

    def checked_count(self, value: object, key: str, minimum: int = 1) -> int:
        """`value`, if it is an int in the range of sizes."""
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _MAX_COUNT:
            raise self.refusal("wrong value", key, got=repr(value), expected=f"an integer of {minimum} or more")
        return value

    def checked_list(self, value: object, key: str) -> list[Any]:
        """`value`, if it is a list (or a tuple, in a live config)."""
        if not isinstance(value, list | tuple):
            raise self.refusal("wrong value", key, got=repr(value), expected="a list")
        return list(value)

    def per_layer(self, value: object, key: str, num_layers: int) -> list[Any]:
        """`value`, if it is a list with one entry per layer."""
        entries = self.checked_list(value, key)
        if len(entries) != num_layers:
            raise self.refusal(
                "wrong number of layers", key, got=len(entries), expected=f"one entry for each of {num_layers}"
            )
        return entries

    def missing(self, keys: tuple[str, ...]) -> TangramError:
        """What to raise when none of `keys` has a value."""
        return TangramError(f"config has no {keys[-1] if len(keys) == 1 else _plain_name(keys)}", where=self.where)

    def refusal(self, what: str, key: str, *, got: object = None, expected: str = "", fix: str = "") -> TangramError:
        """What to raise about the value of `key`."""
        return TangramError(what, where=f"{self.where}: {key}", got=got, expected=expected, fix=fix)


def _plain_name(keys: tuple[str, ...]) -> str:
    return next(key for key in keys if not key.endswith("_per_layer"))


def _decoder(config: Mapping[str, Any], where: str) -> _Decoder:
    if config.get("is_encoder_decoder") is True:
        raise TangramError("encoder-decoder models are not supported", where=where, got=config.get("model_type"))
    model_type = config.get("model_type")
    nested = next((key for key in _DECODER_KEYS if isinstance(config.get(key), Mapping)), None)
    if nested:
        inner = config[nested]
        return _decoder({**inner, "model_type": inner.get("model_type") or model_type}, f"{where}: {nested}")
    # `gemma3_text` on its own, inside a `gemma3` config and a flat config of old are one decoder.
    name = str(model_type or "").removesuffix("_text")
    return _Decoder({**_CLASS_DEFAULTS.get(name, {}), **config}, name, where)


def _refuse_unsupported(decoder: _Decoder) -> None:
    """Architectures whose KV cache is not one key and one value of `head_dim` per KV head and token."""
    config, name = decoder.config, decoder.model_type
    if name in _ENCODERS:
        raise TangramError("encoder models are not supported", where=decoder.where, got=name)
    if config.get("kv_lora_rank"):
        raise decoder.refusal(f"{name}: multi-head latent attention (MLA) is not supported", "kv_lora_rank")
    if config.get("cross_attention_layers"):
        raise decoder.refusal(f"{name}: cross-attention layers are not supported", "cross_attention_layers")
    if config.get("use_cla"):
        raise decoder.refusal(f"{name}: cross-layer attention is not supported", "use_cla")


# --- one function per question ----------------------------------------------------------------------------------------


def _num_layers(decoder: _Decoder) -> int:
    if (num_layers := decoder.optional_count(_NUM_LAYERS)) is not None:
        return num_layers
    key, layer_types = decoder.find((*_LAYER_TYPES, "hybrid_override_pattern"))
    if layer_types is None:
        raise decoder.missing(_NUM_LAYERS)
    return decoder.checked_count(len(decoder.checked_list(_spelt_out(layer_types), key)), key)


def _spelt_out(layer_types: object) -> object:
    """Nemotron-H's `M-M*` as a list of names; anything else as it is."""
    if not isinstance(layer_types, str):
        return layer_types
    return [_TYPE_OF_HYBRID_LETTER.get(letter, letter) for letter in layer_types]


def _layer_kinds(decoder: _Decoder, num_layers: int) -> list[LayerKind]:
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
    blocks = _block_attention(decoder, num_layers)
    return [
        LayerKind.SLIDING if block.get("window_length") and kind is LayerKind.FULL else kind
        for kind, block in zip(kinds, blocks, strict=True)
    ]


def _layer_types(decoder: _Decoder, num_layers: int) -> list[Any]:
    """The type of each layer by name, as `layer_types` spells it, from whichever scheme the config uses."""
    config, layers = decoder.config, range(num_layers)
    key, listed = decoder.find(_LAYER_TYPES)
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


def _windowed_types(decoder: _Decoder, num_layers: int) -> list[str]:
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
    key, pattern = decoder.find(_WINDOW_PATTERN)
    if isinstance(pattern, str):  # EXAONE 4
        names = [_TYPE_OF_WINDOW_LETTER.get(letter, letter) for letter in pattern] or ["full_attention"]
        return [names[i % len(names)] for i in layers]
    if pattern is not None:
        interval = decoder.checked_count(pattern, key)
        return ["sliding_attention" if (i + 1) % interval else "full_attention" for i in layers]
    first = decoder.optional_count(("max_window_layers",), minimum=0) or 0  # Qwen2
    return ["sliding_attention" if i >= first else "full_attention" for i in layers]


def _kv_heads_per_layer(decoder: _Decoder, kinds: list[LayerKind], q_heads: list[int]) -> list[int]:
    config, num_layers = decoder.config, len(kinds)
    if config.get("block_configs") is not None:
        blocks = _block_attention(decoder, num_layers)
        return [_kv_heads_of_block(decoder, block, q) for block, q in zip(blocks, q_heads, strict=True)]
    if config.get("multi_query") and not config.get("new_decoder_architecture"):  # GPT-BigCode, Falcon
        return [1 if q else 0 for q in q_heads]
    if config.get("multi_query_attention") is False:  # ChatGLM
        return q_heads
    counts = _per_layer_counts(decoder, _NUM_KV_HEADS, num_layers, minimum=0, default=q_heads)
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:  # Gemma 4
        full = decoder.optional_count(("num_global_key_value_heads",)) or 0
        counts = [full if kind is LayerKind.FULL else n for kind, n in zip(kinds, counts, strict=True)]
    return [_override(decoder, i, "num_key_value_heads", n) for i, n in enumerate(counts)]


def _block_attention(decoder: _Decoder, num_layers: int) -> list[Mapping[str, Any]]:
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


def _kv_heads_of_block(decoder: _Decoder, attention: Mapping[str, Any], q_heads: int) -> int:
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
    decoder: _Decoder, keys: tuple[str, ...], num_layers: int, *, minimum: int, default: list[int] | None = None
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


def _override(decoder: _Decoder, layer: int, key: str, count: int) -> int:
    """What `per_layer_config`, transformers' overrides for single layers, makes of `count`. Its keys are '5' or '05'."""
    overrides = decoder.config.get("per_layer_config") or {}
    if not isinstance(overrides, Mapping) or not all(str(i).isdecimal() for i in overrides):
        raise decoder.refusal("wrong value", "per_layer_config", expected="an object of layer indices")
    for i, values in overrides.items():
        if int(i) == layer and isinstance(values, Mapping) and values.get(key) is not None:
            return decoder.checked_count(values[key], f"per_layer_config[{i}].{key}")
    return count


def _kv_owners(decoder: _Decoder, kinds: list[LayerKind]) -> list[int]:
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
    decoder: _Decoder, i: int, kinds: list[LayerKind], kv_heads: list[int], q_heads: list[int], owners: list[int]
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


def _head_dim(decoder: _Decoder, kinds: list[LayerKind], q_heads: list[int]) -> int:
    """Width of a head in the layers with full attention, which must be one width, for keys and for values."""
    full_layers = [i for i, kind in enumerate(kinds) if kind is LayerKind.FULL]
    head_dim = decoder.optional_count(("global_head_dim", *_HEAD_DIM))  # the first is Gemma 4's, for full attention
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


def _head_dim_from_hidden_size(decoder: _Decoder, num_q_heads: int) -> int:
    hidden_size = decoder.optional_count(_HIDDEN_SIZE)
    if hidden_size is None:
        raise decoder.missing(("head_dim",))
    if num_q_heads == 0 or hidden_size % num_q_heads:
        raise decoder.refusal(
            "config has no head_dim and hidden_size does not divide over the query heads",
            decoder.find(_HIDDEN_SIZE)[0],
            got=hidden_size,
            expected=f"a multiple of {num_q_heads}",
        )
    return hidden_size // num_q_heads


def _identity(decoder: _Decoder) -> tuple[tuple[str, str], ...]:
    """What tells models of one shape apart and stands in every form of a config; GGUF files lack RoPE scaling, for one."""
    values = {
        "hidden_size": decoder.optional_count(_HIDDEN_SIZE),
        "rope_base": f"{_rope_base(decoder):.7g}",  # GGUF keeps it in float32
        "vocab_size": decoder.optional_count(("vocab_size", "padded_vocab_size")),
    }
    return tuple((key, str(value)) for key, value in values.items() if value is not None)


def _rope_base(decoder: _Decoder) -> float:
    """The base of the full-attention layers: in `rope_parameters` since transformers 5, before that at the top level."""
    key, base = decoder.find(_ROPE_BASE)
    for name in ("rope_parameters", "rope_scaling"):
        parameters = decoder.config.get(name)
        if not isinstance(parameters, Mapping):
            continue
        if isinstance(parameters.get("full_attention"), Mapping):
            parameters = parameters["full_attention"]
        if parameters.get("rope_theta") is not None:
            key, base = f"{name}.rope_theta", parameters["rope_theta"]
            break
    if base is None:
        return _DEFAULT_ROPE_BASE
    if isinstance(base, bool) or not isinstance(base, int | float) or base <= 0:
        raise decoder.refusal("wrong value", key, got=repr(base), expected="a positive number")
    return float(base)
