"""`study`: which runs it makes, what it refuses before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_async.config.loader import dump_config, load_config
from grpo_async.errors import ConfigError
from grpo_async.findings.study import StudyPlan
from grpo_async.launch.study import plan_study, run_study
from tests.launch.support import make_config

STALENESS = "rollout.max_staleness=[0, 1, 4]"
CORRECTION = (
    "correction={none: {}, TIS: {loss.proximal: recomputed, loss.correction: {level: token, action: truncate}}}"
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    held_out = {"data": {"type": "jsonl", "path": "held.jsonl"}}
    path.write_text(dump_config(make_config(tmp_path, evaluation=held_out, run={"seed": 7})))
    return path


def _plan(config: Path, *vary: str, num_seeds: int = 2) -> StudyPlan:
    return plan_study(config, load_config(config), vary, (), num_seeds=num_seeds, tolerance=0.05)


def test_every_combination_is_run_with_every_seed_all_settings_first(config: Path) -> None:
    plan = _plan(config, STALENESS, CORRECTION)
    runs = list(plan.runs())
    assert [(name, seed) for name, _, seed in runs[:2]] == [("0_none_seed-7", 7), ("0_TIS_seed-7", 7)]
    assert len({name for name, _, _ in runs}) == len(runs) == 12
    assert [seed for _, _, seed in runs] == [7] * 6 + [8] * 6
    assert plan.own == ["1", "none"]  # what the file says itself
    loaded = load_config(config, {name: changes for name, changes, _ in runs}["4_TIS_seed-8"])
    assert loaded.rollout.max_staleness == 4
    assert loaded.loss.correction is not None
    assert loaded.loss.correction.action == "truncate"


def test_a_folder_keeps_the_runs_of_one_configuration(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "study"
    out.mkdir()
    (out / "study.json").write_text(_plan(config, STALENESS).model_dump_json())
    for overrides, vary in (["optimizer.lr=0.5"], STALENESS), ([], "rollout.max_staleness={'4': {loss.epsilon: 0.1}}"):
        with pytest.raises(ConfigError, match="another configuration"):
            run_study(config, [vary], overrides, out=out)
    (out / "study.json").unlink()
    (out / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="something else"):
        run_study(config, [STALENESS], out=out)
