"""The artefact on disk: built beside its place, sealed by the manifest, and put there whole or not at all."""

import contextlib
import fcntl
import io
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from tangram_plan.codegen import emit
from tangram_plan.ir import (
    MANIFEST,
    REPORTS,
    STATISTICS_FILE,
    Plan,
    TangramError,
    artefact_strangers,
    plan_hash,
    print_json,
    print_plan,
    seal_artefact,
)
from tangram_plan.ir.manifest import PLAN
from tangram_plan.profiles import StatisticArray

NO_STATISTICS: Mapping[str, StatisticArray] = {}


def write_artefact(
    plan: Plan,
    reports: Mapping[str, Mapping[str, object]],
    output: Path,
    *,
    statistics: Mapping[str, StatisticArray] = NO_STATISTICS,
) -> None:
    """Write plan, allocator configuration, kernels, statistics, reports and, last, the manifest; replaces an artefact that is there.

    Args:
        plan: a verified plan.
        reports: file name without suffix -> content, for `OUT/reports`.
        output: the artefact's folder.
        statistics: what the plan's scorer needs: see `ir.scorer_statistics`.

    Raises:
        TangramError: something else is at `output`, or it cannot be written; `output` is then as it was.
    """
    output = Path(os.path.realpath(output))  # through a link: what it points to is replaced, the link stays
    check_place(output)
    with _staged(output) as staging:
        emit(plan, plan_hash(plan), staging)
        (staging / PLAN).write_text(print_plan(plan), encoding="utf-8")
        if statistics:
            (staging / STATISTICS_FILE).write_bytes(_npz(statistics))
        (staging / REPORTS).mkdir()
        for name, report in reports.items():
            (staging / REPORTS / f"{name}.json").write_text(print_json(report), encoding="utf-8")
        seal_artefact(staging, plan)
        _swap(staging, output)


def _npz(arrays: Mapping[str, StatisticArray]) -> bytes:
    """Equal arrays give equal bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **{name: arrays[name] for name in sorted(arrays)})
    return buffer.getvalue()


def check_place(output: Path) -> None:
    """Refuse to replace anything but an artefact with nothing of the user's in it.

    Raises:
        TangramError: something else is at `output`.
    """
    with _alone(output.parent):
        _check_place(output)


def _check_place(output: Path) -> None:
    if not os.path.lexists(output):  # unlike Path's, also False for names that are too long: writing says so
        return
    if not output.is_dir():
        raise TangramError("output is not a folder", where=str(output), fix="choose another place with -o")
    stranger = next(artefact_strangers(output), None)
    if stranger is not None:
        raise TangramError(
            "output holds files that are not part of an artefact",
            where=str(output),
            got=stranger,
            expected=f"an empty folder, or one whose {MANIFEST} names every file",
            fix="move them away, or choose another place with -o",
        )


@contextlib.contextmanager
def _staged(output: Path) -> Iterator[Path]:
    """A folder beside `output`, removed at the end whatever happens; faults of the file system become one line."""
    staging = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        staging.chmod(0o755)
        yield staging
    except OSError as error:
        place = error.filename or output
        raise TangramError(
            "artefact cannot be written",
            where=str(place),
            got=error.strerror or str(error),
            fix="free space or choose another place with -o; nothing was changed",
        ) from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def _swap(staging: Path, output: Path) -> None:
    """Put `staging` in the place of `output`; of concurrent builds of one output the last wins."""
    old = staging.with_name(staging.name + ".old")
    with _alone(output.parent):
        try:
            with contextlib.suppress(FileNotFoundError):
                output.rename(old)
            staging.rename(output)
        finally:  # also when interrupted between the two renames: what was there comes back
            if not output.exists():
                with contextlib.suppress(OSError):
                    old.rename(output)
            if output.exists():
                shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While other builds into this folder wait, so that none looks between the two renames of another; it may not exist yet."""
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):  # not there, or on a file system without locks
            handle = os.open(folder, os.O_RDONLY)
            opened.callback(os.close, handle)  # which gives the lock back, as the end of a process does
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
