"""benchmarks/against_trl.py without a run: both sides get the same, the figures add up, and what is replaced in TRL
is there."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import _trl_train as train
from benchmarks import against_trl
from grpo_async.config.loader import load_config

GIVEN = {"inputs": "", "folder": "out", "server_url": "http://127.0.0.1:9", "in_flight": 64, "max_steps": 30, "seed": 0,
         "prompt_tokens": 25}  # fmt: skip


def test_the_two_configurations_ask_for_the_same_training(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": [{"role": "user", "content": "1 + 1 = ?"}]}\n')
    config = load_config(against_trl.write_config(tmp_path, tmp_path, "", argparse.Namespace(**GIVEN)))
    options = train.trainer_options(GIVEN)
    rollout, training = config.rollout, config.training
    assert rollout.group_size * rollout.groups_per_step == options["per_device_train_batch_size"]
    ours = [rollout.group_size, rollout.max_completion_tokens, rollout.max_staleness, rollout.max_in_flight]
    names = ["num_generations", "max_completion_length", "max_staleness", "max_inflight_tasks"]
    ours += [config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.max_grad_norm, config.loss.epsilon]
    names += ["learning_rate", "weight_decay", "max_grad_norm", "epsilon"]
    ours += [config.loss.epsilon_high, rollout.temperature, training.max_steps]
    names += ["epsilon", "temperature", "max_steps"]
    assert ours == [options[name] for name in names]
    assert config.inference.threads == config.launch.trainer_threads == 1
    assert (config.model.dtype, options["bf16"]) == ("float32", False)
