"""A policy learns from a teacher, token by token, without a reward function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_async.quickstart.prepare import prepare
from tests.e2e.support import REPOSITORY, SMALL, make_run, rows_of
from tests.rewards.reward_server import reward_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_policy_comes_close_to_a_served_teacher(tmp_path: Path) -> None:
    """The student is the quickstart's model with noise in its weights, the teacher that model."""
    prepare(REPOSITORY)
    source = REPOSITORY / ".cache/quickstart/seed_0/model"
    teacher: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    student: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn_like(parameter))
    student.save_pretrained(tmp_path / "student")
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "student")

    @torch.no_grad()
    def prompt_logprobs(body: dict[str, Any]) -> Any:
        ids = torch.tensor(body["prompt"])
        scores = teacher(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        entries = [
            {str(token): {"logprob": score}} for token, score in zip(ids[1:].tolist(), scores.tolist(), strict=True)
        ]
        return {"choices": [{"prompt_logprobs": [None, *entries]}]}

    with reward_server() as server:
        server.otherwise = prompt_logprobs
        run = make_run(
            tmp_path,
            "quickstart.yaml",
            [
                *SMALL,
                f"model.path={tmp_path / 'student'}",
                "rewards=[]",
                "evaluation=null",
                "training.max_steps=25",
                f"distillation.teachers.large.url={server.url}",
            ],
        )
        run.complete()
    assert -run.metrics()[0]["rewards/distillation/mean"] > 0.05
    rollouts = [each for row in rows_of(run.folder) for each in row["rollouts"] if each["completion_ids"]][:100]
    after: Any = AutoModelForCausalLM.from_pretrained(run.folder / "model", dtype=torch.float32)
    assert _reverse_kl(after, teacher, rollouts) < 0.5 * _reverse_kl(student, teacher, rollouts)


@torch.no_grad()
def _reverse_kl(student: Any, teacher: Any, rollouts: list[dict[str, Any]]) -> float:
    """Nats a token, over the whole vocabulary, where the policy sampled."""
    found = []
    for each in rollouts:
        ids = torch.tensor([[*each["prompt_ids"], *each["completion_ids"]]])
        first = len(each["prompt_ids"]) - 1
        ours, theirs = (model(ids).logits[0, first:-1].log_softmax(-1) for model in (student, teacher))
        found.append((ours.exp() * (ours - theirs)).sum(-1))
    return float(torch.cat(found).mean())
