from pathlib import Path

import pytest

from tests.command_line import CommandLine
from tests.small_plans import write_inputs


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


@pytest.fixture
def model_yaml(tmp_path: Path) -> Path:
    """A configuration that builds in a second, beside its model's config and its profile."""
    return write_inputs(tmp_path / "inputs")
