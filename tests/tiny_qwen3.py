"""A Qwen3 of two layers with random weights, what its KV heads keep, and a GPU for it: for runs in which SmolLM2 takes too long."""

from pathlib import Path
from typing import Any

import torch

from tangram_plan.model_config import load_model_shape
from tangram_plan.profiles import save_profile
from tests.devices import make_device
from tests.small_plans import small_profile

VOCABULARY = 128
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SHARP = 1.6  # of the norms of queries and keys: attention looks at few tokens, so that it matters which are kept
PROFILE, DEVICE = "profile.npz", "device.json"  # beside the model


def write_tiny_qwen3(folder: Path) -> None:
    """Config, weights of the scale of trained ones, a profile in which the KV heads of every layer differ, and a GPU of few CTAs."""
    import transformers

    torch.manual_seed(0)
    architecture: Any = transformers.Qwen3ForCausalLM
    model = architecture(transformers.Qwen3Config(**SIZES))
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weights.fill_(SHARP)
            elif weights.dim() > 1:
                weights.normal_(std=weights.shape[-1] ** -0.5)
        model.lm_head.weight.mul_(3)
        model.model.embed_tokens.weight.normal_()
    model.save_pretrained(folder)
    shape, _ = load_model_shape(str(folder), relative_to=folder)
    save_profile(small_profile(shape), folder / PROFILE)
    (folder / DEVICE).write_text(make_device().model_dump_json())


def random_tokens(num_tokens: int, seed: int) -> list[int]:
    """A text in no language."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(VOCABULARY, (num_tokens,), generator=generator).tolist()
    return tokens
