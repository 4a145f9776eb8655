"""Whole runs with the user's environments, tools and rollout functions, from the command line and from a notebook."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from grpo_async import Run, load_config, train
from grpo_async.errors import ConfigError
from tests.e2e.support import REPOSITORY, SMALL, assert_on_policy, make_run
from tests.support.chat_families import template_path
from tests.support.stored import read_groups

pytestmark = pytest.mark.slow

SHORT = (*SMALL, "evaluation.num_prompts=8", "rollout.zero_variance=train", "training.max_steps=3")
# a model that never saw a tool hardly ends a turn otherwise
ENDS = "model.end_of_turn_tokens=['</think>', '1', '2', '3', '4', '5', '6', '7', '8']"
TRL = "tests.envs.trl_style_environment"
TOOLS = (
    f"model.chat_template={template_path('qwen2_5')}",
    ENDS,
    "optimizer.lr=1.0e-6",  # what it is rewarded for here is no use to it
    "rollout.max_completion_tokens=300",
    "rollout.max_turn_tokens=40",
    "rollout.max_turns=3",
    "inference.max_model_len=1600",
)


def _write_rows(path: Path, count: int) -> Path:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{number} + 1 + 1 + 1 = "}],
            "environment": "wordle" if number % 2 else "increment",
            "word": "crane",
            "target": 4,
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_environments_tools_and_rewards_written_for_trl_run_unchanged(tmp_path: Path) -> None:
    """R1.13, R3.3: two environments chosen by a column, a tool beside them, rewards that read `environments`."""
    train = _write_rows(tmp_path / "train.jsonl", 40)
    run = make_run(
        tmp_path,
        "quickstart.yaml",
        (
            *SHORT,
            *TOOLS,
            f"data.train.path={train}",
            "training.max_steps=2",
            "evaluation=null",
            "tool_calling={parser: 'tests.e2e.user_code:parse'}",
            f"tools=[{{function: '{TRL}:multiply'}}]",
            f"environments.wordle={{factory: '{TRL}:WordleEnv'}}",
            f"environments.increment={{factory: '{TRL}:IncrementEnv', reward_weight: 0.5}}",
            f"rewards=[{{function: '{TRL}:only_wordle'}}]",
        ),
    )
    run.complete()
    metrics = run.metrics()[-1]
    assert metrics["tools/call_frequency"] > 0.5
    assert metrics["rollout/num_turns"] > 1.0
    assert any("rewards/IncrementEnv/mean" in line for line in run.metrics())
    rollouts = [rollout for group in read_groups(run.folder / "rollouts") for rollout in group.rollouts]
    prompts = {r.reset_messages[-1].content.rpartition("= ")[2] for r in rollouts if r.reset_messages}
    assert prompts == {"You have 6 tries to guess a word of 5 letters.", "Increment the counter by 4."}
    results = {call.result for rollout in rollouts for turn in rollout.turns for call in turn.tool_calls}
    # only its environment's tools are a rollout's
    assert any("there is no tool 'guess'" in result for result in results)
    assert any(result.isdecimal() for result in results)


def test_a_notebook_trains_with_a_rollout_function_written_for_trl_and_looks_at_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every batch is generated after the push of the weights before it: synchronous, with a learning rate at which old weights
    would show, the ratio of every token is 1 within 1e-3 (fp32 on both sides). One epoch of ten rows: the last step has two."""
    monkeypatch.chdir(REPOSITORY)
    settings = (
        *SHORT,
        f"run.dir={tmp_path}",
        "record.report=false",
        "training.max_steps=null",
        "training.epochs=1",
        "data.train.limit=10",
        "rollout.max_staleness=0",
        "optimizer.lr=0.001",
        "rollout_function={function: 'tests.e2e.user_code:rollout_func'}",
        "rewards=[{function: 'tests.e2e.user_code:step_is_known'}, {function: 'grpo_async.rewards.text:exact_match'}]",
    )
    config = load_config("configs/quickstart.yaml", settings)

    async def cell() -> Run:
        return train(config)

    run = asyncio.run(cell())
    metrics = run.metrics()
    assert list(metrics["step"]) == [1, 2, 3]
    assert list(metrics["epoch"])[-1] == 1.0
    assert list(metrics["ledger/groups/trained"]) == [4.0, 8.0, 10.0]
    assert list(metrics["ledger/groups/stale"])[-1] == 0
    assert list(metrics["rewards/step_is_known/mean"]) == [1.0, 1.0, 1.0]
    assert_on_policy(metrics.to_dict("records"))
    everything, some = run.rollouts(), run.rollouts("step = 2 and reward > 1.5")
    assert len(everything) > len(some)
    assert (some["reward"] > 1.5).all()
    assert isinstance(everything["completion_text"][0], str)
    assert len(run.evaluations()) == 2
    assert len(run.rollouts(evaluation="latest")) == 8
    assert run.diagnosis().text
    with pytest.raises(ConfigError, match="resume"):
        train(config)  # its folder is in use
