"""Runs the command line inside the test process, and states what a good refusal looks like."""

import sys
from dataclasses import dataclass

import pytest

from tangram_plan.cli import main


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class CommandLine:
    """`tangram-plan`, as a function."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object) -> Answer:
        self.monkeypatch.setattr(sys, "argv", ["tangram-plan", *map(str, arguments)])
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as ending:
            main()
        captured = self.capsys.readouterr()
        code = ending.value.code
        return Answer(code if isinstance(code, int) else 0, captured.out, captured.err)


def assert_refused(answer: Answer, *parts: str, code: int = 2) -> None:
    """One line on stderr that says all these things, nothing on stdout, no traceback."""
    assert (answer.code, answer.out) == (code, ""), answer
    lines = answer.err.splitlines()
    assert len(lines) == 1, answer.err
    assert lines[0].startswith("error: ")
    for part in parts:
        assert part in lines[0]
