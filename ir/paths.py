"""Paths as users write them."""

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
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long; no such home directory; a null byte
        raise TangramError("not a path", where=where, got=name, expected=f"a path ({error})") from error
    return path
