"""Let scorers watch the attention of any Hugging Face causal LM, through transformers' own registry of attention functions.

No model code is patched: a function of ours is registered under a name of its own, the model is told to use it, and
both are undone at the end. Models that do not go through the registry show nothing; `calibrate` then says so.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from tangram_plan.runtime.scorers import LayerAttention

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Observer = Callable[[LayerAttention], None]

IMPLEMENTATION = "tangram_observed"  # our name in transformers' registries


@contextmanager
def observed(model: "torch.nn.Module", layers: Collection[int], observer: Observer) -> Iterator[None]:
    """Within the context, call `observer` with the attention of each of `layers` in every forward pass of `model`.

    The passes must be of one sequence without padding. The model's output stays what it was. One model at a time.
    """
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    hf_model, functions = cast(Any, model), cast(dict[str, Any], ALL_ATTENTION_FUNCTIONS)
    sdpa = functions["sdpa"]

    def attention(
        module: Any,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        attention_mask: "Tensor | None",
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: "Tensor | None" = None,
        **kwargs: Any,
    ) -> "tuple[Tensor, None]":
        assert attention_mask is not None or query.shape[2] in (1, key.shape[2]), "sdpa would misplace the queries"
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        layer = getattr(module, "layer_idx", None)
        if layer is not None and layer in layers:
            observer(LayerAttention(layer, query[0], key[0], value[0], factor, softcap, s_aux))
        if softcap is None and s_aux is None:
            output, _ = sdpa(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
            return output, None
        # sdpa knows neither soft caps nor sinks
        own = LayerAttention(-1, query[0], key[0], value[0], factor, softcap, s_aux)
        return _attend(own, attention_mask), None

    assert IMPLEMENTATION not in functions, "another model is being observed"
    before = hf_model.config._attn_implementation  # noqa: SLF001 - the only way to read it
    AttentionMaskInterface.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    functions[IMPLEMENTATION] = attention
    try:
        hf_model.set_attn_implementation(IMPLEMENTATION)
        yield
    finally:
        hf_model.set_attn_implementation(before)
        del functions[IMPLEMENTATION]


def _attend(attention: LayerAttention, mask: "Tensor | None") -> "Tensor":
    """Output of one layer, [1, num_queries, num_q_heads, value_dim], a bounded block of queries at a time."""
    import torch

    value = attention.value.unsqueeze(1)
    blocks = [block.to(value.dtype) @ value for block in attention.probabilities(mask=mask)]
    return torch.cat(blocks, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0)
