"""What `explain` says of the keys."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from grpo_async.cli.app import app
from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.keys import ROOT, all_keys
from grpo_async.config.other_trainers import OTHER_NAMES


def test_every_setting_is_told_with_its_meaning_and_what_others_call_it_leads_to_one() -> None:
    keys = {key.path: key for key in all_keys()}
    assert [path for path in keys if ROOT.find(tuple(path.replace("[]", ".0").split("."))) is None] == []
    assert {path for path in keys if "." not in path} == set(ExperimentConfig.model_fields)
    assert [key.path for key in keys.values() if not key.meaning] == []
    assert [other for other in OTHER_NAMES if other.here is not None and other.here not in keys] == []
    for other in OTHER_NAMES:  # a reason names keys, too
        for path in re.findall(r"\b[a-z]+(?:\.[a-z_]+)+", other.why):
            assert path in keys or path == "metrics.jsonl", path


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rollout.group_size"], "rollout.group_size: whole number at least 2 and at most 1000000; default 8\n"),
        (["num_generations"], "rollout.group_size: "),
        (["actor_rollout_ref.rollout.n"], "rollout.group_size: "),
        (["rewards.1.weight"], "rewards[].weight: "),
        (["environments.game.factory"], "environments.NAME.factory: "),
        (["oldest", "policy"], "rollout.max_staleness: "),
        (["num_train_epochs"], "training.epochs: "),
        (["push_to_hub"], "push_to_hub (TRL) is not needed: "),
        (["data.train.type"], 'default "jsonl"\n  jsonl: One JSON object per line.\n'),
        ([], "training.max_steps "),
    ],
)
def test_a_key_is_found_by_its_path_by_other_names_and_by_words(words: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["explain", *words])
    assert result.exit_code == 0, result.output
    assert told in result.stdout


def test_what_cannot_be_found_is_an_error() -> None:
    result = CliRunner().invoke(app, ["explain", "asdfgh"])
    assert result.exit_code == 2
    assert "asdfgh" in result.stderr
