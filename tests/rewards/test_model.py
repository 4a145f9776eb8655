"""Reward models by name: what TRL's trainer makes of the same model, in a process of its own."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_async.config.sections import RewardSection
from grpo_async.errors import ConfigError
from grpo_async.rewards import RewardError, load_rewards

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
TEXTS = ["two", "the number two, and some more words", "2"]
CHATS = [[{"role": "assistant", "content": text}] for text in TEXTS]


@pytest.fixture(scope="module")
def judge(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with one output; its tokenizer has a chat template of its own and no padding token."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("rewards") / "judge"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template, tokenizer.pad_token = TEMPLATE, None
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_labels=1, initializer_range=0.3,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def _score(section: RewardSection, prompts: list[Any], completions: list[Any]) -> list[float | None]:
    (reward,) = load_rewards([section])
    try:
        assert reward.name == "judge"
        columns = {"settings": ["a column of the data"] * len(prompts)}
        outcome = asyncio.run(reward.score(prompts, completions, [[1]] * len(prompts), columns))
        return outcome.values
    finally:
        reward.close()


def _as_trl(folder: Path, prompts: list[Any], completions: list[Any]) -> list[float]:
    """By TRL's own `_calculate_rewards`, on a model and tokenizer as its trainer prepares them."""
    from accelerate import Accelerator
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    trainer: Any = object.__new__(GRPOTrainer)
    trainer.__dict__.update(
        accelerator=Accelerator(cpu=True),
        reward_funcs=[model],
        reward_processing_classes=[tokenizer],
        reward_func_names=["judge"],
        chat_template_kwargs={},
        environments=None,
        state=SimpleNamespace(global_step=0),
        args=SimpleNamespace(past_index=-1, device=torch.device("cpu"), report_to=[]),
        is_deepspeed_enabled=False,
    )
    inputs = [{"prompt": prompt} for prompt in prompts]
    ids = [[1]] * len(prompts)
    rewards: torch.Tensor = trainer._calculate_rewards(inputs, prompts, completions, ids)
    scores: list[float] = rewards[:, 0].tolist()
    return scores


@pytest.mark.slow
@pytest.mark.parametrize("is_chat", [False, True], ids=["text", "messages"])
def test_a_reward_model_says_what_it_says_to_trl(judge: Path, is_chat: bool) -> None:
    prompts: list[Any] = ["What is 1 + 1? "] * 3
    if is_chat:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    completions: list[Any] = CHATS if is_chat else TEXTS
    section = RewardSection(model=str(judge), arguments={"device": "cpu", "batch_size": 2})
    found = _score(section, prompts, completions)
    assert found == pytest.approx(_as_trl(judge, prompts, completions), abs=1e-5)
    assert len({round(value or 0.0, 4) for value in found}) == 3


def test_a_wrong_setting_and_a_model_without_its_head_are_named(judge: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"batchsize: there is no such setting; the settings are \['batch_size'"):
        load_rewards([RewardSection(model=str(judge), arguments={"batchsize": 2})])
    # a model without its head: what it would say is random
    from safetensors.torch import load_file, save_file

    headless = Path(shutil.copytree(judge, tmp_path / "judge"))

    tensors = load_file(judge / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, headless / "model.safetensors", metadata={"format": "pt"})
    section = RewardSection(model=str(headless), arguments={"device": "cpu"})
    with pytest.raises(RewardError, match=r"it lacks score\.weight"):
        _score(section, ["a"], ["b"])
