"""Settings that make no sense together are refused, each with its reason; their neighbors are allowed."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from grpo_async.config import ExperimentConfig
from tests.support.configs import small_config

JSONL = {"type": "jsonl", "path": "t"}
CENTERED = {"proximal": "recomputed", "score_centering": 8}
TOKEN_WEIGHTS = {"proximal": "recomputed", "correction": {"level": "token"}}


def _config(**sections: Any) -> ExperimentConfig:
    if "evaluation" in sections or "checkpoint" in sections:
        sections = {"data": {"train": JSONL, "held_out": 0.1}, **sections}
    return small_config(**sections)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data": {"train": JSONL, "sampling": {"retire_solved": 2}}, "training": {"epochs": 2}}, "training.epochs: 2 does not go"),
        # the objective
        ({"loss": {"correction": {}}}, "loss.correction, which weighs"),
        ({"loss": {"proximal": "log_linear"}, "rollout": {"max_staleness": 0}}, "loss.proximal: log_linear does not go with"),
        ({"loss": {"proximal": "recomputed"}}, "makes every ratio 1 while training.minibatches and training.num_iterations are 1"),
        (
            {"loss": {"type": "gspo", "proximal": "recomputed", "correction": {"level": "token"}}},
            "gspo's ratio is the same for all of them; set level: sequence",
        ),
        (
            {"model": {"path": "m", "lora": {"push": "adapter_swap", "modules_to_save": ["lm_head"]}}},
            "model.lora.push: adapter_swap sends the adapters alone, and servers would keep the old values of",
        ),
        ({"loss": {"type": "gspo", "score_centering": 8}}, "loss.score_centering does not go with loss.type: gspo: it needs"),
        ({"loss": {**CENTERED, "correction": {"level": "sequence"}}}, "loss.correction.level: sequence: the weight"),
        ({"loss": {**CENTERED, "correction": {"level": "token", "action": "none"}}}, "untruncated weights leave nothing"),
        ({"loss": CENTERED, "training": {"num_iterations": 2}}, "known for sampled tokens only"),
        ({"loss": CENTERED, "rollout_function": {"function": "a:b"}}, "loss.score_centering does not go with rollout_function"),
        ({"loss": CENTERED, "rollout": {"top_p": 0.9}}, "loss.score_centering does not go with rollout.top_p: it compares"),
        ({"training": {"minibatches": 3}, "rollout": {"groups_per_step": 2}}, "training.minibatches: 3 is more than rollout"),
        ({"loss": {"delta": 1.2}}, "delta: 1.2 is not more than 1 + epsilon_high = 1.28"),
        (
            {"model": {"path": "m", "lora": {"push": "adapter_swap"}}, "weights": {"mode": "abort"}},
            "weights.mode: abort does not go with model.lora.push: adapter_swap",
        ),
        (
            {"model": {"path": "m", "lora": {"push": "adapter", "load_in_4bit": True}}},
            "model.lora.push: adapter adds to the files of model.path, which model.lora.load_in_4bit rounds",
        ),
        # sampling
        ({"rollout": {"top_p": 0.95}}, "rollout.top_p: 0.95 samples from another distribution than the policy's, and the ratio"),
        (
            {"rollout": {"repetition_penalty": 1.1, "top_k": 50}, "loss": {"proximal": "recomputed", "correction": {}}},
            "rollout.top_k: 50, rollout.repetition_penalty: 1.1 samples from another distribution than the policy's, and the "
            "ratio of the loss would count that as a change of the policy; set rollout.top_k to at most 128",
        ),
        ({"rollout": {"top_k": 129}, "loss": {"type": "gspo"}}, "rollout.top_k: 129 does not go with loss.type: gspo"),
        (
            {
                "rollout": {"top_k": 5, "groups_per_step": 2},
                "loss": {"proximal": "recomputed"},
                "training": {"minibatches": 2},
            },
            "rollout.top_k: 5 samples from another distribution",
        ),
        (
            {"rollout": {"top_p": 0.9}, "loss": {**TOKEN_WEIGHTS, "off_policy_mask": 0.1}},
            "loss.off_policy_mask: 0.1 does not go with rollout.top_p: 0.9",
        ),
        ({"rollout": {"structured_outputs": {"choice": ["a"]}}}, "rollout.structured_outputs samples from another distribution"),
        # agents
        ({"rollout": {"agent": {"function": "a:b", "command": ["x"]}}}, "environment; function and command are set"),
        ({"rollout": {"agent": {"function": "a:b", "host": "0.0.0.0"}}}, "no address that an agent could connect to"),
        ({"rollout": {"agent": {"function": "a:b", "timeout_s": 600}}}, "rollout.agent.timeout_s: 600 is not less than"),
        (
            {"rollout_function": {"function": "a:b"}, "tools": [{"function": "a:b"}]},
            "rollout_function.function does not go with tools",
        ),
        ({"rewards": []}, "rewards: there are none; name at least one"),
        # servers and weights
        ({"inference": {"urls": ["http://user:key@host:1"]}}, "http://host:port"),
        (
            {"inference": {"urls": ["http://10.0.0.7:8000"]}, "weights": {"host": "127.0.0.1"}},
            "weights.host: 127.0.0.1 cannot be reached from http://10.0.0.7:8000",
        ),
        (
            {"inference": {"vllm": {"sleep_while_training": True}}, "rollout": {"max_staleness": 1}},
            "sleep_while_training needs rollout.max_staleness: 0",
        ),
        ({"inference": {"vllm": {"extra_args": ["--port", "1"]}}}, "--port cannot be set here"),
        # evaluation, and the checkpoints that are kept by it
        (
            {"evaluation": {"every_steps": 3}, "training": {"weight_sync_steps": 2}},
            "evaluation.every_steps: 3 is not a multiple of training.weight_sync_steps: 2",
        ),
        (
            {"evaluation": {"samples_per_prompt": 16, "temperature": 1.0},
             "environments": {"maze": {"factory": "a:B", "max_instances": 8}}},
            "environments.maze.max_instances: 8 is less than 16",
        ),
        ({"checkpoint": {"best_metric": "reward/gsm8k"}, "evaluation": {}}, "an evaluation has no 'reward/gsm8k'"),
        ({"data": {"train": JSONL, "held_out": 0.1}}, "data.held_out: 0.1 needs the section"),
        ({"evaluation": {}, "data": {"train": JSONL}}, "evaluation.data: there is no data"),
        ({"evaluation": {"data": JSONL}}, "data.held_out does not go with evaluation.data"),
        (
            {"training": {"context_parallel": 2}, "launch": {"num_trainer_ranks": 3}},
            "training.context_parallel: 2 does not divide launch.num_trainer_ranks: 3",
        ),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_its_reason(sections: dict[str, Any], words: str) -> None:
    """R4.4 among them: a rollout function bypasses the tool loop."""
    with pytest.raises(ValidationError) as caught:
        _config(**sections)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "sections",
    [
        {"loss": {"proximal": "recomputed", "correction": {}}},
        {"loss": {"proximal": "recomputed"}, "training": {"minibatches": 2}, "rollout": {"groups_per_step": 2}},
        {"loss": {"type": "gspo", "proximal": "recomputed", "correction": {"level": "sequence"}}},
        {"rollout": {"top_p": 0.95, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.05}, "loss": TOKEN_WEIGHTS},
        {"rollout": {"top_p": 0.95}, "loss": {"type": "cispo"}},
        {"rollout": {"top_p": 0.95, "top_k": 20, "min_p": 0.01}, "loss": {"type": "gspo", "off_policy_mask": 0.1}},
        {"rollout": {"structured_outputs": {"regex": "[0-9]+"}}, "loss": TOKEN_WEIGHTS},
        {"weights": {"host": "10.0.0.1"}, "inference": {"urls": ["https://a:1", "http://b:2"]}},
        {"inference": {"vllm": {"sleep_while_training": True}}, "rollout": {"max_staleness": 0}},
    ],
)
def test_its_neighbors_are_allowed(sections: dict[str, Any]) -> None:
    _config(**sections)


def test_rollouts_of_an_evaluation_take_a_quarter_of_the_places_unless_set() -> None:
    config = _config(
        evaluation={"every_steps": 8, "samples_per_prompt": 4, "temperature": 0.5},
        training={"weight_sync_steps": 2},
        checkpoint={"keep_best": 2, "every_steps": 4},
        rollout={"max_in_flight": 40},
    )
    assert (config.max_in_flight_evaluation, config.max_in_flight_evaluation_only) == (10, 40)
    assert _config(evaluation={"max_in_flight": 3}).max_in_flight_evaluation == 3
    assert _config(evaluation={}, rollout={"max_in_flight": 2}).max_in_flight_evaluation == 1


def test_a_run_has_100_steps_or_as_many_as_its_epochs_take() -> None:
    def training(**values: Any) -> ExperimentConfig:
        return _config(training=values, rollout={"groups_per_step": 16})

    assert (training().num_steps, training(max_steps=7).num_steps) == (100, 7)
    assert training(epochs=2).num_steps == 0  # nobody has counted the rows
    assert training(epochs=2).with_rows(50).num_steps == 7  # 100 / 16, the last one of 4 groups
    assert training(epochs=2, max_steps=3).with_rows(50).num_steps == 3
    assert training(max_steps=3).with_rows(50).num_steps == 3
    assert training(epochs=0.07).training.num_prompts(100) == 7
    assert training(epochs=0.5).training.num_prompts(5) == 3
