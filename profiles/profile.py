"""A profile: what fraction of its history each KV head kept, sample by sample, under one scorer."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tangram_plan.ir import KVHead, TangramError

FloatArray = npt.NDArray[np.float64]
StatisticArray = npt.NDArray[np.float32]


class Level(StrEnum):
    """Scope over which a scorer's top-k was pooled when retention was measured."""

    MODEL = "model"  # one budget for all KV heads of the model
    LAYER = "layer"  # one budget for the KV heads of each layer


@dataclass(frozen=True)
class Sample:
    """One calibration input.

    Args:
        source: where its text comes from.
        context: id of the context; equal for samples that measured the same one.
        num_tokens: its length, in tokens; 0 if not known.
    """

    source: str
    context: int
    num_tokens: int


@dataclass(frozen=True)
class Profile:
    """Retention of one model under one scorer.

    Args:
        model: name of the model.
        model_fingerprint: `ModelShape.fingerprint` of the model.
        scorer: the scorer whose pooled top-k was measured.
        kv_heads: the KV heads that were measured, by layer, then by head; the last axis of `retained`.
        ratios: requested retention ratios, rising.
        samples: the calibration inputs.
        retained: per level, float64 [samples, ratios, kv_heads] in [0, 1]: retained fraction of the tokens that competed.
        statistics: what serving scorers may need of the model, by the names of `ir.scorer_statistics`: float32 [kv_heads, ...].
    """

    model: str
    model_fingerprint: str
    scorer: str
    kv_heads: tuple[KVHead, ...]
    ratios: tuple[float, ...]
    samples: tuple[Sample, ...]
    retained: Mapping[Level, FloatArray]
    statistics: Mapping[str, StatisticArray] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that were measured."""
        return tuple(dict.fromkeys(kv_head.layer for kv_head in self.kv_heads))

    @property
    def hash(self) -> str:
        """Hash of the content, whatever the file's compression."""
        digest = hashlib.sha256(json.dumps(self._header(), sort_keys=True).encode())
        for level in sorted(self.retained):
            digest.update(level.encode() + np.ascontiguousarray(self.retained[level], dtype="<f8").tobytes())
        for name, values in sorted(self.statistics.items()):
            digest.update(f"{name}{values.shape}".encode() + np.ascontiguousarray(values, dtype="<f4").tobytes())
        return digest.hexdigest()

    def at_ratio(self, level: Level, ratio: float) -> FloatArray:
        """Retained fractions at one requested ratio, linear between the two measured ratios around it.

        Returns:
            float64 [samples, kv_heads].

        Raises:
            TangramError: the level was not measured, or the ratio lies outside the measured range.
        """
        if level not in self.retained:
            raise TangramError(
                "retention level is not in the profile",
                where=f"profile of {self.model}",
                got=level.value,
                expected=" or ".join(sorted(self.retained)),
                fix="set retention.level to one that was measured",
            )
        measured = np.asarray(self.ratios)
        if not measured[0] <= ratio <= measured[-1]:
            span = f"{measured[0]:g}" if len(measured) == 1 else f"{measured[0]:g} to {measured[-1]:g}"
            raise TangramError(
                "retention ratio was not measured",
                where=f"profile of {self.model}",
                got=f"{ratio:g}",
                expected=span,
                fix="set retention.ratio inside that range, or calibrate at this ratio",
            )
        upper = int(np.searchsorted(measured, ratio))
        if measured[upper] == ratio:
            return self.retained[level][:, upper]
        below, above = self.retained[level][:, upper - 1], self.retained[level][:, upper]
        part = float((ratio - measured[upper - 1]) / (measured[upper] - measured[upper - 1]))
        between: FloatArray = (1 - part) * below + part * above
        return between

    def layer_table(self, values: FloatArray) -> list[list[float]]:
        """One value per KV head, float64 [kv_heads], as a list per layer."""
        table: dict[int, list[float]] = {layer: [] for layer in self.layers}
        for kv_head, value in zip(self.kv_heads, values.tolist(), strict=True):
            table[kv_head.layer].append(value)
        return list(table.values())

    def _header(self) -> dict[str, object]:
        return {
            "model": self.model,
            "model_fingerprint": self.model_fingerprint,
            "scorer": self.scorer,
            "kv_heads": [list(kv_head) for kv_head in self.kv_heads],
            "ratios": list(self.ratios),
            "samples": [[sample.source, sample.context, sample.num_tokens] for sample in self.samples],
        }
