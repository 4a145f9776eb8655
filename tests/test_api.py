"""The Python API, as a notebook uses it; a whole run of one: tests/e2e/test_interactions.py."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

import pytest

from grpo_async import load_config, train
from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError, DeadlineError, RunError

ROOT = Path(__file__).parents[1]


def test_in_a_running_event_loop_the_launcher_has_a_process_of_its_own(tmp_path: Path) -> None:
    settings = [f"run.dir={tmp_path}", "model.path=./none", "data.train.path=none"]

    async def cell() -> None:
        config = load_config(ROOT / "configs" / "quickstart.yaml", settings)
        with pytest.raises(ConfigError, match=r"model\.path: \./none does not exist"):
            train(config)

    asyncio.run(cell())


def test_an_error_of_the_launcher_comes_out_of_its_process_as_it_was_raised() -> None:
    error = DeadlineError("node 1 to join", waited_s=3.0, setting="a.b", hint="Look.")
    read = pickle.loads(pickle.dumps(error))
    assert (type(read), str(read), vars(read)) == (type(error), str(error), vars(error))


def test_a_run_that_fails_raises_with_its_exit_code_and_resume_is_a_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def launch(config: ExperimentConfig, *, resume: str | None, clean: bool) -> int:
        asked.append(resume)
        return 130

    monkeypatch.setattr("grpo_async.launch.start.launch", launch)
    config = load_config(ROOT / "configs" / "quickstart.yaml", [f"run.dir={tmp_path}"])
    for resume in (False, True, 40):
        with pytest.raises(RunError, match="ended with exit code 130"):
            train(config, resume=resume)
    assert asked == [None, "latest", "40"]
