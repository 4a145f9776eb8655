from __future__ import annotations

from pathlib import Path

import pytest

from grpo_async.config.sections import RewardSection
from grpo_async.errors import ConfigError
from grpo_async.rewards import load_rewards
from tests.rewards.helpers import FAULTY, TRL


def _message(*functions: str, **section: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_rewards([RewardSection.model_validate({"function": function, **section}) for function in functions])
    return str(caught.value)


def test_a_module_of_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards_of_the_user.py").write_text("def f(completions):\n    return [1.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/usr/lib/nothing-here"])
    (reward,) = load_rewards([RewardSection(function="rewards_of_the_user:f")])
    assert reward.name == "f"


def test_a_module_that_raises_says_what_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_at_import.py").write_text("\nvalue = 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = _message("broken_at_import:f")
    assert "raised ZeroDivisionError" in message
    assert "broken_at_import.py, line 2" in message


@pytest.mark.parametrize(
    ("function", "section", "text"),
    [
        ("tests.rewards.trl_style_reward:x", {}, "there is no module `tests.rewards.trl_style_reward`"),
        (f"{TRL}:boxed_rewards", {}, "did you mean 'boxed_reward'?"),
        (f"{FAULTY}:a_number", {}, "is a int, which cannot be called"),
        (f"{FAULTY}:NotAnInstance", {}, "is a class; make an instance"),
        (f"{FAULTY}:positional_only", {}, "['completions'] are positional-only"),
        (f"{FAULTY}:takes_nothing", {}, "takes no keyword arguments"),
        (f"{FAULTY}:burns", {"arguments": {"second": 1.0}}, "arguments.second: "),
        (f"{TRL}:scaled", {"arguments": {"prompts": []}}, "arguments.prompts: every reward gets `prompts`"),
        (f"{TRL}:counter_reward", {"run_in": "process"}, "run_in: process: "),
    ],
)
def test_what_cannot_be_a_reward_is_refused(function: str, section: dict[str, object], text: str) -> None:
    assert text in _message(function, **section)


def test_all_problems_come_at_once_with_their_index() -> None:
    lines = _message(f"{TRL}:zzz", f"{FAULTY}:a_number", f"{TRL}:scaled_by_ten", f"{TRL}:scaled").splitlines()
    assert [line.split(":")[0] for line in lines] == ["rewards.0.function", "rewards.1.function", "rewards"]
    assert "the name `scaled` belongs to more than one function" in lines[2]


def test_missing_columns_and_environments_are_known_before_the_run() -> None:
    (reward,) = load_rewards([RewardSection(function=f"{TRL}:counter_reward")])
    assert reward.needs_environments
    assert "the run has none" in (reward.lack(["answer"]) or "")
    assert reward.lack(["answer"], has_environments=True) is None
    (reward,) = load_rewards([RewardSection(function=f"{TRL}:counter_if_there_is_one")])
    assert not reward.needs_environments
    (reward,) = load_rewards([RewardSection(function=f"{TRL}:boxed_reward")])
    assert "needs the column(s) ['ground_truth'], but the data has ['answer']" in (reward.lack(["answer"]) or "")
    assert reward.lack(["ground_truth"]) is None


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        ("text:regex_match", {"pattern": "(a"}, "rewards.0.arguments.pattern: '(a' is not a regular expression"),
        ("text:regex_match", {"pattern": 3}, "rewards.0.arguments.pattern: 3 is not a regular expression"),
        ("length:soft_overlong", {"max_completion_tokens": 8, "cache_tokens": 9}, "cache_tokens: 9 must be in 1..max"),
        ("length:soft_overlong", {"max_completion_tokens": "8"}, "max_completion_tokens: '8' must be a whole number"),
    ],
)
def test_arguments_that_would_fail_every_group_are_refused_at_the_start(
    function: str, arguments: dict[str, object], text: str
) -> None:
    assert text in _message(f"grpo_async.rewards.{function}", arguments=arguments)
