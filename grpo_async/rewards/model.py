"""A reward model by name: a sequence classifier with one output, in one process next to the trainer. It gets the same
input as a model in TRL's `reward_funcs`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from grpo_async.config.base import ComputeDtype, Count, StrictModel, read_arguments
from grpo_async.errors import ConfigError, GrpoAsyncError


class RewardModelError(GrpoAsyncError):
    """A reward model cannot be loaded, or is not a reward model."""


class RewardModelSettings(StrictModel, strict=True):
    """`model` and `arguments` of the section."""

    model: str
    """A folder, or a name on the hub."""
    revision: str | None = None
    """Commit, tag or branch on the hub; null = the newest."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda:\d+)$")
    """auto: the first GPU that the trainer sees, which it shares with rank 0, or the CPU where there is none. cuda:N: GPU N of the
    machine, as CUDA_VISIBLE_DEVICES counts them, also one that the run itself does not use."""
    dtype: Literal["auto", ComputeDtype] = "auto"
    """auto: as the files have it."""
    batch_size: Count = 8
    """Completions in one forward pass."""
    max_tokens: Count | None = None
    """Longer texts are cut at their beginning; null = never."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables of its chat template."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""


def _check(arguments: Mapping[str, Any]) -> None:
    read_arguments(RewardModelSettings, arguments["settings"])


def startup_notes(settings: Mapping[str, Any]) -> list[str]:
    """Notes that are known before the model is loaded.

    Raises:
        ConfigError: the folder does not hold a model with one output.
    """
    chosen = read_arguments(RewardModelSettings, settings)
    name, where = chosen.model, f"on {chosen.device}, in a process of its own"
    folder = Path(name)
    if not folder.exists():
        return [f"reward model {name}: no local folder, so it is taken as a hub name and not checked here; {where}"]
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} is not the folder of a Hugging Face model: {error}") from error
    outputs = config.get("num_labels") or len(config.get("id2label") or ()) or None
    architectures = config.get("architectures") or []
    if not all(str(each).endswith("ForSequenceClassification") for each in architectures) or outputs not in (None, 1):
        raise ConfigError(
            f"{name} is not a reward model: its config.json says {', '.join(architectures) or 'nothing of its class'}"
            f"{f' with {outputs} outputs' if outputs else ''}; a sequence classifier with one output (num_labels: 1) is needed"
        )
    return [f"reward model {name} {where}"]


def model_reward(prompts: Sequence[Any], completions: Sequence[Any], *, settings: Mapping[str, Any]) -> list[float]:
    """Return the model's output for each completion (text or messages); without any, the model is only loaded."""
    scorer = _scorer(read_arguments(RewardModelSettings, settings).model_dump_json())
    return scorer.score(prompts, completions)


model_reward.startup_notes = startup_notes  # type: ignore[attr-defined]
model_reward.check_arguments = _check  # type: ignore[attr-defined]
model_reward.is_loaded_first = True  # type: ignore[attr-defined]


@cache
def _scorer(settings: str) -> _Scorer:
    return _Scorer(RewardModelSettings.model_validate_json(settings))


class _Scorer:
    """Model and tokenizer in this process's memory."""

    def __init__(self, settings: RewardModelSettings) -> None:
        if settings.device.startswith("cuda:"):
            os.environ["CUDA_VISIBLE_DEVICES"] = settings.device.partition(":")[2]  # torch is not imported yet
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from_hub = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(settings.model, **from_hub)
            model, report = AutoModelForSequenceClassification.from_pretrained(
                settings.model, num_labels=1, dtype=settings.dtype, output_loading_info=True, **from_hub
            )
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise RewardModelError(f"{settings.model} cannot be loaded as a sequence classifier: {error}") from error
        if missing := sorted(report["missing_keys"]):
            raise RewardModelError(
                f"{settings.model} is not a reward model: it lacks {', '.join(missing[:5])}, which would be random numbers"
            )
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        # these models read their output at the last token that is not padding
        model.config.get_text_config().pad_token_id = self._tokenizer.pad_token_id
        wants_gpu = settings.device.startswith("cuda") or (settings.device == "auto" and torch.cuda.is_available())
        self._device = torch.device("cuda" if wants_gpu else "cpu")
        self._model = model.to(self._device).eval()
        self._settings = settings

    def score(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """Scores of the completions, computed in batches of texts of similar length. [num_completions]"""
        import torch

        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        ids = [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        if self._settings.max_tokens is not None:
            ids = [each[-self._settings.max_tokens :] for each in ids]
        scores = [0.0] * len(ids)
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        for start in range(0, len(order), self._settings.batch_size):
            chosen = order[start : start + self._settings.batch_size]
            batch = self._tokenizer.pad(
                {"input_ids": [ids[index] for index in chosen]}, padding_side="right", return_tensors="pt"
            )
            with torch.inference_mode():
                logits = self._model(**batch.to(self._device)).logits[:, 0]
            for index, score in zip(chosen, logits.float().tolist(), strict=True):
                scores[index] = score
        return scores

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + str(completion)
        arguments = self._settings.chat_template_kwargs
        text: str = self._tokenizer.apply_chat_template([*prompt, *completion], tokenize=False, **arguments)
        return text
