"""The part of a config that describes the decoder: under which keys it says things, and what of it is refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tangram_plan.ir import TangramError

# Under which key a multimodal config keeps its language model.
_DECODER_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")

NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
NUM_Q_HEADS = (
    "num_attention_heads_per_layer",
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "num_query_heads",
)
NUM_KV_HEADS = (
    "num_key_value_heads_per_layer",
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "n_kv_heads",
    "kv_n_heads",
    "multi_query_group_num",
)
HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim", "head_size")
HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model", "model_dim")
ROPE_BASE = ("rope_theta", "rotary_emb_base")
LAYER_TYPES = ("layer_types", "layers_block_type", "attention_layers")
WINDOW_PATTERN = ("_sliding_window_pattern", "sliding_window_pattern", "global_attn_every_n_layers")

# Keys that config files on the hub leave out because the transformers class fills them in.
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "exaone4": {"sliding_window_pattern": 4},
    "falcon": {"multi_query": True},
    "gemma2": {
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
    },
    "gemma3n": {"head_dim": 256, "rope_theta": 1e6, "num_kv_shared_layers": 15},
    "gpt_bigcode": {"multi_query": True},
    "gpt_oss": {"sliding_window": 128, "sliding_window_pattern": 2, "rope_theta": 150000.0},
    "granite": {"attention_multiplier": 1.0},
    "granite4_vision": {"attention_multiplier": 1.0},
    "granite_swa": {"attention_multiplier": 1.0},
    "granitemoe": {"attention_multiplier": 1.0},
    "granitemoe_swa": {"attention_multiplier": 1.0},
    "granitemoehybrid": {"attention_multiplier": 1.0},
    "granitemoeshared": {"attention_multiplier": 1.0},
    "mistral": {"sliding_window": 4096},
    "mixtral": {"rope_theta": 1e6},
    "qwen3_next": {"full_attention_interval": 4},
    "vaultgemma": {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0},
}

_ENCODER_DECODERS = {
    "bart",
    "blenderbot",
    "longt5",
    "m2m_100",
    "marian",
    "mbart",
    "mt5",
    "pegasus",
    "t5",
    "umt5",
    "whisper",
}
_WITHOUT_ATTENTION = {"falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"}
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
# Always ALiBi, whether their config says so (MPT) or not.
_ALIBI_MODELS = {"bloom", "mpt"}
_MAX_COUNT = 1 << 22  # a layer count, head count or width above this is a typing error
_MIN_NUMBER, _MAX_NUMBER = 1e-9, 1e15  # and so are scales, caps and RoPE bases beyond these


@dataclass(frozen=True)
class Decoder:
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
            raise self.refusal(
                "wrong value", key, got=repr(value), expected=f"an integer from {minimum} to {_MAX_COUNT}"
            )
        return value

    def optional_number(self, key: str) -> float | None:
        """The value of `key` as a positive float; None if it has none."""
        value = self.config.get(key)
        return None if value is None else self.checked_number(value, key)

    def checked_number(self, value: object, key: str) -> float:
        """`value` as a float, if it is a positive number."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not _MIN_NUMBER <= value <= _MAX_NUMBER:
            raise self.refusal("wrong value", key, got=repr(value), expected="a positive number")
        return float(value)

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


def find_decoder(config: Mapping[str, Any], where: str) -> Decoder:
    """The decoder's part of a whole config, with the defaults of its class.

    Raises:
        TangramError: the model is an encoder-decoder.
    """
    if config.get("is_encoder_decoder") is True:
        raise TangramError("encoder-decoder models are not supported", where=where, got=config.get("model_type"))
    model_type = config.get("model_type")
    nested = next((key for key in _DECODER_KEYS if isinstance(config.get(key), Mapping)), None)
    if nested:
        inner = config[nested]
        return find_decoder({**inner, "model_type": inner.get("model_type") or model_type}, f"{where}: {nested}")
    # `gemma3_text` on its own, inside a `gemma3` config and a flat config of old are one decoder.
    name = str(model_type or "").removesuffix("_text")
    return Decoder({**_CLASS_DEFAULTS.get(name, {}), **config}, name, where)


def refuse_unsupported(decoder: Decoder) -> None:
    """Refuse what no plan describes: a KV cache that is not a key and a value of `head_dim` per KV head and token; ALiBi.

    Raises:
        TangramError: the architecture is one of these.
    """
    config, name = decoder.config, decoder.model_type
    if name in _ENCODER_DECODERS:
        raise TangramError("encoder-decoder models are not supported", where=decoder.where, got=name)
    if name in _WITHOUT_ATTENTION:
        fix = "serve it as it is"
        raise TangramError(
            f"{name} has no attention layers, so there is no KV cache to plan", where=decoder.where, fix=fix
        )
    if name in _ENCODERS:
        raise TangramError("encoder models are not supported", where=decoder.where, got=name)
    if config.get("kv_lora_rank"):
        raise decoder.refusal(f"{name}: multi-head latent attention (MLA) is not supported", "kv_lora_rank")
    if config.get("cross_attention_layers"):
        raise decoder.refusal(f"{name}: cross-attention layers are not supported", "cross_attention_layers")
    if config.get("use_cla"):
        raise decoder.refusal(f"{name}: cross-layer attention is not supported", "use_cla")
    if alibi_key := _alibi_key(decoder):
        raise decoder.refusal(f"{name}: position biases (ALiBi) are not supported", alibi_key)


def _alibi_key(decoder: Decoder) -> str:
    """Which key says that scores get a bias by distance; empty if none does."""
    config, name = decoder.config, decoder.model_type
    key, alibi = decoder.find(("alibi", "use_alibi"))  # Falcon
    if alibi:
        return key
    if config.get("position_embedding_type") == "alibi":  # Jais
        return "position_embedding_type"
    if name == "baichuan" and config.get("hidden_size") != 4096:  # 7B has RoPE, 13B ALiBi, and no key tells
        return "hidden_size"
    return "model_type" if name in _ALIBI_MODELS else ""
