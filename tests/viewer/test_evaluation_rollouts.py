"""`inspect-rollouts RUN --evaluation STEP` looks at the rollouts of an evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_async.errors import ConfigError
from grpo_async.rundir import RunDir
from grpo_async.viewer.runs import find_evaluation


def test_an_evaluation_is_found_by_its_step_or_as_the_last_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    for name in ("step_5", "step_40", "step_x", "other"):
        (run.evaluations / name).mkdir(parents=True)
    assert find_evaluation(run, "5").rollouts == run.evaluations / "step_5"
    last = find_evaluation(run, "last")
    assert last.rollouts == run.evaluations / "step_40"
    assert last.config == run.config  # where the tokenizer is named
    for wrong in ("6", "x", "-1"):
        with pytest.raises(ConfigError, match=f"--evaluation {wrong}: .* it has: 5, 40"):
            find_evaluation(run, wrong)
    with pytest.raises(ConfigError, match="it has: none"):
        find_evaluation(RunDir(tmp_path / "other"), "last")
