"""The manifest: the index of an artefact, written last. What it does not vouch for does not load.

OUT/manifest.json      this index: what the plan is bound to, and the SHA-256 of every file below
OUT/plan.json          the plan's text (`ir.text`)
OUT/allocator.json     what the serving engine's allocator needs
OUT/kernels/*.py       generated kernels
OUT/statistics.npz     what the scorer needs, if it needs anything (`ir.scorer_statistics`)
OUT/reports/           what depends on time or tool versions; not part of the artefact, not hashed
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import MismatchError, TangramError
from .plan import Plan
from .text import SCHEMA, parse_plan, plan_hash, print_json
from .verify import verify_plan

MANIFEST, PLAN, REPORTS = "manifest.json", "plan.json", "reports"
REPORT_FILES = ("build.json", "compile.json")  # what `build` and `verify` write there; all else is the user's


class Manifest(BaseModel):
    """What `manifest.json` holds.

    Args:
        schema_version: form of the plan's text.
        plan_hash: SHA-256 of the plan's text.
        model_type: architecture of the model.
        model_fingerprint: `ModelShape.fingerprint` of the model.
        head_order: `HeadOrder.hash` that the checkpoint must carry as `tangram_head_order`; empty for the original order.
        kv_dtype: element type of keys and values in the cache.
        head_dim: width of one head.
        tensor_parallel: ranks.
        device: device description that the partition was made for.
        files: relative path of every file but this one -> its SHA-256.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    schema_version: str
    plan_hash: str
    model_type: str
    model_fingerprint: str
    head_order: str
    kv_dtype: str
    head_dim: int
    tensor_parallel: int
    device: str
    files: dict[str, str]


def make_manifest(plan: Plan, files: dict[str, str]) -> Manifest:
    """The manifest of a plan whose artefact holds these files (relative path -> SHA-256)."""
    return Manifest(
        schema_version=SCHEMA,
        plan_hash=plan_hash(plan),
        model_type=plan.model.model_type,
        model_fingerprint=plan.model.fingerprint,
        head_order=plan.head_order.hash,
        kv_dtype=plan.layout.dtype.value,
        head_dim=plan.layout.head_dim,
        tensor_parallel=plan.tensor_parallel,
        device=plan.partition.device,
        files=files,
    )


def seal_artefact(directory: Path, plan: Plan) -> None:
    """Write the manifest over everything that lies in an artefact's directory: the last step of a build."""
    files = {path: _sha256(directory / path) for path in _artefact_files(directory)}
    (directory / MANIFEST).write_text(print_json(make_manifest(plan, files).model_dump()), encoding="utf-8")


def load_artefact(directory: Path) -> Plan:
    """The verified plan of an artefact, after checking every file of it.

    Raises:
        TangramError: no artefact, or an unreadable one.
        MismatchError: a file is missing, additional or changed, or manifest and plan do not belong together.
        VerifyError: the plan breaks an invariant.
    """
    manifest = _read_manifest(directory)
    present = _artefact_files(directory)
    for path in sorted({*manifest.files, *present}):
        if path not in present:
            raise MismatchError("file of the artefact is missing", where=f"{directory / path}", fix="build it again")
        if path not in manifest.files:
            raise MismatchError(
                "file does not belong to the artefact", where=f"{directory / path}", fix="remove it, or build it again"
            )
        if (digest := _sha256(directory / path)) != manifest.files[path]:
            raise MismatchError(
                "file was changed after the build",
                where=f"{directory / path}",
                got=digest[:12],
                expected=manifest.files[path][:12],
                fix="build it again",
            )
    if PLAN not in manifest.files:
        raise MismatchError("artefact has no plan", where=str(directory), expected=PLAN, fix="build it again")
    plan = parse_plan((directory / PLAN).read_text(encoding="utf-8"), where=str(directory / PLAN))
    expected = make_manifest(plan, manifest.files)
    for field in Manifest.model_fields:
        if getattr(manifest, field) != getattr(expected, field):
            raise MismatchError(
                f"manifest and plan differ in {field}",
                where=str(directory / MANIFEST),
                got=getattr(manifest, field),
                expected=str(getattr(expected, field)),
                fix="build it again",
            )
    verify_plan(plan)
    return plan


def artefact_strangers(directory: Path) -> Iterator[str]:
    """Relative paths of files in a directory that no build put there, found one by one."""
    try:
        known = {MANIFEST, *_read_manifest(directory).files, *(f"{REPORTS}/{name}" for name in REPORT_FILES)}
    except TangramError:
        known = set()  # no artefact: nothing here is ours, a folder called `reports` neither
    return (path for path in _files(directory) if path not in known and not (known and path.endswith(".pyc")))


def _read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TangramError(
            "not an artefact",
            where=str(directory),
            expected=f"a folder with {MANIFEST}",
            fix="make one with `tangram-plan build`",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise TangramError("manifest cannot be read", where=str(path), got=str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise TangramError(
            "manifest is damaged", where=str(path), got=f"{field} {first['msg']}".strip(), fix="build it again"
        ) from error


def _artefact_files(directory: Path) -> list[str]:
    """Relative paths of the files that a manifest vouches for."""
    return [
        path
        for path in sorted(_files(directory))
        if path != MANIFEST and not path.startswith(f"{REPORTS}/") and "__pycache__" not in path.split("/")
    ]


def _files(directory: Path) -> Iterator[str]:
    """Relative paths of all files below a directory, folder by folder."""
    for folder, folders, names in os.walk(directory):
        folders.sort()
        yield from (str(PurePosixPath(Path(folder, name).relative_to(directory))) for name in sorted(names))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
