"""Calibration: texts in, one profile per scorer out."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tangram_plan.ir import TangramError
from tangram_plan.profiles import Profile, Sample, save_profile
from tangram_plan.runtime.scorers import SCORERS, Scorer

from .measure import SampleRejectedError, SampleResult, measure_sample
from .model import LoadedModel, Prompt, build_prompt, load_model
from .partial import PartialResults, sample_key
from .texts import CalibrationText, load_texts, shipped_texts

RATIOS = (0.5, 0.3, 0.25, 0.1)
MIN_SAMPLES = 4
FORMAT = 2  # rises when the same input gives other numbers, or they are kept otherwise


def calibrate(
    model: str,
    output: Path,
    *,
    texts: Path | None = None,
    device: str = "cpu",
    max_tokens: int = 2048,
    scorers: tuple[str, ...] = ("kvzip", "snapkv"),
    ratios: tuple[float, ...] = RATIOS,
    min_samples: int = MIN_SAMPLES,
    name: str | None = None,
    console: Console | None = None,
) -> tuple[Path, ...]:
    """Measure what each KV head of a model keeps, and write `output/SCORER.npz` for every scorer.

    Each text is read inside the model's chat template. Retained fractions are of all tokens of a sample: those of the
    template before the text and attention sinks compete like the others. A run that is stopped goes on where it
    stopped when it is started again; finished samples lie in `output/.partial/` until the profiles are written.

    Args:
        model: a Hugging Face folder or id, a .gguf file, or a folder that holds one.
        output: folder of the profiles.
        texts: JSON Lines with `text` and `source`; None: the texts that ship.
        device: where the model runs, as torch names it.
        max_tokens: longest sample, template included; longer texts are cut.
        scorers: names from `SCORERS`.
        ratios: retention ratios to measure.
        min_samples: fewest samples that make a profile.
        name: what the profiles call the model; None: its id, or the name of its folder or file.
        console: where progress and warnings go; None: stderr.

    Returns:
        The files written, in the order of `scorers`.

    Raises:
        TangramError: an argument, the model or a text cannot be used, or too few samples are left.
    """
    console = console or Console(stderr=True)
    if output.exists() and not output.is_dir():
        raise TangramError("output is not a folder", where=str(output), fix="choose another place with -o")
    chosen = _choose(scorers)
    rising = _check_ratios(ratios)
    inputs = load_texts(texts or shipped_texts())
    _check_num_samples(len(inputs), min_samples, where=str(texts or shipped_texts()))
    loaded = load_model(model, device=device, name=name)
    prompts = [build_prompt(loaded, text, max_tokens) for text in inputs]

    partial = PartialResults(output)
    keys = [_key(loaded, prompt, chosen, rising) for prompt in prompts]
    results: dict[int, SampleResult] = {}
    with _progress(console) as progress:
        for index, key in enumerate(progress.track(keys, description="calibrating")):
            try:
                result = partial.load(key, scorers) or measure_sample(loaded, prompts[index], chosen, rising)
                partial.save(key, result)
                results[index] = result
            except SampleRejectedError as error:
                warning = f"sample {index} ({inputs[index].where}, {inputs[index].source}) is rejected: {error}"
                _say(progress.console, f"warning: {warning}")
            except KeyboardInterrupt:
                _say(
                    progress.console,
                    f"stopped after {index} of {len(keys)} samples; the same command goes on from there",
                )
                raise
    _check_num_samples(len(results), min_samples, where=f"{len(inputs) - len(results)} samples rejected")

    paths = tuple(output / f"{scorer.name}.npz" for scorer in chosen)
    samples = _samples(inputs, prompts, list(results))
    for scorer, path in zip(chosen, paths, strict=True):
        save_profile(_profile(loaded, scorer, rising, samples, list(results.values())), path)
    partial.remove(keys)
    return paths


def _choose(scorers: tuple[str, ...]) -> tuple[Scorer, ...]:
    unknown = [scorer for scorer in scorers if scorer not in SCORERS]
    if unknown or not scorers:
        got = ", ".join(unknown) or "none"
        raise TangramError("no such scorer", where="scorers", got=got, expected=", ".join(SCORERS))
    return tuple(SCORERS[scorer] for scorer in dict.fromkeys(scorers))


def _check_ratios(ratios: tuple[float, ...]) -> tuple[float, ...]:
    if not ratios or any(not 0 < ratio <= 1 for ratio in ratios):
        raise TangramError(
            "ratios are not valid", where="ratios", got=list(ratios), expected="values above 0 and at most 1"
        )
    return tuple(sorted(set(ratios)))


def _check_num_samples(num_samples: int, min_samples: int, *, where: str) -> None:
    if num_samples < max(1, min_samples):
        raise TangramError(
            "too few samples for a profile",
            where=where,
            got=num_samples,
            expected=f"at least {max(1, min_samples)}",
            fix="add texts of other kinds",
        )


def _key(loaded: LoadedModel, prompt: Prompt, scorers: Sequence[Scorer], ratios: tuple[float, ...]) -> str:
    import torch
    import transformers

    return sample_key(
        format=FORMAT,
        model=[loaded.shape.fingerprint, loaded.weights],
        prompt=[prompt.context, prompt.repeats],
        scorers=[repr(scorer) for scorer in scorers],
        ratios=ratios,
        environment=[loaded.device, torch.__version__, transformers.__version__],
    )


def _samples(inputs: Sequence[CalibrationText], prompts: Sequence[Prompt], kept: list[int]) -> tuple[Sample, ...]:
    contexts: dict[tuple[int, ...], int] = {}
    for index in kept:
        contexts.setdefault(prompts[index].context, len(contexts))
    return tuple(Sample(inputs[i].source, contexts[prompts[i].context], len(prompts[i].context)) for i in kept)


def _profile(
    loaded: LoadedModel,
    scorer: Scorer,
    ratios: tuple[float, ...],
    samples: tuple[Sample, ...],
    results: Sequence[SampleResult],
) -> Profile:
    levels = results[0].retained[scorer.name]
    statistics = {
        name: np.mean([result.statistics[name].astype(np.float64) for result in results], axis=0).astype(np.float32)
        for name in results[0].statistics
    }
    return Profile(
        model=loaded.name,
        model_fingerprint=loaded.shape.fingerprint,
        scorer=scorer.name,
        kv_heads=tuple(loaded.shape.kv_heads()),
        ratios=ratios,
        samples=samples,
        retained={level: np.stack([result.retained[scorer.name][level] for result in results]) for level in levels},
        statistics=statistics,
    )


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console)
