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
        # data
        ({"data": {"train": [JSONL, {"path": "other/t.jsonl"}]}}, "the labels ['t'] are used more than once; give each source a"),
        ({"data": {"train": [{**JSONL, "weight": 0}]}}, "the weight of every source is 0"),
        ({"data": {"train": [{**JSONL, "environment": "x"}]}}, "data.train.0.environment: x is not one of the environments []"),
        ({"data": {"train": JSONL, "sampling": {"retire_solved": 2}}, "training": {"epochs": 2}}, "training.epochs: 2 does not go"),
        # the objective
        ({"loss": {"correction": {}}}, "loss.correction, which weighs"),
        ({"loss": {"proximal": "log_linear"}, "rollout": {"max_staleness": 0}}, "loss.proximal: log_linear does not go with"),
        ({"loss": {"proximal": "recomputed"}}, "makes every ratio 1 while training.minibatches and training.num_iterations are 1"),
        (
            {"loss": {"type": "gspo", "proximal": "recomputed", "correction": {"level": "token"}}},
            "gspo's ratio is the same for all of them; set level: sequence",
        ),
        ({"rewards": [{"name": "x"}]}, "a reward is one of function, model; none of them is set"),
        (
            {"model": {"path": "m", "lora": {"push": "adapter_swap", "modules_to_save": ["lm_head"]}}},
            "model.lora.push: adapter_swap sends the adapters alone, and servers would keep the old values of",
        ),
        (
            {"model": {"path": "m", "lora": {"push": "adapter_swap", "rank": 600}}},
            "vLLM takes ranks up to 512, not model.lora.rank: 600",
        ),
        ({"loss": {"type": "gspo", "score_centering": 8}}, "loss.score_centering does not go with loss.type: gspo: it needs"),
        ({"loss": {**CENTERED, "correction": {"level": "sequence"}}}, "loss.correction.level: sequence: the weight"),
        ({"loss": {**CENTERED, "correction": {"level": "token", "action": "none"}}}, "untruncated weights leave nothing"),
        ({"loss": CENTERED, "training": {"num_iterations": 2}}, "known for sampled tokens only"),
        ({"loss": CENTERED, "rollout_function": {"function": "a:b"}}, "loss.score_centering does not go with rollout_function"),
        ({"loss": CENTERED, "rollout": {"top_p": 0.9}}, "loss.score_centering does not go with rollout.top_p: it compares"),
        ({"loss": {"reference": "models/base"}}, "loss.reference: models/base needs loss.beta"),
        ({"training": {"minibatches": 3}, "rollout": {"groups_per_step": 2}}, "training.minibatches: 3 is more than rollout"),
        ({"loss": {"delta": 1.2}}, "delta: 1.2 is not more than 1 + epsilon_high = 1.28"),
        ({"loss": {"proximal": "recomputed", "correction": {"cap": 2.0, "floor": 2.0}}}, "floor: 2.0 is not less than cap"),
        (
            {"model": {"path": "m", "lora": {"push": "adapter_swap"}}, "weights": {"mode": "abort"}},
            "weights.mode: abort does not go with model.lora.push: adapter_swap",
        ),
        (
            {"model": {"path": "m", "lora": {"load_in_4bit": True}}, "training": {"cpu_offload": True}},
            "model.lora.load_in_4bit does not go with training.cpu_offload",
        ),
        (
            {"model": {"path": "m", "lora": {"push": "adapter", "load_in_4bit": True}}},
            "model.lora.push: adapter adds to the files of model.path, which model.lora.load_in_4bit rounds",
        ),
        (
            {"model": {"path": "m", "lora": {"push": "adapter"}}, "weights": {"transport": "nccl"}},
            "adapter travels over gloo alone, not over weights.transport: nccl",
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
        ({"evaluation": {"structured_outputs": {}}}, "what may be sampled is one of json_schema, regex, choice, grammar"),
        (
            {"evaluation": {"structured_outputs": {"regex": "a"}}, "weights": {"mode": "abort"}},
            "weights.mode: abort does not go with structured_outputs",
        ),
        (
            {"evaluation": {"structured_outputs": {"regex": "a"}}, "inference": {"engine": "embedded"}},
            "structured_outputs needs inference.engine: vllm",
        ),
        # agents
        ({"rollout": {"agent": {"function": "a:b", "command": ["x"]}}}, "environment; function and command are set"),
        ({"rollout": {"agent": {"command": ["x"], "arguments": {"a": 1}}}}, "arguments: a command has none"),
        ({"rollout": {"agent": {"function": "a:b", "host": "0.0.0.0"}}}, "no address that an agent could connect to"),
        ({"rollout": {"agent": {"function": "a:b", "timeout_s": 600}}}, "rollout.agent.timeout_s: 600 is not less than"),
        (
            {"rollout": {"agent": {"command": ["x"]}}, "tools": [{"function": "a:b"}]},
            "rollout.agent.command does not go with tools",
        ),
        (
            {"rollout": {"agent": {"function": "a:b"}}, "rollout_function": {"function": "a:b"}},
            "rollout.agent.function does not go with rollout_function",
        ),
        (
            {"rollout_function": {"function": "a:b"}, "tools": [{"function": "a:b"}]},
            "rollout_function.function does not go with tools",
        ),
        ({"rewards": []}, "rewards: there are none; name at least one"),
        # servers and weights
        ({"launch": {"trainer_nodes": 2}}, "launch.trainer_nodes: 2 needs launch.ray: auto"),
        ({"launch": {"max_restarts": 1}}, "launch.max_restarts: 1 needs launch.ray: auto"),
        ({"launch": {"ray": "auto", "colocate": True}}, "launch.colocate does not go with launch.ray"),
        ({"inference": {"replicas": {"min": 1, "max": 2}}}, "inference.replicas: a range needs launch.ray: auto"),
        ({"inference": {"replicas": {"min": 3, "max": 2}}}, "min is 3 and max is 2; max is the larger one"),
        ({"inference": {"urls": ["http://a:1", "http://a:1"]}}, "named more than once"),
        ({"inference": {"urls": ["http://a:1/v1"]}}, "http://host:port"),
        ({"inference": {"urls": ["http://user:key@host:1"]}}, "http://host:port"),
        ({"weights": {"host": "gpu..cluster"}}, "'gpu..cluster' cannot be the name of a host"),
        (
            {"inference": {"urls": ["http://10.0.0.7:8000"]}, "weights": {"host": "127.0.0.1"}},
            "weights.host: 127.0.0.1 cannot be reached from http://10.0.0.7:8000",
        ),
        (
            {"inference": {"vllm": {"sleep_while_training": True}}, "rollout": {"max_staleness": 1}},
            "sleep_while_training needs rollout.max_staleness: 0",
        ),
        ({"inference": {"vllm": {"extra_args": ["--port", "1"]}}}, "--port cannot be set here"),
        ({"inference": {"vllm": {"extra_args": ["-tp", "4"]}}}, "-tp cannot be set here: see inference.vllm.tensor"),
        ({"inference": {"vllm": {"extra_args": ["--pipeline_parallel_size", "2"]}}}, "see inference.vllm.pipeline_paral"),
        # evaluation, and the checkpoints that are kept by it
        (
            {"evaluation": {"samples_per_prompt": 4}},
            "evaluation.samples_per_prompt: 4 greedy completions of a prompt are all the same",
        ),
        (
            {"evaluation": {"every_steps": 3}, "training": {"weight_sync_steps": 2}},
            "evaluation.every_steps: 3 is not a multiple of training.weight_sync_steps: 2",
        ),
        (
            {"evaluation": {"every_steps": 3}, "inference": {"vllm": {"sleep_while_training": True}},
             "rollout": {"max_staleness": 0}},
            "evaluation.every_steps: 3 does not go with inference.vllm.sleep_while_training",
        ),
        (
            {"evaluation": {"samples_per_prompt": 16, "temperature": 1.0},
             "environments": {"maze": {"factory": "a:B", "max_instances": 8}}},
            "environments.maze.max_instances: 8 is less than 16",
        ),
        (
            {"checkpoint": {"best_metric": "pass@8"}, "evaluation": {"samples_per_prompt": 6, "temperature": 1.0}},
            "reward, pass@1, pass@2, pass@4, pass@6, mean@6",
        ),
        ({"checkpoint": {"best_metric": "reward/gsm8k"}, "evaluation": {}}, "an evaluation has no 'reward/gsm8k'"),
        ({"data": {"train": JSONL, "held_out": 0.1}}, "data.held_out: 0.1 needs the section"),
        ({"checkpoint": {"keep_best": 1}}, "checkpoint.keep_best: 1 needs evaluation.every_steps"),
        (
            {"checkpoint": {"keep_best": 1, "every_steps": 4}, "evaluation": {"every_steps": 6}},
            "make evaluation.every_steps: 6 a multiple of checkpoint.every_steps: 4",
        ),
        ({"evaluation": {}, "data": {"train": JSONL}}, "evaluation.data: there is no data"),
        ({"evaluation": {"data": JSONL}}, "data.held_out does not go with evaluation.data"),
        # data
        ({"data": {"train": JSONL, "held_out": 1.5}}, "1.5 is neither a fraction (below 1) nor a whole number of rows"),
        ({"evaluation": {"data": [{**JSONL, "weight": 2}]}}, "evaluation.data.0: weight, temperature and group_size"),
        ({"evaluation": {"temperature": 1e-6}}, "less than 0.01, to which vLLM would raise it"),
        ({"data": {"train": JSONL, "sampling": {"target": 0.3}}}, "target: 0.3 has no effect with type: uniform"),
        ({"rewards": [{"model": "x", "run_in": "process"}]}, "run_in: a reward model never runs in this process"),
        ({"rollout": {"agent": {"function": "a:b", "memory_mb": 64}}}, "applies to the process of a `command` only"),
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
        {"loss": {"type": "custom", "function": "a:b", "proximal": "recomputed"}},
        {"loss": {"proximal": "log_linear", "correction": {"level": "token"}}},
        {"loss": {"type": "gspo", "proximal": "recomputed", "correction": {"level": "sequence"}}},
        {"rollout": {"top_p": 0.95, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.05}, "loss": TOKEN_WEIGHTS},
        {"rollout": {"top_p": 0.95}, "loss": {"type": "cispo"}},
        {"rollout": {"top_p": 0.95, "top_k": 20, "min_p": 0.01}, "loss": {"type": "gspo", "off_policy_mask": 0.1}},
        {"rollout": {"top_p": 0.95}, "loss": {"type": "custom", "function": "a:b"}},
        {"evaluation": {"repetition_penalty": 1.1, "structured_outputs": {"json_schema": {"type": "object"}}}},
        {"rollout": {"structured_outputs": {"regex": "[0-9]+"}}, "loss": TOKEN_WEIGHTS},
        {
            "weights": {"host": "10.0.0.1"},
            "inference": {"urls": ["https://a:1", "http://b:2"]},
        },
        {"inference": {"vllm": {"sleep_while_training": True}}, "rollout": {"max_staleness": 0}},
        {"rollout": {"agent": {"function": "a:b", "arguments": {"x": 1}}}, "rewards": []},
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
