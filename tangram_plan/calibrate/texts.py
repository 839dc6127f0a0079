"""Calibration texts: a JSON Lines file, one input a line, with the keys `text` and (optional) `source`; other keys are ignored."""

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tangram_plan.ir import TangramError

EXAMPLE = '{"source": "where it is from", "text": "..."}'


@dataclass(frozen=True)
class CalibrationText:
    """One input.

    Args:
        text: what the model reads.
        source: where it comes from.
        where: file and line, for messages.
    """

    text: str
    source: str
    where: str


def shipped_texts() -> Path:
    """The texts that the shipped profiles were measured on."""
    return Path(str(resources.files("tangram_plan.profiles"))) / "shipped" / "smollm2-135m-instruct" / "texts.jsonl"


def load_texts(path: Path) -> tuple[CalibrationText, ...]:
    """Read a texts file; blank lines are skipped.

    Raises:
        TangramError: the file cannot be read, holds nothing, or a line is not a JSON object with a text.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError as error:
        raise TangramError(
            "texts file does not exist", where=str(path), expected=f"JSON Lines such as {EXAMPLE}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise TangramError(
            "cannot read the texts", where=str(path), got=error, expected=f"UTF-8 JSON Lines such as {EXAMPLE}"
        ) from error
    texts = tuple(_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip())
    if not texts:
        raise TangramError("texts file is empty", where=str(path), expected=f"JSON Lines such as {EXAMPLE}")
    return texts


def _parse(line: str, where: str) -> CalibrationText:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise TangramError("line is not JSON", where=where, got=error, expected=EXAMPLE) from error
    text = entry.get("text") if isinstance(entry, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise TangramError("line has no text", where=where, got=line[:60], expected=EXAMPLE)
    return CalibrationText(text, str(entry.get("source", where)), where)
