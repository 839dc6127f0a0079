"""`profile show`: what a profile holds, and whether a static plan can be made of it."""

from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from tangram_plan.profiles import FloatArray, Level, Profile

from .budgets import held_out_overflow, mean_std
from .fitness import measure_fitness
from .terminal import new_table

PAPER_ALPHA = 2.0
SHADES = " .:-=+*#%@"


def profile_summary(profile: Profile) -> dict[str, Any]:
    """A profile as data; the answer of `profile show --json`.

    `levels.LEVEL.RATIO` holds `mean` and `std` [layers][kv_heads] over samples, `rank_correlation` (Spearman's, each
    sample against the mean of the others), `spread` (mean over heads of the standard deviation over samples) and `overflow`:
    the part of held-out (sample, KV head) pairs, and the number of KV heads, above the paper's budget mean + 2 std; null
    if all samples are of one context.
    """
    contexts = [sample.context for sample in profile.samples]
    levels: dict[str, Any] = {}
    for level, retained in profile.retained.items():
        levels[level.value] = {}
        for index, ratio in enumerate(profile.ratios):
            values = retained[:, index]
            fitness = measure_fitness(values)
            overflow = held_out_overflow(values, contexts, lambda training: mean_std(training, PAPER_ALPHA))
            levels[level.value][f"{ratio:g}"] = {
                "mean": profile.layer_table(values.mean(axis=0)),
                "std": profile.layer_table(values.std(axis=0)),
                "rank_correlation": {
                    "median": fitness.median,
                    "min": float(fitness.rank_correlations.min()),
                    "per_sample": fitness.rank_correlations.tolist(),
                },
                "verdict": fitness.verdict,
                "spread": float(values.std(axis=0).mean()),
                "overflow": overflow
                and {
                    "held_out_pairs": overflow.pairs,
                    "part": overflow.overflow,
                    "raw_part": overflow.raw_overflow,
                    "heads_that_overflow": int(np.count_nonzero(overflow.per_head)),
                },
            }
    return {
        "scorer": profile.scorer,
        "model": profile.model,
        "model_fingerprint": profile.model_fingerprint,
        "profile_hash": profile.hash,
        "layers": list(profile.layers),
        "num_kv_heads": len(profile.kv_heads),
        "ratios": list(profile.ratios),
        "samples": [{"source": s.source, "context": s.context, "num_tokens": s.num_tokens} for s in profile.samples],
        "statistics": {name: list(values.shape) for name, values in sorted(profile.statistics.items())},
        "levels": levels,
    }


def profile_tables(profile: Profile, level: Level | None, ratio: float | None) -> RenderableType:
    """A profile for a person: rank stability of all levels and ratios, and the heat map of one.

    Raises:
        TangramError: the level or ratio was not measured.
    """
    shown_level = level or next(iter(profile.retained))
    shown_ratio = ratio if ratio is not None else min(profile.ratios, key=lambda measured: abs(measured - 0.3))
    heat = profile.at_ratio(shown_level, shown_ratio)
    summary = profile_summary(profile)
    stability = new_table(
        "Rank stability between samples",
        "level",
        "ratio",
        "Spearman median",
        "min",
        "verdict",
        "spread per head",
        "held-out overflow at mean + 2 std",
        "heads that overflow",
    )
    for name, ratios in summary["levels"].items():
        for text, values in ratios.items():
            ranks, overflow = values["rank_correlation"], values["overflow"]
            stability.add_row(
                name,
                text,
                f"{ranks['median']:.3f}",
                f"{ranks['min']:.3f}",
                values["verdict"],
                f"{values['spread']:.3f}",
                f"{overflow['part']:.1%}" if overflow else "one context only",
                f"{overflow['heads_that_overflow']} of {summary['num_kv_heads']}" if overflow else "",
            )
    lengths = [sample.num_tokens for sample in profile.samples if sample.num_tokens]
    span = f" of {min(lengths):,} to {max(lengths):,} tokens" if lengths else ""
    headline = f"{profile.model} by {profile.scorer}: {len(profile.samples)} samples{span}, {len(profile.kv_heads)} KV heads in {len(profile.layers)} layers"
    return Group(
        Text(headline), Text(), stability, Text(), Text(_heat_map(profile, heat.mean(axis=0), shown_level, shown_ratio))
    )


def _heat_map(profile: Profile, means: FloatArray, level: Level, ratio: float) -> str:
    """One character per KV head, a line per layer; darker keeps more."""
    lines = [
        f"Retained fraction at {ratio:g}, level {level.value}: one row per layer, one column per KV head; '{SHADES}' from 0 to 1"
    ]
    for layer, values in zip(profile.layers, profile.layer_table(means), strict=True):
        shades = "".join(SHADES[min(len(SHADES) - 1, int(value * len(SHADES)))] * 2 for value in values)
        lines.append(f"{layer:5d} |{shades}| " + " ".join(f"{value:.2f}" for value in values))
    return "\n".join(lines)
