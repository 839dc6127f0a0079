"""Calibration: run a model over texts and write profiles."""

from .measure import SampleRejectedError, SampleResult, measure_sample, score_sample
from .model import LoadedModel, Prompt, build_prompt, load_model
from .observe import observed
from .retention import retained_fractions
from .run import MIN_SAMPLES, RATIOS, calibrate
from .texts import CalibrationText, load_texts, shipped_texts

__all__ = [
    "MIN_SAMPLES",
    "RATIOS",
    "CalibrationText",
    "LoadedModel",
    "Prompt",
    "SampleRejectedError",
    "SampleResult",
    "build_prompt",
    "calibrate",
    "load_model",
    "load_texts",
    "measure_sample",
    "observed",
    "retained_fractions",
    "score_sample",
    "shipped_texts",
]
