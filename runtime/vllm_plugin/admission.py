"""Refuses, before it reaches the engine, a request whose answer may be longer than the plan admits.

A request that states no length is cut to the plan's, by the server's default and in the end by the scheduler. One that states a
larger length is refused, wherever it comes from:

    `AtMost128Tokens` (any number)   a logits processor in name only: vLLM asks each for its view on a request's parameters at admission
    `AnswerLimit`                    ASGI middleware: by then the server has lowered what the request stated, so this reads the request
"""

import json
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from typing import Any

from tangram_plan.ir import TangramError

from . import PLAN_KEY
from .compat import HTTPException, LogitsProcessor
from .metrics import add_metrics
from .spec import load_plan

BEAM_SEARCH = "use_beam_search"
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]


class AdmissionError(TangramError, ValueError):
    """A request that is refused; vLLM makes HTTP 400 of a `ValueError`."""


def check_length(length: Any, most: int, *, where: str = "max_tokens") -> None:
    """That an answer is not longer than the plan admits.

    Args:
        length: what the request states; what is no number is for vLLM to refuse.
        most: `max_new_tokens` of the plan.
        where: under which name it stands there.

    Raises:
        AdmissionError: it is.
    """
    if isinstance(length, str):  # which the server takes for a number, too
        with suppress(ValueError):
            length = float(length)
    if isinstance(length, int | float) and length > most:
        raise AdmissionError(
            "the answer could be longer than the plan admits",
            where=where,
            got=length,
            expected=f"at most {most}",
            fix="ask for less, or serve a plan with a larger max_new_tokens",
        )


class AtMostTokens(LogitsProcessor):
    """Changes no logits; `validate_params` is what it is for."""

    most: int

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """See `LogitsProcessor.validate_params`."""
        check_length(sampling_params.max_tokens, cls.most)
        check_length(sampling_params.min_tokens, cls.most, where="min_tokens")

    def apply(self, logits: Any) -> Any:
        """As they are."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """Greedy sampling passes it over."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """There is none."""


@cache
def _at_most(most: int) -> type[AtMostTokens]:
    return type(f"AtMost{most}Tokens", (AtMostTokens,), {"most": most, "__module__": __name__})


def __getattr__(name: str) -> Any:
    """`AtMost128Tokens`: options name classes and pass nothing to them, so the number is in the name."""
    if found := re.fullmatch(r"AtMost(\d+)Tokens", name):
        return _at_most(int(found[1]))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class AnswerLimit:
    """ASGI middleware that reads along while the server reads a request.

    Args:
        app: the server.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Any) -> None:
        """Serve a connection; the first is the server's start, when the engine runs."""
        if scope["type"] == "lifespan":
            add_metrics(scope["app"].state.engine_client)
        if scope["type"] == "http" and scope["method"] == "POST":
            config = scope["app"].state.vllm_config
            receive = _checked(receive, load_plan(config.additional_config[PLAN_KEY]).max_new_tokens)
        await self._app(scope, receive, send)


def _checked(receive: Receive, most: int) -> Receive:
    body = bytearray()

    async def checked() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            body.extend(message.get("body", b""))
            if not message.get("more_body"):
                _check_body(body, most)
        return message

    return checked


def _check_body(body: bytearray, most: int) -> None:
    """Raise what FastAPI passes on to the server's own handler of errors."""
    if not any(name.encode() in body for name in (*LENGTHS, BEAM_SEARCH)):
        return
    try:
        request = json.loads(body)
    except ValueError:
        return  # not ours to judge: a form, or broken
    if not isinstance(request, dict):
        return
    try:
        for name in LENGTHS:
            check_length(request.get(name), most, where=name)
        if request.get(BEAM_SEARCH):
            raise AdmissionError(
                "every token of a beam would be a prompt of its own, and compressed as such",
                where=BEAM_SEARCH,
                got=request[BEAM_SEARCH],
                expected="false",
                fix="leave it out, or ask stock vLLM",
            )
    except AdmissionError as error:
        raise HTTPException(400, str(error)) from None
