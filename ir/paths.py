"""Paths as users write them."""

import contextlib
from pathlib import Path

from .errors import TangramError


def user_path(name: str, *, relative_to: Path, where: str) -> Path:
    """The path that a user's text names: `~` expanded, relative to a folder.

    Args:
        name: what the user wrote.
        relative_to: folder of relative paths.
        where: key or option, for the error.

    Raises:
        TangramError: no file can have this name.
    """
    try:
        path = relative_to / Path(name).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            path.stat()
    except (OSError, RuntimeError, ValueError) as error:  # too long; no such home directory; a null byte
        raise TangramError("not a path", where=where, got=name, expected=f"a path ({error})") from error
    return path
