"""What scoring hands to reward functions and what it makes of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from grpo_async.batching.minibatch import Minibatch
from grpo_async.config.sections import AdvantageSection
from grpo_async.records import (
    AGENT_REWARD,
    Branch,
    Origin,
    RolloutCompletion,
    RolloutGroup,
    RolloutStatus,
    ScoredGroup,
    TaggedMessage,
    ToolCallRecord,
)
from grpo_async.rewards import RewardFunction
from grpo_async.scoring.scorer import Scorer
from tests.support.records import make_completion, make_prompt, make_turn


def _score(
    completions: Sequence[RolloutCompletion],
    *functions: Any,
    environments: Sequence[Any] | None = None,
    **settings: Any,
) -> ScoredGroup:
    """Advantages are not divided by the standard deviation."""
    scorer = Scorer(
        [RewardFunction(function) for function in functions],
        **{"advantage": AdvantageSection(type="none"), "train_zero_variance": False, **settings},
    )
    group = RolloutGroup(prompt=make_prompt(3, "1 + 1 =", answer="7"), completions=completions)
    return asyncio.run(scorer.score(group, environments=environments))


def zero(completions: list[Any]) -> list[float]:
    return [0.0] * len(completions)


def test_only_the_rewards_of_its_source_score_a_row() -> None:
    """The others are not called, and give None."""

    def ours(completions: list[Any]) -> list[float]:
        return [float(index) for index in range(len(completions))]

    def theirs(label: list[str]) -> list[float]:
        raise AssertionError("called for a row of another source")

    scorer = Scorer(
        [RewardFunction(theirs), RewardFunction(ours)],
        advantage=AdvantageSection(type="none"),
        train_zero_variance=False,
    )
    prompt = replace(make_prompt(3), source="math", rewards=["ours"], temperature=0.5)
    group = RolloutGroup(prompt=prompt, completions=[make_completion("r0"), make_completion("r1")])
    scored = asyncio.run(scorer.score(group))
    assert scored.reward_parts == [{"theirs": None, "ours": 0.0}, {"theirs": None, "ours": 1.0}]
    assert (scored.rewards, [sample.advantage for sample in scored.samples]) == ([0.0, 1.0], [-0.5, 0.5])
    assert {sample.temperature for sample in scored.samples} == {0.5}


def test_environment_rewards_are_columns_like_the_functions_and_count_by_their_weight() -> None:
    """R1.13: environment rewards reach the reward columns. 0 + 2 x 3 = 6, 0 + 2 x 1 = 2; no reward of it: 0 alone."""
    completions = [
        replace(make_completion(f"r{index}"), environment_rewards={"Game": reward})
        for index, reward in enumerate([3.0, 1.0, None])
    ]
    scored = _score(completions, zero, environment_weights={"Game": 2.0})
    assert scored.reward_parts == [
        {"zero": 0.0, "Game": 3.0}, {"zero": 0.0, "Game": 1.0}, {"zero": 0.0, "Game": None},
    ]  # fmt: skip
    assert scored.rewards == [6.0, 2.0, 0.0]
    assert [sample.rewards["Game"] for sample in scored.samples] == [3.0, 1.0, None]


def test_only_trainable_completions_are_scored_and_every_column_is_theirs() -> None:
    """R6.6: of four rollouts the second failed: three entries in every list, none of them the second's."""
    completions = [
        replace(make_completion(f"r{index}", ids=[10 + index], failed=index == 1), reward_columns={"seat": index})
        for index in range(4)
    ]
    seen: dict[str, Any] = {}

    def judge(
        prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        names = ("answer", "seat", "environments")
        seen.update({name: columns[name] for name in names}, prompts=len(prompts), ids=completion_ids)
        return [float(ids[0]) for ids in completion_ids]

    scored = _score(completions, judge, environments=["a", "b", "c", "d"])
    assert seen == {
        "prompts": 3, "ids": [[10], [12], [13]], "answer": ["7"] * 3, "seat": [0, 2, 3], "environments": ["a", "c", "d"],
    }  # fmt: skip
    assert scored.rewards == [10.0, 12.0, 13.0]
    assert [sample.rollout_id for sample in scored.samples] == ["r0", "r2", "r3"]


def by_index(completions: list[Any], **_: Any) -> list[float]:
    return [float(index) for index in range(len(completions))]


def test_rewards_see_the_prompt_that_the_environment_made() -> None:
    """R1.13: the text from reset() is part of the prompts that reward functions get."""
    seen: list[Any] = []

    def reward(prompts: list[Any], **_: Any) -> list[float]:
        seen.extend(prompts)
        return [0.0, 1.0]

    said = TaggedMessage(role="user", content="find the exit", origin=Origin.ENVIRONMENT)
    _score([replace(make_completion("a"), prompt_messages=[said]), make_completion("b")], reward)
    assert seen == [[{"role": "user", "content": "find the exit"}], [{"role": "user", "content": "1 + 1 ="}]]


@pytest.mark.parametrize(("train_truncated", "trained"), [(True, ["a", "b", "c"]), (False, ["a", "c"])])
def test_truncated_completions_count_in_the_mean_and_are_trained_only_if_wanted(
    train_truncated: bool, trained: list[str]
) -> None:
    """rollout.overlong: rewards 0, 1, 2: mean 1 either way."""
    completions = [
        make_completion("a"),
        replace(make_completion("b"), status=RolloutStatus.TRUNCATED),
        make_completion("c"),
    ]
    scored = _score(completions, by_index, train_truncated=train_truncated)
    assert [sample.rollout_id for sample in scored.samples] == trained
    assert {sample.rollout_id: sample.advantage for sample in scored.samples}["c"] == 1.0
    assert scored.rewards == [0.0, 1.0, 2.0]


def test_a_list_that_a_tool_returned_is_the_content_of_its_message_as_in_trl() -> None:
    """What the model sees and the record shows is text, and so are other results."""
    records = [
        ToolCallRecord(tool_call_id=name, name="q", arguments={}, result="[1]", failed=False, duration_s=0.0, returned=returned)
        for name, returned in (("call1", [1]), ("call2", None))
    ]  # fmt: skip
    results = [
        TaggedMessage(role="tool", content="[1]", origin=Origin.TOOL, tool_call_id=r.tool_call_id) for r in records
    ]
    turn = replace(make_turn([5]), messages=results, tool_calls=records)
    contents: list[Any] = []

    def reward(completions: list[Any]) -> list[float]:
        contents.extend(message["content"] for message in completions[0])
        return [0.0] * len(completions)

    _score([replace(make_completion("r0"), turns=[turn])], reward)
    assert contents == [[1], "[1]"]


def test_two_rewards_that_log_under_one_name_do_not_overwrite_each_other() -> None:
    def logging(value: float) -> Any:
        def reward(completions: list[Any], log_extra: Any, log_metric: Any) -> list[float]:
            log_metric("accuracy", value)
            for column in ("parsed", f"only {value}", "seat"):
                log_extra(column, [value] * len(completions))
            return [value] * len(completions)

        return reward

    rewards = [RewardFunction(logging(value), name=name) for name, value in (("a", 1.0), ("b", 0.0))]
    scorer = Scorer(rewards, advantage=AdvantageSection(type="none"), train_zero_variance=True)
    completion = replace(make_completion("r0"), reward_columns={"seat": 7})
    scored = asyncio.run(scorer.score(RolloutGroup(prompt=make_prompt(3), completions=[completion])))
    assert scored.metrics["accuracy"] == 0.5
    assert scored.extra_columns == {
        "a/parsed": [1.0], "b/parsed": [0.0], "only 1.0": [1.0], "only 0.0": [0.0], "a/seat": [1.0], "b/seat": [0.0],
    }  # fmt: skip


def _with_branches(rollout_id: str, *rewards: float | None, agent: float | None = None) -> RolloutCompletion:
    """Prompt [1, 2], answer [5, 6]; each branch goes on from [1, 2, 5] with [7]; `rewards` are those of the branches."""
    branches = [
        Branch(name=f"b{number}", parent=0, prompt_ids=[1, 2, 5], turns=[make_turn([7], version=3)], reward=reward)
        for number, reward in enumerate(rewards, start=1)
    ]
    own = {} if agent is None else {AGENT_REWARD: agent}
    return replace(make_completion(rollout_id, version=4), branches=branches, environment_rewards=own)


def test_every_path_of_a_rollout_is_a_sample_with_its_advantage() -> None:
    """Tokens of another path in the prompt of a branch are not trained there."""
    scored = _score([_with_branches("g3-r0", None, None), make_completion("g3-r1", version=5)], by_index)
    assert [(sample.rollout_id, sample.root_id, sample.advantage) for sample in scored.samples] == [
        ("g3-r0", "g3-r0", -0.5), ("g3-r0.b1", "g3-r0", -0.5), ("g3-r0.b2", "g3-r0", -0.5), ("g3-r1", "g3-r1", 0.5),
    ]  # fmt: skip
    branch = scored.samples[1]
    columns = [list(map(float, each)) for each in (branch.token_ids, branch.loss_mask, branch.sampler_logprobs)]
    assert columns == [[1, 2, 5, 7], [0, 0, 0, 1], [0, 0, 0, -0.5]]
    assert list(branch.policy_versions) == [-1, -1, -1, 3]
    # the oldest trained token, over all branches
    assert (scored.oldest_version, scored.group.completions[0].oldest_version) == (3, 3)
    assert [completion.num_sampled_tokens for completion in scored.group.completions] == [4, 2]
    assert Minibatch(groups=[scored]).num_masked == 0


def test_branches_may_have_their_own_reward() -> None:
    """Rewards of the rollouts 1 and 0. Branch 1 of the first says 0: as [0, 0] it has advantage 0; branch 2 says 3: as [3, 0],
    mean 1.5, it has 1.5."""
    completions = [_with_branches("g3-r0", 0.0, 3.0, None, agent=1.0), _with_branches("g3-r1", agent=0.0)]
    scored = _score(completions, environment_weights={AGENT_REWARD: 1.0})
    assert [(sample.rollout_id, sample.advantage, sample.reward) for sample in scored.samples] == [
        ("g3-r0", 0.5, 1.0), ("g3-r0.b1", 0.0, 0.0), ("g3-r0.b2", 1.5, 3.0), ("g3-r0.b3", 0.5, 1.0), ("g3-r1", -0.5, 0.0),
    ]  # fmt: skip


def test_a_group_whose_branches_alone_differ_has_a_signal() -> None:
    completions = [_with_branches("g3-r0", 0.0, agent=1.0), _with_branches("g3-r1", agent=1.0)]
    for kind in ("group", "batch"):
        scorer = Scorer(
            [],
            advantage=AdvantageSection(type=kind),  # type: ignore[arg-type]
            train_zero_variance=False,
            environment_weights={AGENT_REWARD: 1.0},
        )
        group = RolloutGroup(prompt=make_prompt(3), completions=completions)
        [scored] = scorer.advantages.over_step([asyncio.run(scorer.score(group))])
        # [0, 1]: mean 0.5, std 0.7071
        assert [sample.advantage for sample in scored.samples] == pytest.approx([0.0, -0.70701, 0.0], abs=1e-5)
