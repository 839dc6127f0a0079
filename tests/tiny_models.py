"""Models of two layers with random weights, what their KV heads keep, and a GPU for them: for runs in which SmolLM2 takes too long."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tangram_plan.model_config import load_model_shape
from tangram_plan.profiles import save_profile
from tests.devices import make_device
from tests.small_plans import small_profile

VOCABULARY = 128
SIZES: dict[str, Any] = {
    "hidden_size": 256,  # so that families that state no head_dim have this one
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,  # the least that vLLM's own attention takes on CPUs
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
SHARP = 1.6  # of the norms of queries and keys: attention looks at few tokens, so that it matters which are kept
PROFILE, DEVICE, WEIGHTS = "profile.npz", "device.json", "model.safetensors"  # beside the model


def write_tiny_model(folder: Path, family: str, *, quantised: bool = False) -> None:
    """Config, weights of the scale of trained ones, a profile in which the KV heads of every layer differ, and a GPU of few CTAs.

    Args:
        folder: of the model.
        family: one of FAMILIES.
        quantised: projections in int8 with a scale per output channel, in the form of compressed-tensors.
    """
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{FAMILIES[family]}Config")(**SIZES, sliding_window=None)
    model = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weights.fill_(SHARP)
            elif name.endswith(("q_proj.weight", "k_proj.weight")):
                weights.normal_(std=SHARP * weights.shape[-1] ** -0.5)
            elif weights.dim() > 1:
                weights.normal_(std=weights.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                weights.normal_(std=0.2)
        model.lm_head.weight.mul_(3)
        model.model.embed_tokens.weight.normal_()
    model.save_pretrained(folder)
    if quantised:
        _quantise(folder)
    shape, _ = load_model_shape(str(folder), relative_to=folder)
    save_profile(small_profile(shape), folder / PROFILE)
    (folder / DEVICE).write_text(make_device().model_dump_json())


def _quantise(folder: Path) -> None:
    weights = {}
    for name, values in load_file(folder / WEIGHTS).items():
        weights[name] = values
        if name.endswith("proj.weight"):
            scale = values.abs().amax(1, keepdim=True) / 127
            weights[name] = (values / scale).round().to(torch.int8)
            weights[name.replace("weight", "weight_scale")] = scale
    save_file(weights, folder / WEIGHTS)
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": {**int8, "strategy": "channel", "dynamic": False},
        "input_activations": {**int8, "strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme},
    }
    (folder / "config.json").write_text(json.dumps(config))


def random_tokens(num_tokens: int, seed: int) -> list[int]:
    """A text in no language."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(VOCABULARY, (num_tokens,), generator=generator).tolist()
    return tokens
