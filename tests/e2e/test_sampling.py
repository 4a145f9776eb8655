"""Settings of sampling in a real run: few-shot prompts without a chat template, stop strings, truncated sampling; and an evaluation
with settings of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from grpo_async.inference.sampling import find_stop
from grpo_async.records import GroupStatus
from grpo_async.store.rows import RolloutRow
from tests.e2e.support import REPOSITORY, SMALL, Run, make_run, rewards
from tests.support.stored import read_groups

STOP = ["</th", "5"]  # the model closes thoughts that it has not begun; the token has more text
_SHOTS = "3 + 1 = 4\n5 - 2 = 3\n"


def _prompts(path: Path, first: range) -> str:
    rows = [{"prompt": f"{_SHOTS}{a} + {b} =", "answer": str(a + b)} for a in first for b in range(1, 5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return json.dumps({"type": "jsonl", "path": str(path)})


def _trained(run: Run) -> list[RolloutRow]:
    groups = read_groups(run.folder / "rollouts")
    return [rollout for group in groups if group.status is GroupStatus.TRAINED for rollout in group.rollouts]


def test_a_few_shot_run_stops_at_its_strings_and_trains_what_was_sampled_with_the_weights_of_what_was_cut_off(
    tmp_path: Path,
) -> None:
    run = make_run(
        tmp_path,
        "quickstart.yaml",
        [
            *SMALL,
            rewards("user_rewards:by_place"),
            f"data.train={_prompts(tmp_path / 'train.jsonl', range(1, 5))}",
            f"rollout.stop={json.dumps(STOP)}",
            "rollout.top_p=0.8",
            "rollout.max_staleness=0",
            "rollout.max_completion_tokens=32",
            "loss.proximal=recomputed",
            "loss.correction={level: token, action: truncate}",
            f"evaluation.data={_prompts(tmp_path / 'held.jsonl', range(5, 7))}",
            "evaluation.baseline_column=null",
            "evaluation.stop=['think', '3']",
            "evaluation.temperature=1.0",
            "evaluation.top_k=3",
            "training.max_steps=3",
        ],
    )
    summary, _ = run.complete()
    assert summary["steps"] == 3
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / ".cache/quickstart/seed_0/model")
    trained = _trained(run)
    for rollout in trained:
        _check_ends(rollout, tokenizer, STOP)
    assert {rollout.turns[0].stop_reason for rollout in trained} - {None} == set(STOP)
    folders = sorted((run.folder / "evaluations").iterdir())
    evaluated = [rollout for folder in folders for group in read_groups(folder) for rollout in group.rollouts]
    for rollout in evaluated:
        _check_ends(rollout, tokenizer, ["think", "3"])
    assert {rollout.turns[0].stop_reason for rollout in evaluated} >= {"think"}
    # the same weights sampled and trained: what the trainer has less is the probability of what was cut off
    differences = np.concatenate([np.subtract(rollout.trainer_logprobs, rollout.logprobs) for rollout in trained])
    assert differences.max() < 1e-3
    assert np.log(0.8) - 1e-3 < differences.min() < -0.01
    weights = np.concatenate([np.array(rollout.weights) for rollout in trained])
    np.testing.assert_allclose(weights, np.exp(differences), rtol=1e-3)


def _check_ends(rollout: RolloutRow, tokenizer: Any, stop: Sequence[str]) -> None:
    """Nothing was sampled beyond the token that completes a string; the text ends before the string."""
    ids, (turn,), (message,) = list(rollout.completion_ids), rollout.turns, rollout.messages
    text = tokenizer.decode(ids, skip_special_tokens=True)
    found = find_stop(text, stop)
    assert find_stop(tokenizer.decode(ids[:-1], skip_special_tokens=True), stop) is None
    assert turn.stop_reason == (text[slice(*found)] if found else None)
    assert message.content == (text[: found[0]] if found else text)
    assert rollout.truncated == (found is None and ids[-1] != tokenizer.eos_token_id)
    assert len(rollout.logprobs) == len(rollout.mask) == len(ids)
    assert set(rollout.mask) == {1}


def test_under_a_small_top_k_the_trainer_cuts_the_policy_off_where_the_sampler_did(tmp_path: Path) -> None:
    settings = ["rollout.top_k=4", "rollout.top_p=0.9", "rollout.max_staleness=0", "training.max_steps=2"]
    run = make_run(tmp_path, "quickstart.yaml", [*SMALL, *settings, "loss.type=gspo", "evaluation=null"])
    summary, _ = run.complete()
    assert summary["steps"] == 2
    trained = _trained(run)
    sampler, trainer = (
        np.concatenate([getattr(rollout, name) for rollout in trained]) for name in ("logprobs", "trainer_logprobs")
    )
    np.testing.assert_allclose(trainer, sampler, atol=1e-3)
    assert sampler.min() < -0.5
