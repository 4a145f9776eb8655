"""The help of `serve-vllm` and `serve-embedded`."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from grpo_async.cli.app import app


@pytest.mark.parametrize("command", ["serve-vllm", "serve-embedded"])
def test_the_help_says_how_a_trainer_finds_the_server_and_shows_examples(command: str) -> None:
    answer = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert answer.exit_code == 0
    assert f"grpo-async {command} configs/" in answer.output
    assert "HTTPS" in answer.output
    assert command != "serve-vllm" or "inference.urls" in answer.output
