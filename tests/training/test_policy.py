"""The policy's forward against a plain forward of the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.batching.pack import MicroBatch, pack_rank
from grpo_async.batching.plan import plan_batch
from grpo_async.config.model_sections import ModelSection
from grpo_async.errors import ConfigError
from grpo_async.training.load import load_policy
from grpo_async.training.policy import Policy
from tests.support.rank_jobs import random_samples
from tests.support.records import make_sample


def _load(folder: Path, *, temperature: float = 1.0, max_model_len: int = 128) -> Policy:
    section = ModelSection(path=str(folder))
    return load_policy(section, temperature=temperature, chunk_tokens=16, max_model_len=max_model_len)


def _save_model(folder: Path, **settings: Any) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(**sizes, num_key_value_heads=1, intermediate_size=64, **settings)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def _pack(samples: list[Any], *, row_tokens: int | None) -> MicroBatch:
    lengths = [len(sample.token_ids) for sample in samples]
    plan = plan_batch(lengths, num_ranks=1, micro_batch_tokens=4096, row_tokens=row_tokens, pack=True)
    (batch,) = pack_rank(samples, [1.0] * len(samples), plan, 0, trainer_version=0)
    return batch


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_logprobs_are_those_of_each_sample_alone(tiny_model: Path, temperature: float) -> None:
    """Neither a neighbour in the row, nor padding, nor a later token changes them: within 1e-4 in fp32."""
    policy = _load(tiny_model, temperature=temperature)
    samples = random_samples(9)
    with torch.no_grad():
        packed = policy(_pack(samples, row_tokens=70)).logprobs
        # in the order in which the batch holds the targets
        found = dict.fromkeys(range(len(samples)))
        batch = _pack(samples, row_tokens=70)
        start = 0
        remaining = dict(enumerate(samples))
        while start < batch.num_trained_tokens:
            index = next(
                number
                for number, sample in remaining.items()
                if batch.target_ids[start : start + sample.num_trained_tokens].tolist()
                == [t for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m]
            )
            sample = remaining.pop(index)
            stop = start + sample.num_trained_tokens
            logits = policy.model(input_ids=torch.tensor([sample.token_ids])).logits[0] / temperature
            plain = torch.log_softmax(logits[:-1], dim=-1).gather(-1, torch.tensor(sample.token_ids[1:])[:, None])[:, 0]
            torch.testing.assert_close(packed[start:stop], plain[-sample.num_trained_tokens :], atol=1e-4, rtol=0)
            found[index] = True
            start = stop
    assert all(found.values())


def test_dropout_of_the_config_is_off(tmp_path: Path) -> None:
    policy = _load(_save_model(tmp_path, attention_dropout=0.5))
    batch = _pack([make_sample(prompt=list(range(20)), completion=list(range(20)))], row_tokens=None)
    with torch.no_grad():
        assert torch.equal(policy(batch).logprobs, policy(batch).logprobs)


def test_a_sliding_window_shorter_than_a_sample_is_refused(tmp_path: Path) -> None:
    folder = _save_model(tmp_path, use_sliding_window=True, sliding_window=16, max_window_layers=0)
    with pytest.raises(ConfigError, match=r"sliding window of 16 tokens.*to at most 16"):
        _load(folder, max_model_len=128)
    _load(folder, max_model_len=16)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: cannot load"):
        _load(tmp_path)
