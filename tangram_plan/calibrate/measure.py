"""One sample: prefill, repeat, score, and what each KV head keeps."""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tangram_plan.ir import MEAN_KEYS, KVHead, TangramError
from tangram_plan.profiles import FloatArray, Level, StatisticArray
from tangram_plan.runtime.scorers import ALWAYS_KEPT, LayerAttention, Phase, Scorer

from .model import LoadedModel, Prompt
from .observe import observed
from .retention import retained_fractions

if TYPE_CHECKING:
    from torch import Tensor

ScoreArray = npt.NDArray[np.float32]


class SampleRejectedError(Exception):
    """A sample's scores cannot be used; the text says which scorer, layer and head, and why."""


@dataclass(frozen=True)
class SampleResult:
    """What one sample says.

    Args:
        retained: per scorer and level, float64 [ratios, kv_heads].
        statistics: by the names of `ir.scorer_statistics`, means over the context: float32 [kv_heads, ...].
    """

    retained: dict[str, dict[Level, FloatArray]]
    statistics: dict[str, StatisticArray]


def measure_sample(
    loaded: LoadedModel, prompt: Prompt, scorers: Sequence[Scorer], ratios: tuple[float, ...]
) -> SampleResult:
    """Run a sample and pool its scores.

    Raises:
        SampleRejectedError: a KV head's scores are not finite, or all equal.
        TangramError: the model's attention cannot be observed.
    """
    scores, statistics = score_sample(loaded, prompt, scorers)
    kv_heads = tuple(loaded.shape.kv_heads())
    for scorer, values in scores.items():
        check_scores(values, kv_heads, scorer)
    retained = {
        scorer: {level: retained_fractions(values, kv_heads, ratios, level) for level in Level}
        for scorer, values in scores.items()
    }
    return SampleResult(retained, statistics)


def score_sample(
    loaded: LoadedModel, prompt: Prompt, scorers: Sequence[Scorer]
) -> tuple[dict[str, ScoreArray], dict[str, StatisticArray]]:
    """Scores of every planned KV head and context token, and statistics of the context.

    Returns:
        Per scorer float32 [kv_heads, tokens], and per statistic float32 [kv_heads, ...].

    Raises:
        TangramError: the model's attention cannot be observed.
    """
    import torch

    num_tokens = len(prompt.context)
    layers = loaded.shape.planned_layers
    scores: dict[tuple[str, int], Tensor] = {}
    mean_keys: dict[int, Tensor] = {}

    def score(attention: LayerAttention, phase: Phase) -> None:
        for scorer in scorers:
            if scorer.phase is phase:
                new = scorer.score(attention, num_tokens)
                old = scores.get((scorer.name, attention.layer))
                scores[scorer.name, attention.layer] = new if old is None else old.maximum(new)

    def prefill(attention: LayerAttention) -> None:
        mean_keys[attention.layer] = torch.nn.functional.normalize(attention.key.float(), dim=-1).mean(1)
        score(attention, Phase.PREFILL)

    def repeat(attention: LayerAttention) -> None:
        score(attention, Phase.REPEAT)

    def ids(tokens: tuple[int, ...]) -> "Tensor":
        return torch.tensor([tokens], device=loaded.device)

    decoder = loaded.model.base_model  # without the language-model head
    cache_name = name_of_cache(decoder)
    with torch.inference_mode():
        with observed(loaded.model, layers, prefill):
            cache = getattr(decoder(input_ids=ids(prompt.context), use_cache=True), cache_name)
        unseen = sorted(set(layers) - set(mean_keys))
        if unseen:
            raise TangramError(
                "cannot observe the attention of a layer",
                where=loaded.name,
                got=f"layer {unseen[0]}",
                expected="a model that uses transformers' AttentionInterface",
            )
        passes = prompt.repeats if any(scorer.phase is Phase.REPEAT for scorer in scorers) else ()
        with observed(loaded.model, layers, repeat):
            for index, tokens in enumerate(passes):
                context = cache if index == len(passes) - 1 else copy.deepcopy(cache)
                decoder(input_ids=ids(tokens), use_cache=True, **{cache_name: context})
    rows = {scorer.name: [scores[scorer.name, layer] for layer in layers] for scorer in scorers}
    return (
        {name: torch.cat(values).cpu().numpy() for name, values in rows.items()},
        {MEAN_KEYS: torch.cat([mean_keys[layer] for layer in layers]).cpu().numpy()},
    )


def name_of_cache(decoder: Any) -> str:
    """What this transformers release calls the KV cache, as an argument of forward and in its output."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"


def check_scores(scores: ScoreArray, kv_heads: tuple[KVHead, ...], scorer: str) -> None:
    """Raise a SampleRejectedError unless every KV head's scores, float32 [kv_heads, tokens], are finite and differ."""
    for kv_head, values in zip(kv_heads, scores, strict=True):
        where = f"{scorer} scores of layer {kv_head.layer}, head {kv_head.head}"
        if not np.isfinite(values).all():
            raise SampleRejectedError(f"{where} hold NaN or Inf")
        free = values[values < ALWAYS_KEPT]
        if free.size and (free == free[0]).all():
            raise SampleRejectedError(f"{where} are all equal, which no real attention is")
