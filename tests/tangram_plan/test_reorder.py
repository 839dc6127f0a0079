import errno
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tangram_plan.ir import ORIGINAL_ORDER, HeadOrder, LayerKind, ModelShape, TangramError
from tangram_plan.model_config import load_model_shape
from tangram_plan.reorder import reorder_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FULL_AND_SLIDING = ["full_attention", "sliding_attention", "full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True},
    "Qwen2": {"hidden_size": 64},
    "Qwen3": {},
    "GptOss": {"layer_types": FULL_AND_SLIDING, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
    "Olmo2": {"hidden_size": 64},
    "Phi3": {"hidden_size": 64},
    "Cohere2": {"layer_types": FULL_AND_SLIDING, "sliding_window": 4},
    "Gemma3": {"layer_types": FULL_AND_SLIDING, "sliding_window": 4},
    "Qwen3Next": {
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}


def config_class(name: str) -> Any:
    return getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")


def save_model(name: str, folder: Path, *, max_shard_size: str = "1GB", **changes: Any) -> Any:
    """A random model of this architecture, every parameter (biases, norms, sinks) random, saved to `folder`."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config_class(name)(**{**SIZES, **MODELS[name], **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.eval().save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def read_shape(folder: Path) -> ModelShape:
    return load_model_shape(str(folder), relative_to=Path())[0]


def random_order(shape: ModelShape) -> HeadOrder:
    rng = random.Random(1)
    layers = {}
    for i in shape.planned_layers:
        heads = list(range(shape.layers[i].num_kv_heads))
        while heads == sorted(heads):
            rng.shuffle(heads)
        layers[i] = tuple(heads)
    return HeadOrder(layers)


def tensors(folder: Path) -> dict[str, Any]:
    return {
        name: t
        for path in sorted(folder.glob("*.safetensors"))
        for name, t in safetensors_torch.load_file(path).items()
    }


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 21)[None] * 7 % 61).logits


def tiny_checkpoint(folder: Path, changes: dict[str, Any] | None = None, **config: Any) -> tuple[ModelShape, HeadOrder]:
    """One hand-made layer of 4 query heads and 2 KV heads, 2 wide; `changes` replaces tensors, or removes them by None."""
    folder.mkdir()
    values = {
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "hidden_size": 6,
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **values, **config}))
    held = {
        "model.embed_tokens.weight": torch.zeros(5, 6),
        "model.layers.0.self_attn.q_proj.weight": torch.arange(48.0).reshape(8, 6),
        "model.layers.0.self_attn.k_proj.weight": torch.arange(24.0).reshape(4, 6),
        "model.layers.0.self_attn.v_proj.weight": torch.arange(24.0).reshape(4, 6),
        "model.layers.0.self_attn.o_proj.weight": torch.arange(48.0).reshape(6, 8),
    }
    for name, tensor in (changes or {}).items():
        held[name if name.startswith("model.") else f"model.layers.0.self_attn.{name}"] = tensor
    safetensors_torch.save_file({name: t for name, t in held.items() if t is not None}, folder / "model.safetensors")
    return read_shape(folder), HeadOrder({0: (1, 0)})


def refusal(model: Path, shape: ModelShape, order: HeadOrder, output: Path) -> str:
    before = set(model.parent.rglob("*"))
    with pytest.raises(TangramError) as error:
        reorder_checkpoint(model, shape, order, output)
    assert "\n" not in str(error.value)
    assert set(model.parent.rglob("*")) == before
    return str(error.value)


# --- the model computes the same


@pytest.mark.parametrize("name", MODELS)
def test_reordered_model_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path / "model")
    shape = read_shape(tmp_path / "model")
    order = random_order(shape)
    reorder_checkpoint(tmp_path / "model", shape, order, tmp_path / "out")
    reordered = type(model).from_pretrained(tmp_path / "out").eval()
    # In float64, so that what sums in another order leaves on some CPUs does not count; models round parts to float32 themselves.
    for one in (reordered, model):
        one.double().set_experts_implementation("eager")
    torch.testing.assert_close(logits(reordered), logits(model), rtol=1.3e-6, atol=1e-5)
    assert reordered.config.to_dict()["tangram_head_order"] == order.hash
    before, after = tensors(tmp_path / "model"), tensors(tmp_path / "out")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    for i in shape.planned_layers:
        assert any(f"layers.{i}.self_attn.o_proj.weight" in name for name in changed)
    assert not [name for name in changed if "self_attn" not in name]


def test_layers_that_share_kv_move_with_their_owner(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Gemma3nTextConfig(
        **SIZES | {"num_hidden_layers": 4, "intermediate_size": 32},
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        sliding_window=4,
        hidden_size_per_layer_input=4,
        vocab_size_per_layer_input=61,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
    )
    model = transformers.Gemma3nForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    shape = read_shape(tmp_path / "model")
    assert [layer.kind for layer in shape.layers][1:] == [LayerKind.FULL, LayerKind.SHARED, LayerKind.SHARED]
    reorder_checkpoint(tmp_path / "model", shape, HeadOrder({1: (2, 0, 3, 1)}), tmp_path / "out")
    reordered = transformers.Gemma3nForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits(reordered), logits(model))
    before, after = tensors(tmp_path / "model"), tensors(tmp_path / "out")
    changed = {
        name.partition("layers.")[2].split(".")[0] for name in before if not torch.equal(before[name], after[name])
    }
    assert changed == {"1", "3"}


def test_shards_and_other_files(tmp_path: Path) -> None:
    model = save_model("Llama", tmp_path / "model", max_shard_size="20KB")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "consolidated.safetensors").write_bytes(b"the same weights in the original order")
    (tmp_path / "model" / ".cache").mkdir()
    (tmp_path / "model" / ".cache" / "lock").touch()
    shape, steps = read_shape(tmp_path / "model"), list[tuple[int, int]]()
    reorder_checkpoint(
        tmp_path / "model",
        shape,
        random_order(shape),
        tmp_path / "out",
        progress=lambda done, total: steps.append((done, total)),
    )
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert len([name for name in names if name.startswith("model-")]) > 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == names - {"consolidated.safetensors", ".cache"}
    torch.testing.assert_close(logits(type(model).from_pretrained(tmp_path / "out")), logits(model))
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]


def test_reordering_back_gives_the_same_bytes(tmp_path: Path) -> None:
    save_model("Llama", tmp_path / "model")
    shape = read_shape(tmp_path / "model")
    order = random_order(shape)
    back = HeadOrder({i: tuple(heads.index(h) for h in range(len(heads))) for i, heads in order.layers.items()})
    reorder_checkpoint(tmp_path / "model", shape, order, tmp_path / "out")
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "out")
    reorder_checkpoint(tmp_path / "out", shape, back, tmp_path / "back")
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("model", "out", "back")]
    assert weights[0] == weights[2]
    assert weights[0] != weights[1]


def test_new_place_gets_the_original_head_that_the_order_names(tmp_path: Path) -> None:
    shape, order = tiny_checkpoint(tmp_path / "model", {"q_proj.bias": torch.arange(8), "o_proj.bias": torch.arange(6)})
    reorder_checkpoint(tmp_path / "model", shape, order, tmp_path / "out")
    prefix = "model.layers.0.self_attn."
    out = {name.removeprefix(prefix): t for name, t in tensors(tmp_path / "out").items()}
    held = {name.removeprefix(prefix): t for name, t in tensors(tmp_path / "model").items()}
    assert out["q_proj.bias"].tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert out["o_proj.bias"].tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(out["k_proj.weight"], held["k_proj.weight"][[2, 3, 0, 1]])
    assert torch.equal(out["o_proj.weight"], held["o_proj.weight"][:, [4, 5, 6, 7, 0, 1, 2, 3]])


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "", "thinker.model."])
def test_decoder_of_a_multimodal_model_moves_and_its_towers_do_not(prefix: str, tmp_path: Path) -> None:
    shape, order = tiny_checkpoint(tmp_path / "model")
    held = tensors(tmp_path / "model")
    renamed = {name.replace("model.", prefix, 1): t for name, t in held.items()}
    towers = ["vision_tower.encoder.", "model.visual.", "mtp.", "talker.model.", "model.audio_tower."]
    renamed |= {tower + name.removeprefix("model."): t.clone() for tower in towers for name, t in held.items()}
    safetensors_torch.save_file(renamed, tmp_path / "model" / "model.safetensors")
    reorder_checkpoint(tmp_path / "model", shape, order, tmp_path / "out")
    after = tensors(tmp_path / "out")
    changed = {name for name in renamed if not torch.equal(renamed[name], after[name])}
    assert changed == {f"{prefix}layers.0.self_attn.{p}_proj.weight" for p in "qkvo"}


# --- quantised checkpoints


def quantised(block: int | None = None) -> dict[str, Any]:
    fp8 = torch.float8_e4m3fn
    held = {
        "q_proj.weight": torch.arange(48.0).reshape(8, 6).to(fp8),
        "o_proj.weight": torch.arange(48.0).reshape(6, 8).to(fp8),
    }
    if block:
        return held | {
            "q_proj.weight_scale_inv": torch.arange(8.0 // block * 3).reshape(8 // block, 3),
            "o_proj.weight_scale_inv": torch.arange(3 * 8.0 // block).reshape(3, 8 // block),
        }
    return held | {
        "q_proj.weight_scale": torch.arange(8.0)[:, None],
        "k_proj.weight_scale": torch.ones(1),
        "o_proj.weight_scale": torch.arange(6.0)[:, None],
        "o_proj.input_scale": torch.tensor(2.0),
    }


def test_row_scales_move_and_tensor_scales_stay(tmp_path: Path) -> None:
    shape, order = tiny_checkpoint(tmp_path / "model", quantised())
    reorder_checkpoint(tmp_path / "model", shape, order, tmp_path / "out")
    out = tensors(tmp_path / "out")
    assert out["model.layers.0.self_attn.q_proj.weight_scale"].flatten().tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert out["model.layers.0.self_attn.o_proj.weight_scale"].flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_block_scales_move_when_no_block_spans_two_kv_heads(tmp_path: Path) -> None:
    quantization = {"quantization_config": {"weight_block_size": [2, 2]}}
    shape, order = tiny_checkpoint(tmp_path / "model", quantised(block=2), **quantization)
    reorder_checkpoint(tmp_path / "model", shape, order, tmp_path / "out")
    out = tensors(tmp_path / "out")
    assert out["model.layers.0.self_attn.q_proj.weight_scale_inv"][:, 0].tolist() == [6, 9, 0, 3]
    assert out["model.layers.0.self_attn.o_proj.weight_scale_inv"][0].tolist() == [2, 3, 0, 1]


@pytest.mark.parametrize("config", [{}, {"quantization_config": {"weight_block_size": [8, 8]}}])
def test_block_scales_that_may_span_kv_heads_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    shape, order = tiny_checkpoint(tmp_path / "model", quantised(block=4), **config)
    assert "weight_scale_inv" in refusal(tmp_path / "model", shape, order, tmp_path / "out")


# --- refusals


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("q_proj.qweight", torch.zeros(1, dtype=torch.int32)),
        ("k_proj.g_idx", torch.zeros(6, dtype=torch.int32)),
        ("q_proj.weight.quant_state.bitsandbytes__nf4", torch.zeros(3, dtype=torch.uint8)),
        ("q_proj.weight", torch.zeros(24, 1, dtype=torch.uint8)),
        ("q_proj.lora_A.weight", torch.zeros(2, 6)),
        ("qkv_proj.weight", torch.zeros(16, 6)),
        ("W_pack.weight", torch.zeros(16, 6)),
        ("head_gate.weight", torch.zeros(4, 6)),
        ("q_norm.weight", torch.zeros(3)),
        ("k_scale", torch.zeros(2)),
        ("k_proj.weight", torch.zeros(6, 6)),
        ("q_proj.bias", torch.zeros(4)),
        ("sinks", torch.zeros(2)),
    ],
)
def test_unknown_attention_tensors_are_refused_by_name(name: str, tensor: Any, tmp_path: Path) -> None:
    shape, order = tiny_checkpoint(tmp_path / "model", {name: tensor})
    assert f"layers.0.self_attn.{name}" in refusal(tmp_path / "model", shape, order, tmp_path / "out")


def test_unknown_attention_tensor_is_refused_in_words_of_our_configuration(tmp_path: Path) -> None:
    shape, order = tiny_checkpoint(tmp_path / "model", {"W_pack.weight": torch.zeros(16, 6)})
    line = refusal(tmp_path / "model", shape, order, tmp_path / "out")
    assert "grouping.reorder_heads: false, or tensor_parallel: 1" in line


def test_layers_whose_order_is_the_original_one_stay_as_they_are(tmp_path: Path) -> None:
    save_model("Llama", tmp_path / "model")
    shape = read_shape(tmp_path / "model")
    reorder_checkpoint(tmp_path / "model", shape, HeadOrder({1: (2, 0, 3, 1)}), tmp_path / "short")
    reorder_checkpoint(
        tmp_path / "model", shape, HeadOrder({0: (0, 1, 2, 3), 1: (2, 0, 3, 1), 2: (0, 1, 2, 3)}), tmp_path / "long"
    )
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "short" / name).read_bytes() == (tmp_path / "long" / name).read_bytes()


@pytest.mark.parametrize("missing", ["q_proj", "k_proj", "o_proj"])
def test_layer_that_is_not_all_there_is_refused(missing: str, tmp_path: Path) -> None:
    shape, order = tiny_checkpoint(tmp_path / "model", {f"{missing}.weight": None})
    assert f"layer 0 has no {missing}" in refusal(tmp_path / "model", shape, order, tmp_path / "out")


def test_two_decoders_are_refused(tmp_path: Path) -> None:
    shape, order = tiny_checkpoint(tmp_path / "model", {"model.text_model.layers.0.self_attn.sinks": torch.zeros(4)})
    assert "several decoders" in refusal(tmp_path / "model", shape, order, tmp_path / "out")


def test_reordering_twice_is_refused(tmp_path: Path) -> None:
    shape, order = tiny_checkpoint(tmp_path / "model")
    reorder_checkpoint(tmp_path / "model", shape, order, tmp_path / "out")
    line = refusal(tmp_path / "out", shape, order, tmp_path / "again")
    assert "KV heads are in another order" in line
    assert "use the original checkpoint" in line


def test_outputs_that_are_refused(tmp_path: Path) -> None:
    shape, order = tiny_checkpoint(tmp_path / "model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "busy.partial").mkdir()
    assert "not an empty folder" in refusal(tmp_path / "model", shape, order, tmp_path / "full")
    assert "not an empty folder" in refusal(tmp_path / "model", shape, order, tmp_path / "full" / "mine")
    assert "inside the model" in refusal(tmp_path / "model", shape, order, tmp_path / "model" / "out")
    assert "inside the model" in refusal(tmp_path / "model", shape, order, tmp_path / "model")
    assert "busy.partial" in refusal(tmp_path / "model", shape, order, tmp_path / "busy")


def test_output_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    shape, order = tiny_checkpoint(tmp_path / "model")
    refusal(tmp_path / "model", shape, order, tmp_path / ("x" * 300))
    refusal(tmp_path / "model", shape, order, tmp_path / "model" / "config.json" / ".." / ".." / "model" / "y")


def test_empty_output_folder_is_used(tmp_path: Path) -> None:
    shape, order = tiny_checkpoint(tmp_path / "model")
    (tmp_path / "out").mkdir()
    reorder_checkpoint(tmp_path / "model", shape, order, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize(
    "order", [HeadOrder({0: (1, 1)}), HeadOrder({0: (2, 1, 0)}), HeadOrder({7: (1, 0)}), ORIGINAL_ORDER]
)
def test_orders_that_do_not_fit_are_refused(order: HeadOrder, tmp_path: Path) -> None:
    shape, _ = tiny_checkpoint(tmp_path / "model")
    refusal(tmp_path / "model", shape, order, tmp_path / "out")


def test_no_safetensors_is_refused(tmp_path: Path) -> None:
    shape, order = tiny_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    assert "no safetensors" in refusal(tmp_path / "model", shape, order, tmp_path / "out")


@pytest.mark.parametrize("cut", [0, 4, 40, -1])
def test_broken_safetensors_is_refused(cut: int, tmp_path: Path) -> None:
    shape, order = tiny_checkpoint(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    assert "broken safetensors" in refusal(tmp_path / "model", shape, order, tmp_path / "out")


@pytest.mark.parametrize(
    "index", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "b.safetensors"}}', '{"weight_map": {"a": "../x"}}']
)
def test_broken_index_is_refused(index: str, tmp_path: Path) -> None:
    shape, order = tiny_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refusal(tmp_path / "model", shape, order, tmp_path / "out")


def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, order = tiny_checkpoint(tmp_path / "model")

    def full(_source: Path, copy: Path) -> None:
        copy.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    assert "No space left" in refusal(tmp_path / "model", shape, order, tmp_path / "out")


def test_interruption_leaves_nothing(tmp_path: Path) -> None:
    shape, order = tiny_checkpoint(tmp_path / "model")

    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reorder_checkpoint(tmp_path / "model", shape, order, tmp_path / "out", progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
