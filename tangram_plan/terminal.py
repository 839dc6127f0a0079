"""Where output goes: data on stdout, logs and progress on stderr; tables without decoration when nobody looks at a terminal."""

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from tangram_plan.ir import TangramError

PLAIN_WIDTH = 1000  # columns when the output is not a terminal: nothing is cut, and blanks at line ends are removed


def err() -> Console:
    """Console for logs, progress and errors."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def log(message: str, *, quiet: bool) -> None:
    """One line on stderr."""
    if not quiet:
        err().print(message)


def print_data(data: Any) -> None:
    """JSON on stdout; numbers that JSON cannot hold (NaN, infinity) become null."""
    with _reader_may_stop():
        sys.stdout.write(json.dumps(_finite(data), indent=1, allow_nan=False) + "\n")


def print_tables(tables: RenderableType) -> None:
    """Tables on stdout."""
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else PLAIN_WIDTH, highlight=False, markup=False, emoji=False)
    with _reader_may_stop():
        if terminal:
            console.print(tables)
            return
        with console.capture() as captured:
            console.print(tables)
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def new_table(title: str, *columns: str) -> Table:
    """A table of numbers, right-justified but for its first column; plain lines outside a terminal."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD if sys.stdout.isatty() else box.ASCII2)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


@contextlib.contextmanager
def _reader_may_stop() -> Iterator[None]:
    """Whoever reads stdout may close it early (`| head`); that is no fault. A full disk is.

    Raises:
        TangramError: stdout cannot be written.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has nowhere to go
        if not isinstance(error, BrokenPipeError):
            raise TangramError("output cannot be written", where="stdout", got=error.strerror) from error


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data
