"""Scorers: one file each. To add one: write its file, and add an entry to SCORERS."""

from .base import ALWAYS_KEPT, LayerAttention, Phase, Scorer
from .kvzip import KVzip
from .snapkv import SnapKV

SCORERS: dict[str, Scorer] = {
    "kvzip": KVzip(),
    "snapkv": SnapKV(),
}

__all__ = ["ALWAYS_KEPT", "SCORERS", "KVzip", "LayerAttention", "Phase", "Scorer", "SnapKV"]
