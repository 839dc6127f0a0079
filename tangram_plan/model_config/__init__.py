"""From a model's `config.json`, and nothing else, to its `ModelShape`. A layout that is not known is refused by name.

Configs spell one thing in many ways; each question ("how many KV heads has a layer?") is answered by one function here, and
answered alike for the file on the hub, for what transformers writes back and for what it reads out of a GGUF file.
"""

from .files import load_model_config
from .shape import load_model_shape, model_shape_from_config

__all__ = ["load_model_config", "load_model_shape", "model_shape_from_config"]
