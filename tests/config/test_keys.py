"""The keys of a configuration: the JSON schema (fresh, complete, as open as the files), `explain`, what may leave the machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from grpo_async.cli.app import app
from grpo_async.config import ExperimentConfig
from grpo_async.config.keys import all_keys, keys_at, schema_text
from grpo_async.config.names import OTHER_NAMES
from grpo_async.config.public import public_config
from tests.support.configs import small_config

COMMITTED = Path(__file__).parents[2] / "configs" / "schema.json"
SECRET = "sk-12345"


def test_the_committed_schema_is_fresh() -> None:
    assert COMMITTED.read_text(encoding="utf-8") == schema_text(), "run: grpo-async schema --out configs/schema.json"


def test_every_setting_is_told_with_its_meaning_and_what_others_call_it_leads_to_one() -> None:
    keys = {key.path: key for key in all_keys()}
    assert [path for path in keys if not keys_at(tuple(path.replace("[]", ".0").split(".")))] == []
    assert {path for path in keys if "." not in path} == set(ExperimentConfig.model_fields)
    assert [key.path for key in keys.values() if not key.meaning] == []
    assert [other for other in OTHER_NAMES if other.here is not None and other.here not in keys] == []
    for other in OTHER_NAMES:  # a reason names keys, too
        for path in re.findall(r"(?<!/)\b[a-z]+(?:\.[a-z_]+)+", other.why):
            assert path in keys or path == "metrics.jsonl", path


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rollout.group_size"], "rollout.group_size: whole number at least 2 and at most 1000000; default 8 "),
        (["num_generations"], "rollout.group_size: "),
        (["actor_rollout_ref.rollout.n"], "rollout.group_size: "),
        (["oldest", "policy"], "rollout.max_staleness: "),
        ([], "training.max_steps "),
    ],
)
def test_a_key_is_found_by_its_path_by_other_names_and_by_words(words: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["explain", *words])
    assert result.exit_code == 0, result.output
    assert told in " ".join(result.stdout.split())  # it is wrapped by the width of the terminal


def _config() -> ExperimentConfig:
    return small_config(
        model={"chat_template_kwargs": {"who": SECRET}},
        data={"train": {"type": "generator", "function": "a:rows", "arguments": {"login": {"password": SECRET}}}},
        rewards=[{"function": "a:b", "weight": 2.0, "arguments": {"api_key": SECRET, "urls": [SECRET]}}],
        rollout={"agent": {"command": ["agent", f"--key={SECRET}"]}},
        inference={"urls": [f"http://{SECRET}"]},
        weights={"host": SECRET},
        tracking=[{"type": "wandb", "project": SECRET, "mode": "offline"}],
    )


def test_values_of_arguments_are_hidden_and_servers_launch_and_trackers_left_out() -> None:
    config = _config()
    assert SECRET in str(config.model_dump())
    public = public_config(config)
    assert SECRET not in str(public)
    assert public["rewards"][0]["arguments"] == {"api_key": "...", "urls": "..."}
    whole = config.model_dump(mode="json")
    assert whole.keys() - public.keys() == {"launch", "inference", "tracking"}
    for section in ("run", "training", "optimizer", "loss"):
        assert public[section] == whole[section]


def test_a_setting_that_is_gone_says_what_to_do_instead() -> None:
    result = CliRunner().invoke(app, ["validate", "configs/quickstart.yaml", "--set", "inference.tls.key=k.pem"])
    assert (result.exit_code, "reverse proxy" in " ".join(result.stderr.split())) == (2, True)
