"""Where a model's `config.json` is, and what it holds. No weights are read, and nothing is downloaded."""

import json
import os
import re
from pathlib import Path
from typing import Any

from tangram_plan.ir import TangramError, user_path


def load_model_config(model: str, *, relative_to: Path) -> tuple[dict[str, Any], Path]:
    """Read the `config.json` of a folder, of a path to the file, or of a hub id such as `org/name` in the local cache.

    No weights are read, and nothing is downloaded: a plan does not depend on the network.

    Args:
        model: what the user wrote.
        relative_to: the folder that a relative path starts from.

    Returns:
        The config, and the path of the file it was read from.

    Raises:
        TangramError: the file is missing, cannot be read, or does not hold a JSON object.
    """
    path = _config_path(model, relative_to)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TangramError("cannot read the model's config", where=str(path), got=error.strerror) from None
    except (ValueError, RecursionError) as error:
        raise TangramError("broken JSON in the model's config", where=str(path), got=error) from None
    if not isinstance(config, dict):
        raise TangramError("wrong config", where=str(path), got=type(config).__name__, expected="a JSON object")
    return config, path


def _config_path(model: str, relative_to: Path) -> Path:
    path = user_path(model, relative_to=relative_to, where="model")
    try:
        if path.is_file():
            return path
        if (path / "config.json").is_file():
            return path / "config.json"
        if path.is_dir():
            raise TangramError("no config.json in the model's folder", where=str(path))
    except OSError as error:
        raise TangramError("cannot open the model", where=repr(model), got=error.strerror) from None
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model) or model.endswith(".json"):
        raise TangramError(
            "no such model", where=str(path), expected="a folder with config.json, or a hub id like org/name"
        )
    if (cached := _cached_config(model)) is None:
        what = "no such folder, and no such model in the Hugging Face cache"
        fix = f"run `hf download {model} config.json` (of huggingface_hub), or give the folder that holds config.json"
        raise TangramError(what, where=str(path), fix=fix)
    return cached


def _cached_config(hub_id: str) -> Path | None:
    """The file in the local Hugging Face cache, whose layout is `models--org--name/snapshots/<revision>/`."""
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    repo = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser() / ("models--" + hub_id.replace("/", "--"))
    try:
        revision = (repo / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    path = repo / "snapshots" / revision / "config.json"
    return path if path.is_file() else None
