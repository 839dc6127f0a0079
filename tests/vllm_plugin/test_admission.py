import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server of vLLM")

from tangram_plan.artefact import write_artefact
from tangram_plan.runtime.vllm_plugin import PLAN_KEY
from tests.plans import valid_plan

LINE = (
    "{}: the answer could be longer than the plan admits: got {}, expected at most 128;"
    " ask for less, or serve a plan with a larger max_new_tokens"
)


@pytest.fixture(scope="module")
def admission() -> Any:
    """It imports vLLM, which warns of itself."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module("tangram_plan.runtime.vllm_plugin.admission")


# --- lengths


@pytest.mark.parametrize("length", [None, 0, 1, 128, 128.0, "128", "many", [129], {}, True])
def test_what_the_plan_admits_passes_and_what_is_no_number_is_left_to_vllm(admission: Any, length: Any) -> None:
    admission.check_length(length, 128)


@pytest.mark.parametrize("length", [129, 128.5, 129.0, "129", 10**400, float("inf")])
def test_a_longer_answer_is_refused(admission: Any, length: Any) -> None:
    with pytest.raises(ValueError, match="the answer could be longer than the plan admits") as error:
        admission.check_length(length, 128)
    assert "\n" not in str(error.value)


# --- parameters, as they reach the engine


def test_a_processor_in_name_only_carries_the_plans_number(admission: Any) -> None:
    limit = admission.AtMost128Tokens
    assert limit is admission.AtMost128Tokens
    assert (limit.__name__, limit.__module__) == ("AtMost128Tokens", admission.__name__)
    assert admission.AtMost64Tokens.most == 64
    limit.validate_params(SimpleNamespace(max_tokens=128, min_tokens=0))
    limit.validate_params(SimpleNamespace(max_tokens=None, min_tokens=128))
    with pytest.raises(ValueError, match=r"min_tokens: .*got 129"):
        limit.validate_params(SimpleNamespace(max_tokens=None, min_tokens=129))
    with pytest.raises(ValueError, match="got 129") as error:
        limit.validate_params(SimpleNamespace(max_tokens=129, min_tokens=0))
    assert str(error.value) == LINE.format("max_tokens", 129)
    with pytest.raises(ValueError, match="got 129"):
        admission.AtMost64Tokens.validate_params(SimpleNamespace(max_tokens=129, min_tokens=0))


def test_it_changes_no_logits(admission: Any) -> None:
    processor = admission.AtMost128Tokens(None, None, False)
    logits = object()
    assert processor.apply(logits) is logits
    assert processor.is_argmax_invariant()


@pytest.mark.parametrize("name", ["AtMostTokens2", "AtMostManyTokens", "AtMost-1Tokens", "no_such"])
def test_other_names_are_not_there(admission: Any, name: str) -> None:
    assert not hasattr(admission, name)


# --- requests, as clients send them

Ask = Callable[..., tuple[int, Any]]


@pytest.fixture
def ask(admission: Any, tmp_path: Path) -> Ask:
    """Sends a body to a server that answers with what it has read; (status, answer)."""
    from fastapi import FastAPI, Request

    plan = replace(valid_plan(max_new_tokens=128), scorer="recent")
    write_artefact(plan, {"build": {}}, tmp_path / "plan")
    app = FastAPI()
    app.add_middleware(admission.AnswerLimit)
    app.state.vllm_config = SimpleNamespace(additional_config={PLAN_KEY: str(tmp_path / "plan")})

    async def echo(request: Request) -> Any:
        return {"read": (await request.body()).decode("latin-1")}

    app.post("/v1/completions")(echo)
    app.get("/v1/models")(echo)

    def send_body(*parts: bytes, method: str = "POST", path: str = "/v1/completions") -> tuple[int, Any]:
        return asyncio.run(_exchange(app, method, path, parts))

    return send_body


async def _exchange(
    app: Callable[..., Awaitable[None]], method: str, path: str, parts: tuple[bytes, ...]
) -> tuple[int, Any]:
    messages = [
        {"type": "http.request", "body": part, "more_body": number < len(parts)}
        for number, part in enumerate(parts, start=1)
    ]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
    }
    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"max_tokens": 128}',
        b'{"prompt": "max_tokens: 129"}',
        b'{"max_tokens": null}',
        b'{"nested": {"max_tokens": 129}}',
        b'["max_tokens", 129]',
        b'{"max_tokens": 129',
        b"max_tokens=129",
        b"\xff max_tokens",
        b"",
    ],
)
def test_a_request_that_passes_is_read_as_it_was_sent(ask: Ask, body: bytes) -> None:
    assert ask(body) == (200, {"read": body.decode("latin-1")})


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_a_request_that_states_a_longer_answer_is_a_bad_request(ask: Ask, name: str) -> None:
    assert ask(json.dumps({"prompt": "x", name: 129}).encode()) == (400, {"detail": LINE.format(name, 129)})


def test_beams_are_a_bad_request(ask: Ask) -> None:
    status, answer = ask(b'{"prompt": "x", "use_beam_search": true}')
    assert (status, "use_beam_search: every token of a beam" in answer["detail"]) == (400, True)
    assert ask(b'{"use_beam_search": false}')[0] == 200


def test_a_request_that_comes_in_parts_is_read_as_a_whole(ask: Ask) -> None:
    assert ask(b'{"max_', b"tokens", b'": 12', b"9}") == (400, {"detail": LINE.format("max_tokens", 129)})
    assert ask(b'{"max_', b"tokens", b'": 12', b"8}") == (200, {"read": '{"max_tokens": 128}'})


def test_requests_that_send_nothing_pass(ask: Ask) -> None:
    assert ask(b"", method="GET", path="/v1/models") == (200, {"read": ""})
