"""Which completions people are shown of a step."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_async.records import RolloutGroup, ScoredGroup
from grpo_async.trainer.report import example_of
from tests.support.records import make_completion, make_prompt


def _group(prompt: str, rewards: Sequence[float | None]) -> ScoredGroup:
    """Its completions say their rewards; the first, which failed, has none."""
    completions = [make_completion(failed=True), *(make_completion(text=f"worth {reward}") for reward in rewards)]
    group = RolloutGroup(prompt=make_prompt(text=prompt), completions=completions)
    return ScoredGroup(group=group, samples=[], rewards=rewards, reward_parts=[{} for _ in rewards])


def test_the_best_and_the_worst_of_the_group_whose_rewards_are_furthest_apart() -> None:
    groups = [_group("easy", [1.0, 0.5]), _group("hard", [0.25, None, 1.0, 0.0]), _group("unscored", [None])]
    assert example_of(groups) == {
        "prompt": "hard",
        "completions": [{"reward": 1.0, "text": "worth 1.0"}, {"reward": 0.0, "text": "worth 0.0"}],
    }
    assert example_of([_group("unscored", [None])]) is None
