"""The server that `tangram-plan serve` starts, as clients of OpenAI's see it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="the client of the server")

import openai

from tangram_plan.ir import Plan
from tangram_plan.runtime.vllm_plugin.capacity import capacity_lines
from tests.engine_runs import ENVIRONMENT, ROOT
from tests.engines import Engines

psutil: Any = pytest.importorskip("psutil", reason="looks for processes that were left")
pytestmark = pytest.mark.slow

MODEL = "smollm2"
MAX_MODEL_LEN, MAX_NUM_SEQS, NUM_PAGES = 2560, 4, 2000
MAX_NEW_TOKENS = 128  # of the plan
START_SECONDS, STOP_SECONDS = 180, 60
TOO_LONG = (
    "{}: the answer could be longer than the plan admits: got {}, expected at most 128;"
    " ask for less, or serve a plan with a larger max_new_tokens"
)


@dataclass(frozen=True)
class Server:
    """A server that listens."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=300)

    def metric(self, name: str) -> float:
        """Of vLLM's."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            found = re.search(rf"^vllm:{name}{{.*}} (.+)$", answer.read().decode(), re.MULTILINE)
        assert found, name
        return float(found[1])

    def listens(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except OSError:
            return False

    def ask(self, prompt: Any, max_tokens: int = 24, **arguments: Any) -> str:
        """The most probable answer."""
        with self.client as client:
            answer = client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, **arguments
            )
        return str(answer.choices[0].text)


def wait_until(holds: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


@contextmanager
def served(engines: Engines, plan: Plan, folder: Path) -> Iterator[Server]:
    """A server of the plan, as a user starts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "--model": engines.model,
        "--served-model-name": MODEL,
        "--host": "127.0.0.1",
        "--port": port,
        "--max-model-len": MAX_MODEL_LEN,
        "--max-num-seqs": MAX_NUM_SEQS,
        "--kv-cache-memory-bytes": (NUM_PAGES + 1) * plan.layout.page_bytes,
    }
    words = [str(word) for option in options.items() for word in option]
    command = [sys.executable, "-m", "tangram_plan", "serve", str(engines.artefact(0.3)), *words, "--enforce-eager"]
    environment = os.environ | ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "INFO"}
    log = folder / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    server = Server(process, port, log)
    try:
        wait_until(lambda: server.listens() or process.poll() is not None, START_SECONDS)
        assert process.poll() is None, log.read_text()[-8000:]
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_SECONDS)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server(engines: Engines, plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(engines, plan, tmp_path_factory.mktemp("http")) as server:
        yield server


def test_the_block_at_start_says_how_much_fits(server: Server, plan: Plan) -> None:
    lines = [line.rstrip() for line in server.log.read_text().splitlines()]
    for expected in capacity_lines(plan, NUM_PAGES, MAX_MODEL_LEN):
        assert [line.endswith(f"] {expected}") for line in lines].count(True) == 1, expected


def test_a_streamed_answer_is_the_answer(server: Server, engines: Engines) -> None:
    prompt = engines.prompts()[4]
    whole = server.ask(prompt)
    with server.client as client:
        stream = client.completions.create(model=MODEL, prompt=prompt, max_tokens=24, temperature=0, stream=True)
        pieces = [chunk.choices[0].text for chunk in stream]
    assert len(pieces) > 20
    assert "".join(pieces) == whole


def test_requests_together_are_answered_as_each_alone(server: Server, engines: Engines) -> None:
    prompts = engines.prompts()[:6]
    assert len(prompts) > MAX_NUM_SEQS
    alone = [server.ask(prompt) for prompt in prompts]
    assert len(set(alone)) == len(prompts)
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(server.ask, prompts)) == alone


def test_clients_that_leave_give_every_page_back(server: Server, engines: Engines) -> None:
    short, *others = engines.prompts()
    with server.client as client:
        streams = [
            client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=MAX_NEW_TOKENS, stream=True, extra_body={"ignore_eos": True}
            )
            for prompt in [short, *reversed(others)]
        ]
        next(iter(streams[0]))
        wait_until(lambda: server.metric("num_requests_running") == MAX_NUM_SEQS)
        assert server.metric("kv_cache_usage_perc") > 0  # of some that are in the middle of their prompts
        assert server.metric("num_requests_waiting") > 0
        for stream in streams:
            stream.close()

    def nobody_else_is_served() -> bool:
        server.ask(
            [1, 2], max_tokens=1
        )  # figures are of the engine's last step: of this request, when its pages are back
        return server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0

    wait_until(nobody_else_is_served)
    assert server.metric("kv_cache_usage_perc") == 0


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_chat_request_that_states_a_longer_answer_is_refused(server: Server, name: str) -> None:
    lengths: dict[str, Any] = {name: MAX_NEW_TOKENS + 1}
    with server.client as client, pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hello"}], **lengths)
    assert (error.value.status_code, error.value.body["message"]) == (400, TOO_LONG.format(name, MAX_NEW_TOKENS + 1))  # type: ignore[index]


def test_requests_of_other_kinds_that_state_a_longer_answer_are_refused(server: Server) -> None:
    with server.client as client:
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model=MODEL, prompt="Hello", max_tokens=100_000)
        assert error.value.body["message"] == TOO_LONG.format("max_tokens", 100_000)  # type: ignore[index]
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.create(model=MODEL, input="Hello", max_output_tokens=129)
        assert error.value.body["message"] == TOO_LONG.format("max_output_tokens", 129)  # type: ignore[index]


@pytest.mark.parametrize("lengths", [{}, {"max_tokens": MAX_NEW_TOKENS}])
def test_a_chat_answer_ends_where_the_plan_ends_it(server: Server, lengths: dict[str, Any]) -> None:
    with server.client as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me of the sea."}],
            temperature=0,
            extra_body={"ignore_eos": True},
            **lengths,
        )
    assert answer.usage is not None
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", MAX_NEW_TOKENS)


def test_ctrl_c_stops_it_in_the_middle_of_an_answer(engines: Engines, plan: Plan, tmp_path: Path) -> None:
    with served(engines, plan, tmp_path) as server:
        with server.client as client:
            stream = client.completions.create(
                model=MODEL, prompt="Hello", max_tokens=MAX_NEW_TOKENS, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(stream))
            processes = psutil.Process(server.process.pid).children(recursive=True)
            assert processes
            server.process.send_signal(signal.SIGINT)
            time.sleep(1)
        assert server.process.wait(STOP_SECONDS) == 0  # vLLM's server may wait for the client to leave
        assert not server.listens()
        _, alive = psutil.wait_procs(processes, STOP_SECONDS)
        assert not alive
