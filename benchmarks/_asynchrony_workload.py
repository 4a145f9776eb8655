"""The two workloads of asynchrony.py: their models, data, configs and the reward of the one that computes.

`compute`: a random model of a few million parameters that learns to write digits. Its reward is never the same for a whole group,
so every group is trained, and computing outweighs everything that is paid per request. `quickstart`: configs/quickstart.yaml.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

MAX_COMPLETION_TOKENS = 48


def digits(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
    """0 to 1: half of it for the share of the budget spent on digits, half for digits that follow on from the one before.

    A budget of 4 tokens and "12a7": 3 of 4 are digits, 1 of 4 follows on (the 2): 0.5 * 3 / 4 + 0.5 * 1 / 4 = 0.5.
    """
    texts = [c if isinstance(c, str) else str(c[-1]["content"]) for c in completions]
    return [(0.5 * sum(map(_is_digit, t)) + 0.5 * _rises(t)) / MAX_COMPLETION_TOKENS for t in texts]


def _is_digit(character: str) -> bool:
    return character in "0123456789"


def _rises(text: str) -> int:
    pairs = [(a, b) for a, b in pairwise(text) if _is_digit(a) and _is_digit(b)]
    return sum((int(a) + 1) % 10 == int(b) for a, b in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the computing workload: the model's, the batch's, and completions generated at once."""

    hidden: int = 256
    layers: int = 4
    groups_per_step: int = 5
    group_size: int = 8
    slots: int = 20

    def model_config(self, vocabulary: int) -> Any:
        """Of transformers; 3.2 million parameters by default."""
        from transformers import Qwen3Config

        return Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.hidden // 32),
            num_key_value_heads=max(1, self.hidden // 64),
            head_dim=32,
            intermediate_size=3 * self.hidden,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            initializer_range=0.05,
        )


def make_compute(folder: Path, shape: Shape, *, seed: int) -> Path:
    """Write model, data and config of the computing workload into `folder`; returns the config."""
    import torch
    from transformers import Qwen3ForCausalLM

    from grpo_async.quickstart.rows import write_rows
    from grpo_async.quickstart.tasks import TASKS
    from grpo_async.quickstart.tokenizer import train_tokenizer

    task = TASKS["think"]
    tokenizer = train_tokenizer(task.vocabulary())
    write_rows(folder / "train.jsonl", map(task.row, task.training_items()), seed=seed)
    config = shape.model_config(len(tokenizer))
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    settings = {
        "run": {"name": "compute", "seed": seed},
        "model": {"path": str(folder / "model")},
        "data": {"train": {"type": "jsonl", "path": str(folder / "train.jsonl")}},
        "rollout": {
            "groups_per_step": shape.groups_per_step,
            "group_size": shape.group_size,
            "max_completion_tokens": MAX_COMPLETION_TOKENS,
        },
        "rewards": [{"function": "benchmarks._asynchrony_workload:digits"}],
        "inference": {"engine": "embedded", "max_model_len": 128, "embedded": {"max_slots": shape.slots}},
        "loss": {"type": "dapo"},
        "optimizer": {"lr": 5e-4, "warmup_steps": 2, "betas": [0.9, 0.99]},
        "training": {"micro_batch_tokens": 2048},
    }
    path = folder / "compute.yaml"
    path.write_text(json.dumps(settings, indent=1), encoding="utf-8")  # JSON is YAML
    return path
