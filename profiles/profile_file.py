"""Profiles on disk: one `.npz` file per model and scorer, read without pickle, checked when it is opened.

header        JSON text: format, model, model_fingerprint, scorer, kv_heads [[layer, head]], ratios, samples, statistics [name]
retained_*    float64 [samples, ratios, kv_heads] for every level that was measured
statistics_*  float32 [kv_heads, ...] for every name in the header

Files of format 1 are read, too: their header names no statistics, and `mean_keys` may stand alone.
"""

import contextlib
import io
import os
from importlib import resources
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from tangram_plan.ir import MEAN_KEYS, KVHead, TangramError

from .profile import FloatArray, Level, Profile, Sample, StatisticArray

BUILTIN = "builtin:"
FORMAT, FORMAT_1 = "tangram-profile/2", "tangram-profile/1"
DEFAULT_SCORER = "kvzip"  # whose profile is meant when a folder is named


class _Header(BaseModel):
    """The JSON part of a profile file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: str
    model: str
    model_fingerprint: str
    scorer: str
    kv_heads: list[tuple[int, int]]
    ratios: list[float]
    samples: list[tuple[str, int, int]]
    statistics: list[str] = []


def find_profile(name: str, *, relative_to: Path = Path()) -> Path:
    """The file of a profile: `builtin:MODEL/SCORER`, a file, a file without its suffix, or a folder that holds `kvzip.npz`.

    Raises:
        TangramError: there is none.
    """
    if name.startswith(BUILTIN):
        shipped = Path(str(resources.files("tangram_plan.profiles"))) / "shipped"
        path = shipped / f"{name.removeprefix(BUILTIN)}.npz"
        if not path.is_file():
            available = ", ".join(
                BUILTIN + str(p.relative_to(shipped).with_suffix("")) for p in sorted(shipped.glob("*/*.npz"))
            )
            raise TangramError(
                "no such built-in profile", where="profile", got=name, expected=available or "none ships"
            )
        return path
    path = relative_to / os.path.expanduser(name)  # noqa: PTH111 - unlike Path's, leaves an unknown ~user alone
    for candidate in (str(path), f"{path}.npz", str(path / f"{DEFAULT_SCORER}.npz")):
        if os.path.isfile(candidate):  # noqa: PTH113 - unlike Path's, also False for names that are too long
            return Path(candidate)
    raise TangramError(
        "profile does not exist",
        where=str(path),
        expected="a profile file, or a folder written by `calibrate`",
        fix="make one with `tangram-plan calibrate` or `tangram-plan profile import`",
    )


def load_profile(path: Path) -> Profile:
    """Read and check a profile.

    Raises:
        TangramError: the file cannot be read, is not a profile, or holds values that no measurement gives.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            header = _Header.model_validate_json(str(arrays["header"]))
            retained = {level: arrays[f"retained_{level}"] for level in Level if f"retained_{level}" in arrays}
            statistics = {name: arrays[f"statistics_{name}"] for name in header.statistics}
            if header.format == FORMAT_1 and MEAN_KEYS in arrays:
                statistics[MEAN_KEYS] = arrays[MEAN_KEYS]
    except Exception as error:  # damaged files make numpy, zipfile, zlib and pydantic raise a dozen kinds
        raise TangramError(
            "not a profile file",
            where=str(path),
            got=str(error).partition("\n")[0] or type(error).__name__,
            expected=f"an .npz file of format {FORMAT}",
            fix="arrays of other tools come in by `tangram-plan profile import`",
        ) from error
    if header.format not in (FORMAT, FORMAT_1):
        raise TangramError("unknown profile format", where=str(path), got=header.format, expected=FORMAT)
    profile = Profile(
        model=header.model,
        model_fingerprint=header.model_fingerprint,
        scorer=header.scorer,
        kv_heads=tuple(KVHead(layer, head) for layer, head in header.kv_heads),
        ratios=tuple(header.ratios),
        samples=tuple(Sample(source, context, num_tokens) for source, context, num_tokens in header.samples),
        retained=retained,
        statistics=statistics,
    )
    check_profile(profile, where=str(path))
    return profile


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile; the file appears whole or not at all, and equal profiles give equal bytes.

    Raises:
        TangramError: the profile is not valid, or the file cannot be written.
    """
    check_profile(profile, where=str(path))
    if path.is_file():
        try:
            load_profile(path)
        except TangramError as error:
            raise TangramError(
                "a file that is no profile would be replaced", where=str(path), fix="choose another place with -o"
            ) from error
    header = _Header.model_validate(
        {"format": FORMAT, **profile._header(), "statistics": sorted(profile.statistics)},  # noqa: SLF001 - the file form of the same value
        strict=False,
    )
    buffer = io.BytesIO()
    arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = {
        "header": np.array(header.model_dump_json())
    }
    arrays |= {f"retained_{level}": profile.retained[level] for level in sorted(profile.retained)}
    arrays |= {f"statistics_{name}": profile.statistics[name] for name in sorted(profile.statistics)}
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(buffer.getvalue())
        partial.replace(path)
    except OSError as error:
        raise TangramError(
            "cannot write the profile", where=str(path), got=error.strerror, fix="free space, or choose another place"
        ) from error
    finally:  # also when interrupted
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def check_profile(profile: Profile, *, where: str) -> None:
    """Raise a TangramError unless every number of the profile can come from a measurement."""
    if not profile.samples or not profile.kv_heads or not profile.ratios or not profile.retained:
        raise TangramError("profile is empty", where=where, expected="at least one sample, ratio, KV head and level")
    if any(not 0 < ratio <= 1 for ratio in profile.ratios) or list(profile.ratios) != sorted(set(profile.ratios)):
        raise TangramError(
            "requested ratios are not valid",
            where=where,
            got=list(profile.ratios),
            expected="rising values above 0 and at most 1",
        )
    if list(profile.kv_heads) != sorted(set(profile.kv_heads)):
        raise TangramError(
            "KV heads are not in order", where=where, expected="each (layer, head) once, by layer, then by head"
        )
    shape = (len(profile.samples), len(profile.ratios), len(profile.kv_heads))
    for level, values in profile.retained.items():
        if values.shape != shape:
            raise TangramError(
                f"retained fractions of level {level} have the wrong shape",
                where=where,
                got=list(values.shape),
                expected=f"[samples, ratios, kv_heads] = {list(shape)}",
            )
        if values.dtype.kind != "f":
            raise TangramError(
                f"retained fractions of level {level} are not floating-point numbers", where=where, got=values.dtype
            )
        check_fractions(values, profile.kv_heads, where=f"{where}, level {level}")
        empty = np.argwhere(values.sum(axis=2) == 0)
        if len(empty):
            raise TangramError(
                f"sample {empty[0][0]} retains nothing",
                where=f"{where}, level {level}",
                expected="some tokens of some KV head",
                fix="drop that sample",
            )
    for name, statistic in profile.statistics.items():
        _check_statistic(statistic, shape[2], where=f"{where}, statistic {name}")


def _check_statistic(values: StatisticArray, num_kv_heads: int, *, where: str) -> None:
    if values.ndim < 1 or len(values) != num_kv_heads:
        raise TangramError(
            "statistic has the wrong shape", where=where, got=list(values.shape), expected=f"[{num_kv_heads}, ...]"
        )
    if values.dtype != np.float32 or not np.isfinite(values).all():
        raise TangramError(
            "statistic holds something else than finite numbers",
            where=where,
            got=values.dtype,
            expected="finite float32",
            fix="calibrate again",
        )


def check_fractions(values: FloatArray, kv_heads: tuple[KVHead, ...], *, where: str) -> None:
    """Raise a TangramError that names sample, layer and head of the first value outside [0, 1] (last axis: KV heads)."""
    bad = np.argwhere(~((values >= 0) & (values <= 1)))
    if len(bad):
        kv_head = kv_heads[bad[0][-1]]
        raise TangramError(
            f"retained fraction of sample {bad[0][0]}, layer {kv_head.layer}, head {kv_head.head} is not valid",
            where=where,
            got=values[tuple(bad[0])],
            expected="a number from 0 to 1",
            fix="drop that sample, or measure it again",
        )
