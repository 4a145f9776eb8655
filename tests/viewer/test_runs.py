"""The arguments of `inspect-rollouts`: runs and their evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_async.errors import ConfigError
from grpo_async.run_directory import RunDir
from grpo_async.viewer.runs import find_evaluation, find_run


def test_a_run_is_found_by_name_and_by_path_and_an_unknown_one_lists_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    with pytest.raises(ConfigError, match=r"there is no run 'a', and .*runs holds none"):
        find_run("a", runs)
    for name in ("quickstart", "other"):
        (runs / name).mkdir(parents=True)
    (runs / "other" / "metrics.jsonl").touch()
    assert find_run("other", runs).root == runs / "other"
    assert find_run(str(runs / "other"), tmp_path / "elsewhere").root == runs / "other"
    for name in ("quickstart", str(runs / "quickstart")):
        assert find_run(name, runs).root == runs / "quickstart"  # nothing is written in it yet
    (tmp_path / "docs").mkdir()
    with pytest.raises(ConfigError, match=r"docs'; .*runs holds"):
        find_run(str(tmp_path / "docs"), runs)
    with pytest.raises(ConfigError, match="there is no run 'quickstrat'; did you mean 'quickstart'"):
        find_run("quickstrat", runs)
    with pytest.raises(ConfigError, match=r"there is no run 'zzz'; .*runs holds (quickstart, other|other, quickstart)"):
        find_run("zzz", runs)
    for nothing in ("", ".", ".."):
        with pytest.raises(ConfigError, match="there is no run"):
            find_run(nothing, runs)
    (runs / "other" / "config.yaml").touch()
    monkeypatch.chdir(runs / "other")
    assert find_run(".", runs).root == runs / "other"


def test_an_evaluation_is_found_by_its_step_or_as_the_last_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    for name in ("step_5", "step_40", "step_x", "other"):
        (run.evaluations / name).mkdir(parents=True)
    assert find_evaluation(run, "5").rollouts == run.evaluations / "step_5"
    last = find_evaluation(run, "latest")
    assert last.rollouts == run.evaluations / "step_40"
    assert last.config == run.config  # where the tokenizer is named
    for wrong in ("6", "x", "-1"):
        with pytest.raises(ConfigError, match=f"--evaluation {wrong}: .* it has: 5, 40"):
            find_evaluation(run, wrong)
    with pytest.raises(ConfigError, match="it has: none"):
        find_evaluation(RunDir(tmp_path / "other"), "latest")
