import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tangram_plan.artefact import write_artefact
from tangram_plan.ir import KVDtype, TangramError, load_artefact
from tests.small_plans import hand_plan, write_often

REPORTS = {"build": {"seconds": 1.5}}
OLD = replace(hand_plan(), max_new_tokens=7)
NEW = replace(hand_plan(), layout=replace(hand_plan().layout, dtype=KVDtype.FLOAT16))  # with other kernels
FULL_DISK = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
STEPS = ("write_text", "write_bytes", "mkdir", "chmod", "rename", "read_bytes")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(output: Path) -> str:
    with pytest.raises(TangramError) as error:
        write_artefact(NEW, REPORTS, output)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- written


def test_an_artefact_is_written_whole(tmp_path: Path) -> None:
    write_artefact(NEW, REPORTS, tmp_path / "deep" / "plan")
    assert load_artefact(tmp_path / "deep" / "plan") == NEW
    names = set(contents(tmp_path / "deep" / "plan"))
    assert {"manifest.json", "plan.json", "allocator.json", "kernels/head_tables.py", "reports/build.json"} <= names
    assert os.listdir(tmp_path / "deep") == ["plan"]  # noqa: PTH208 - hidden leftovers, too
    assert (tmp_path / "deep" / "plan").stat().st_mode & 0o777 == 0o755


def test_an_artefact_replaces_another_with_all_its_files(tmp_path: Path) -> None:
    write_artefact(OLD, {"build": {}, "compile": {}}, tmp_path / "plan")
    write_artefact(NEW, REPORTS, tmp_path / "plan")
    write_artefact(NEW, REPORTS, tmp_path / "fresh")
    assert contents(tmp_path / "plan") == contents(tmp_path / "fresh")
    assert sorted(os.listdir(tmp_path)) == ["fresh", "plan"]  # noqa: PTH208


def test_a_users_file_among_the_reports_is_never_replaced(tmp_path: Path) -> None:
    write_artefact(OLD, REPORTS, tmp_path / "plan")
    (tmp_path / "plan" / "reports" / "thesis.tex").write_text("mine", encoding="utf-8")
    with pytest.raises(TangramError, match=r"got reports/thesis\.tex"):
        write_artefact(NEW, REPORTS, tmp_path / "plan")
    assert load_artefact(tmp_path / "plan") == OLD
    assert (tmp_path / "plan" / "reports" / "thesis.tex").read_text(encoding="utf-8") == "mine"


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    write_artefact(NEW, REPORTS, tmp_path / "plan")
    assert load_artefact(tmp_path / "plan") == NEW


def test_a_link_keeps_pointing_to_the_folder_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    write_artefact(OLD, REPORTS, tmp_path / "disk" / "plan")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "plan")
    write_artefact(NEW, REPORTS, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert load_artefact(tmp_path / "disk" / "plan") == NEW
    assert sorted(os.listdir(tmp_path)) == ["disk", "link"]  # noqa: PTH208
    assert os.listdir(tmp_path / "disk") == ["plan"]  # noqa: PTH208


# --- refused


@pytest.mark.parametrize("stranger", ["thesis.tex", "src/main.py", "reports/thesis.tex", "manifest.json"])
def test_a_folder_with_files_of_the_user_is_left_alone(tmp_path: Path, stranger: str) -> None:
    (tmp_path / "plan" / stranger).parent.mkdir(parents=True)
    (tmp_path / "plan" / stranger).write_text("dear")
    message = refusal(tmp_path / "plan")
    assert f"{tmp_path / 'plan'}: output holds files that are not part of an artefact: got {stranger}" in message
    assert contents(tmp_path / "plan") == {stranger: b"dear"}
    assert os.listdir(tmp_path) == ["plan"]  # noqa: PTH208


def test_an_artefact_with_a_file_of_the_user_is_left_alone(tmp_path: Path) -> None:
    write_artefact(OLD, REPORTS, tmp_path / "plan")
    (tmp_path / "plan" / "kernels" / "mine.py").write_text("dear")
    (tmp_path / "plan" / "notes.txt").write_text("dear")
    before = contents(tmp_path / "plan")
    assert "got notes.txt" in refusal(tmp_path / "plan")
    assert contents(tmp_path / "plan") == before


def test_a_file_in_the_place_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "plan").write_text("dear")
    assert f"{tmp_path / 'plan'}: output is not a folder" in refusal(tmp_path / "plan")
    assert f"{tmp_path / 'plan'}: artefact cannot be written" in refusal(tmp_path / "plan" / "inner")
    assert (tmp_path / "plan").read_text() == "dear"


def test_a_place_that_cannot_be_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert f"{tmp_path / 'loop'}: output is not a folder" in refusal(tmp_path / "loop")
    assert "artefact cannot be written: got File name too long" in refusal(tmp_path / ("x" * 300))
    assert os.listdir(tmp_path) == ["loop"]  # noqa: PTH208


# --- a disk that is full, a build that is stopped


class Fault:
    """Counts the file operations of a build, and fails one of them, before or after it is done."""

    def __init__(self, at: int, fault: BaseException, *, after: bool = False) -> None:
        self.at, self.fault, self.after, self.calls = at, fault, after, 0

    @contextmanager
    def active(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        with patch.context() as context:
            for place, name in [*((Path, step) for step in STEPS), (tempfile, "mkdtemp")]:
                context.setattr(place, name, self._wrap(getattr(place, name), before_only=name == "mkdtemp"))
            yield

    def _wrap(self, operation: Any, *, before_only: bool) -> Any:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls - 1 != self.at:
                return operation(*arguments, **options)
            try:
                if self.after and not before_only:
                    operation(*arguments, **options)
            finally:
                raise self.fault

        return wrapped


def num_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    count = Fault(-1, FULL_DISK)
    with count.active(monkeypatch):
        write_artefact(NEW, REPORTS, tmp_path / "counted")
    shutil.rmtree(tmp_path / "counted")
    assert count.calls > 10
    return count.calls


@pytest.mark.parametrize("replaces", [True, False], ids=["over an old one", "from nothing"])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool) -> None:
    folder = tmp_path / "place"
    folder.mkdir()
    steps = num_steps(tmp_path, monkeypatch)
    if replaces:
        write_artefact(OLD, REPORTS, folder / "plan")
    before = contents(folder)
    for step in range(steps):
        with Fault(step, FULL_DISK).active(monkeypatch):
            message = refusal(folder / "plan")
        assert "artefact cannot be written: got No space left on device" in message, f"step {step}"
        assert contents(folder) == before, f"step {step}"
        assert os.listdir(folder) == (["plan"] if replaces else [])  # noqa: PTH208
    if replaces:
        assert load_artefact(folder / "plan") == OLD


@pytest.mark.parametrize("replaces", [True, False], ids=["over an old one", "from nothing"])
@pytest.mark.parametrize("after", [True, False], ids=["after the step", "before the step"])
def test_an_interrupted_build_leaves_the_old_artefact_the_new_one_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool, after: bool
) -> None:
    steps = num_steps(tmp_path, monkeypatch)
    for step in range(steps):
        folder = tmp_path / f"{step}"
        folder.mkdir()
        if replaces:
            write_artefact(OLD, REPORTS, folder / "plan")
        with Fault(step, KeyboardInterrupt(), after=after).active(monkeypatch), pytest.raises(KeyboardInterrupt):
            write_artefact(NEW, REPORTS, folder / "plan")
        names = os.listdir(folder)  # noqa: PTH208
        assert names in ([["plan"]] if replaces else [[], ["plan"]]), f"step {step}"
        for name in names:
            assert load_artefact(folder / name) in (OLD, NEW), f"step {step}"


# --- two at once


def test_builds_of_one_output_at_once_leave_one_valid_artefact(tmp_path: Path) -> None:
    output = tmp_path / "place" / "plan"
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        runs = [pool.submit(write_often, plan, output, 15) for plan in (OLD, NEW)]
        assert [run.result(timeout=120) for run in runs] == [15, 15]
    assert load_artefact(output) in (OLD, NEW)
    assert os.listdir(output.parent) == ["plan"]  # noqa: PTH208
