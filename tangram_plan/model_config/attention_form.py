"""What the softmax of the planned layers computes: its scale, a cap on its logits, sinks."""

import math

from tangram_plan.ir import AttentionForm

from .decoder import Decoder

# Architectures that scale by a constant, whatever their config says (Gemma 3n on the hub has a query_pre_attn_scalar).
_CONSTANT_SCALE = {"gemma3n": 1.0, "gemma4": 1.0, "gemma4_unified": 1.0, "gpt_neo": 1.0}
_WITH_SINKS = {"gpt_oss", "granite_swa", "granitemoe_swa"}


def attention_form(decoder: Decoder, head_dim: int) -> AttentionForm:
    """How the layers with full attention turn scores into probabilities.

    Args:
        decoder: the config.
        head_dim: width of a head in those layers.

    Raises:
        TangramError: a value is absurd, or the scale differs between layers.
    """
    softcap = decoder.optional_number("attn_logit_softcapping")
    form = AttentionForm(_softmax_scale(decoder, head_dim), softcap, decoder.model_type in _WITH_SINKS)
    # 0.0883883476 in a config means 1 / sqrt(128): let both give one shape.
    return AttentionForm.plain(head_dim) if form.is_plain(head_dim) else form


def _softmax_scale(decoder: Decoder, head_dim: int) -> float:
    if decoder.model_type in _CONSTANT_SCALE:
        return _CONSTANT_SCALE[decoder.model_type]
    if decoder.config.get("scale_attn_by_inverse_layer_idx"):  # GPT-2
        raise decoder.refusal("a softmax scale for each layer is not supported", "scale_attn_by_inverse_layer_idx")
    if decoder.config.get("scale_attn_weights") is False:  # GPT-2, GPT-BigCode
        return 1.0
    if (scalar := decoder.optional_number("query_pre_attn_scalar")) is not None:  # Gemma
        return 1 / math.sqrt(scalar)
    multiplier = decoder.optional_number("attention_multiplier")  # Granite, HyperCLOVA X
    return AttentionForm.plain(head_dim).softmax_scale if multiplier is None else multiplier
