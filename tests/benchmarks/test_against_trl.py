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
    assert config.rollout.group_size == options["num_generations"]
    assert config.rollout.group_size * config.rollout.groups_per_step == options["per_device_train_batch_size"]
    assert config.rollout.max_completion_tokens == options["max_completion_length"]
    assert config.rollout.max_staleness == options["max_staleness"]
    assert config.rollout.max_in_flight == options["max_inflight_tasks"]
    assert config.rollout.temperature == options["temperature"]
    assert config.optimizer.lr == options["learning_rate"]
    assert config.optimizer.weight_decay == options["weight_decay"]
    assert config.optimizer.max_grad_norm == options["max_grad_norm"]
    assert (config.loss.epsilon, config.loss.epsilon_high) == (options["epsilon"], options["epsilon"])
    assert config.training.max_steps == options["max_steps"]
    assert config.inference.threads == config.launch.trainer_threads == 1
    assert config.model.dtype == "float32"
    assert not options["bf16"]
