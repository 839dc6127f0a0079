"""Finished samples of a run that is not finished: one small file each, so that the run can go on where it stopped.

A file is named by a hash of everything that its numbers depend on, and appears whole or not at all. So runs that share
a folder share what they have in common, and never read each other's half-written or foreign results.
"""

import contextlib
import hashlib
import io
import json
import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tangram_plan.ir import TangramError
from tangram_plan.profiles import Level

from .measure import SampleResult

FOLDER = ".partial"
STATISTICS = "statistics"  # no scorer is called so


def sample_key(**settings: object) -> str:
    """Hash of JSON-like settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


class PartialResults:
    """Per-sample results under `output/.partial/`."""

    def __init__(self, output: Path) -> None:
        self._folder = output / FOLDER

    def load(self, key: str, scorers: tuple[str, ...]) -> SampleResult | None:
        """The result of a sample; None if there is none that can be read."""
        try:
            content = io.BytesIO((self._folder / f"{key}.npz").read_bytes())  # np.load leaves a broken file open
            with np.load(content, allow_pickle=False) as arrays:
                retained = {name: {level: arrays[f"{name}/{level}"] for level in Level} for name in scorers}
                prefix = f"{STATISTICS}/"
                statistics = {name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}
                return SampleResult(retained, statistics)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None

    def save(self, key: str, result: SampleResult) -> None:
        """Keep the result of a sample.

        Raises:
            TangramError: it cannot be written.
        """
        buffer = io.BytesIO()
        arrays: dict[str, npt.NDArray[np.floating]] = {
            f"{name}/{level}": values for name, levels in result.retained.items() for level, values in levels.items()
        }
        arrays |= {f"{STATISTICS}/{name}": values for name, values in result.statistics.items()}
        np.savez(buffer, allow_pickle=False, **arrays)
        try:
            self._write(key, buffer.getvalue())
        except OSError as error:
            raise TangramError(
                "cannot keep a sample's result",
                where=str(self._folder),
                got=error.strerror,
                fix="free space, or choose another output folder",
            ) from error

    def remove(self, keys: list[str]) -> None:
        """Delete results, and the folder when nothing is left in it."""
        for key in keys:
            (self._folder / f"{key}.npz").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _write(self, key: str, content: bytes) -> None:
        for attempt in range(3):
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                handle, name = tempfile.mkstemp(dir=self._folder, prefix=key, suffix=".tmp")
            except FileNotFoundError:  # another run has just finished and removed the folder
                if attempt == 2:
                    raise
                continue
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                Path(name).replace(self._folder / f"{key}.npz")
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
            return
