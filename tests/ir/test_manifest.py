import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tangram_plan.ir import (
    MANIFEST,
    HeadOrder,
    Manifest,
    MismatchError,
    Plan,
    TangramError,
    VerifyError,
    artefact_strangers,
    load_artefact,
    plan_hash,
    print_plan,
    seal_artefact,
)
from tests.small_plans import SHAPE, hand_plan

PLAN_FILE, KERNEL = "plan.json", "kernels/decode.py"


def seal(folder: Path, plan: Plan | None = None) -> Path:
    """The smallest artefact: a plan and something that stands for a kernel."""
    (folder / "kernels").mkdir(parents=True)
    (folder / PLAN_FILE).write_text(print_plan(plan or hand_plan()))
    (folder / KERNEL).write_text("KERNEL = 1\n")
    seal_artefact(folder, plan or hand_plan())
    return folder


def refusal(folder: Path, kind: type[TangramError] = TangramError) -> str:
    with pytest.raises(kind) as error:
        load_artefact(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


# --- sealed and loaded


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_sealed_artefact_gives_its_plan_back(tmp_path: Path, tensor_parallel: int) -> None:
    plan = hand_plan(tensor_parallel)
    assert load_artefact(seal(tmp_path / "plan", plan)) == plan


def test_the_manifest_says_what_the_plan_is_bound_to(tmp_path: Path) -> None:
    order = HeadOrder({0: (1, 0)})
    manifest = json.loads((seal(tmp_path / "plan", replace(hand_plan(2), head_order=order)) / MANIFEST).read_text())
    files = manifest.pop("files")
    assert manifest == {
        "schema_version": "tangram-plan/2",
        "plan_hash": plan_hash(replace(hand_plan(2), head_order=order)),
        "model_type": "hand",
        "model_fingerprint": SHAPE.fingerprint,
        "head_order": order.hash,
        "kv_dtype": "bfloat16",
        "head_dim": 8,
        "tensor_parallel": 2,
        "device": "hand",
    }
    assert list(files) == [KERNEL, PLAN_FILE]
    assert files[KERNEL] == hashlib.sha256(b"KERNEL = 1\n").hexdigest()


def test_reports_and_byte_code_may_come_and_go(tmp_path: Path) -> None:
    folder = seal(tmp_path / "plan")
    for name in ("reports/compile.json", "kernels/__pycache__/decode.cpython-311.pyc"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("x")
    assert load_artefact(folder) == hand_plan()


# --- files that changed


@pytest.mark.parametrize("name", [PLAN_FILE, KERNEL])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = seal(tmp_path / "plan")
    (folder / name).unlink()
    assert f"{folder / name}: file of the artefact is missing" in refusal(folder, MismatchError)


@pytest.mark.parametrize("name", ["kernels/other.py", "notes.txt", "kernels/reports/x", "my__pycache__.py"])
def test_an_additional_file_is_named(tmp_path: Path, name: str) -> None:
    folder = seal(tmp_path / "plan")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x")
    assert f"{folder / name}: file does not belong to the artefact" in refusal(folder, MismatchError)


@pytest.mark.parametrize("name", [PLAN_FILE, KERNEL])
def test_a_changed_file_is_named(tmp_path: Path, name: str) -> None:
    folder = seal(tmp_path / "plan")
    (folder / name).write_bytes((folder / name).read_bytes() + b" ")
    assert f"{folder / name}: file was changed after the build: got " in refusal(folder, MismatchError)


def test_a_plan_of_another_artefact_is_refused(tmp_path: Path) -> None:
    one, two = seal(tmp_path / "one"), seal(tmp_path / "two", replace(hand_plan(), max_new_tokens=7))
    shutil.copy(two / PLAN_FILE, one / PLAN_FILE)
    assert f"{one / PLAN_FILE}: file was changed" in refusal(one, MismatchError)
    edit(one, lambda manifest: manifest["files"].update(json.loads((two / MANIFEST).read_text())["files"]))
    assert "manifest and plan differ in plan_hash" in refusal(one, MismatchError)


def test_a_manifest_of_another_artefact_is_refused(tmp_path: Path) -> None:
    one, two = seal(tmp_path / "one"), seal(tmp_path / "two", replace(hand_plan(), max_new_tokens=7))
    shutil.copy(two / MANIFEST, one / MANIFEST)
    assert f"{one / PLAN_FILE}: file was changed" in refusal(one, MismatchError)


# --- a manifest that changed


@pytest.mark.parametrize("field", [field for field in Manifest.model_fields if field != "files"])
def test_an_edited_field_of_the_manifest_is_named(tmp_path: Path, field: str) -> None:
    folder = seal(tmp_path / "plan")
    edit(folder, lambda manifest: manifest.update({field: 99 if isinstance(manifest[field], int) else "other"}))
    message = refusal(folder, MismatchError)
    assert f"manifest and plan differ in {field}: got " in message
    assert MANIFEST in message


def change_file(manifest: dict[str, Any]) -> None:
    manifest["files"][KERNEL] = "0" * 64


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda manifest: manifest.update(surprise=1), (MANIFEST, "surprise")),
        (lambda manifest: manifest.pop("device"), (MANIFEST, "device")),
        (lambda manifest: manifest.update(head_dim="8"), (MANIFEST, "head_dim")),
        (lambda manifest: manifest["files"].pop(KERNEL), (KERNEL, "does not belong")),
        (lambda manifest: manifest["files"].update(more="0"), ("more", "missing")),
        (change_file, (KERNEL, "changed", "expected 000000000000")),
        (lambda manifest: manifest.clear(), (MANIFEST, "damaged")),
    ],
    ids=["unknown field", "missing field", "wrong type", "file forgotten", "file invented", "hash edited", "empty"],
)
def test_an_edited_manifest_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], parts: tuple[str, ...]
) -> None:
    folder = seal(tmp_path / "plan")
    edit(folder, change)
    message = refusal(folder)
    for part in parts:
        assert part in message


def test_every_cut_of_a_manifest_is_refused(tmp_path: Path) -> None:
    folder = seal(tmp_path / "plan")
    text = (folder / MANIFEST).read_bytes()
    for length in range(len(text.rstrip())):
        (folder / MANIFEST).write_bytes(text[:length])
        assert f"{folder / MANIFEST}: manifest is damaged" in refusal(folder)


def test_a_manifest_that_is_not_text_is_refused(tmp_path: Path) -> None:
    folder = seal(tmp_path / "plan")
    (folder / MANIFEST).write_bytes(b"\xff\xfe")
    assert f"{folder / MANIFEST}: manifest cannot be read" in refusal(folder)


def test_an_artefact_without_plan_is_refused(tmp_path: Path) -> None:
    seal_artefact(tmp_path, hand_plan())
    assert "artefact has no plan" in refusal(tmp_path, MismatchError)


@pytest.mark.parametrize("make", [Path.exists, Path.mkdir, Path.touch])
def test_what_is_no_artefact_is_refused(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "plan")
    assert str(tmp_path / "plan") in refusal(tmp_path / "plan")


def test_a_sealed_plan_that_is_not_valid_does_not_load(tmp_path: Path) -> None:
    plan = hand_plan()
    plan = replace(plan, grouping=replace(plan.grouping, groups=plan.grouping.groups[:2]))
    assert "KV head (layer 2, head 0) lacks a group" in refusal(seal(tmp_path / "plan", plan), VerifyError)


# --- strangers: what a build may not replace


def test_an_artefact_holds_no_strangers(tmp_path: Path) -> None:
    folder = seal(tmp_path / "plan")
    (folder / "reports").mkdir()
    (folder / "reports" / "build.json").write_text("{}")
    assert list(artefact_strangers(folder)) == []


def test_a_file_that_no_build_put_there_is_a_stranger(tmp_path: Path) -> None:
    folder = seal(tmp_path / "plan")
    (folder / "thesis.tex").write_text("x")
    assert list(artefact_strangers(folder)) == ["thesis.tex"]


@pytest.mark.parametrize("name", ["thesis.tex", "reports/thesis.tex", "__pycache__/thesis.pyc", MANIFEST])
def test_without_a_manifest_everything_is_a_stranger(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x")
    assert list(artefact_strangers(tmp_path)) == [name]
