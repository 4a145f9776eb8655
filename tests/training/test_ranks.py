"""What a rank does beside the step itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_async.training import ranks
from grpo_async.training.ranks import StepCommand, TrainerContext
from tests.trainer.fakes import loop_config


@pytest.mark.parametrize(("sleeps", "device"), [(True, "cuda"), (False, "cuda"), (True, "cpu")])
def test_where_servers_wake_up_after_a_step_each_rank_gives_its_cache_back_before_rank_0_goes_on(
    monkeypatch: pytest.MonkeyPatch, sleeps: bool, device: str
) -> None:
    """The gather is what rank 0 waits for; its peaks are those of the first step."""
    events: list[str] = []
    peaks = iter([7, 9])
    monkeypatch.setattr(ranks, "train_step", lambda *_, **__: events.append("train"))
    monkeypatch.setattr(ranks, "peak_bytes", lambda _: next(peaks))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty"))

    def gather(numbers: torch.Tensor) -> list[torch.Tensor]:
        events.append("gather")
        return [numbers, numbers + 1]

    vllm = {"vllm": {"sleep_while_training": sleeps}}
    parts: Any = dict.fromkeys(TrainerContext.__slots__)
    config = loop_config(inference=vllm, rollout={"groups_per_step": 1, "group_size": 2, "max_staleness": 0})
    parts |= {"config": config, "device": torch.device(device), "channel": SimpleNamespace(gather=gather)}
    context = TrainerContext(**parts)
    for _ in range(2):
        context.step(StepCommand(minibatches=[], lr=0.1), [])
    each = ["train", "empty", "gather"]
    assert events == (each + each if sleeps and device == "cuda" else ["train", "gather", "train"])
    assert context.peaks == [7, 8]
