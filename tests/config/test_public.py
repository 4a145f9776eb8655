"""What of a configuration may leave the machine."""

from __future__ import annotations

from grpo_async.config import ExperimentConfig
from grpo_async.config.public import public_config

SECRET = "sk-12345"


def _config() -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "run": {"name": "mine"},
            "model": {"path": "m", "chat_template_kwargs": {"who": SECRET}},
            "data": {
                "train": {"type": "generator", "function": "a:rows", "arguments": {"login": {"password": SECRET}}}
            },
            "rewards": [{"function": "a:b", "weight": 2.0, "arguments": {"api_key": SECRET, "urls": [SECRET]}}],
            "rollout": {"agent": {"command": ["agent", f"--key={SECRET}"]}},
            "inference": {"urls": [f"http://{SECRET}"]},
            "tracking": [{"type": "wandb", "project": SECRET, "mode": "offline"}],
        }
    )


def test_values_of_arguments_are_hidden_wherever_they_are_and_their_names_stay() -> None:
    config = _config()
    assert SECRET in str(config.model_dump())
    public = public_config(config)
    assert SECRET not in str(public)
    assert public["rewards"][0] == {
        **config.rewards[0].model_dump(mode="json"), "arguments": {"api_key": "...", "urls": "..."},
    }  # fmt: skip
    assert public["data"]["train"]["arguments"] == {"login": "..."}
    assert public["model"]["chat_template_kwargs"] == {"who": "..."}


def test_servers_launch_and_trackers_are_left_out_and_the_rest_stays() -> None:
    config = _config()
    public, whole = public_config(config), config.model_dump(mode="json")
    assert whole.keys() - public.keys() == {"launch", "inference", "tracking"}
    for section in ("run", "training", "optimizer", "loss"):
        assert public[section] == whole[section]
