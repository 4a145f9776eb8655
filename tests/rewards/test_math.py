r"""math_answer through the real math-verify."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.rewards import load_rewards
from grpo_async.rewards.math import math_answer
from tests.rewards.helpers import loaded, score

CONFIG = Path(__file__).parents[2] / "configs" / "math.yaml"


@pytest.mark.parametrize(
    ("text", "gold", "value"),
    [
        (r"so \boxed{0.5}", r"$\frac{1}{2}$", 1.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", 1.0),
        (r"first \boxed{3}, then \boxed{4}", "3", 0.0),  # the last box counts
        (r"<think>\boxed{1}</think> \boxed{2}", "2", 1.0),
        (r"<think>\boxed{1}</think> it is 2", "1", 0.0),  # a box in the thinking is no answer
        ("The final answer is $42$.", "42", 1.0),
        ("it is 41", "42", 0.0),
        (r"\boxed{42}", "20 + 22 = <<20+22=42>>42 #### 42", 1.0),
        (r"\boxed{42}", r"Long proof. Hence \boxed{42}.", 1.0),
        (r"\boxed{12}", 12, 1.0),
        (r"\boxed{Yes}", "yes", 1.0),
        (r"\boxed{\text{No}}", "Yes", 0.0),
        ("The answer is no.", "No", 1.0),
        ("nothing", "3", 0.0),
        ("", "3", 0.0),
        (r"\boxed{3}", "???", None),
        (r"\boxed{3}", "", None),
        (r"\boxed{3}", None, None),
    ],
)
def test_math_answer(text: str, gold: object, value: float | None) -> None:
    assert math_answer([text], [gold]) == [value]
    assert math_answer([[{"role": "assistant", "content": text}]], solution=[gold]) == [value]


def test_an_answer_outside_a_box_is_wrong_when_a_box_is_required() -> None:
    assert math_answer(["$3$", r"\boxed{3}", "Yes"], ["3", "3", "Yes"], require_boxed=True) == [0.0, 1.0, 0.0]


def test_answer_wins_over_solution() -> None:
    assert math_answer([r"\boxed{3}"], answer=["3"], solution=["4"]) == [1.0]


def test_without_a_gold_column_the_error_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="rename one"):
        math_answer(["3"])


def test_it_works_in_a_thread_where_signals_do_not() -> None:
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(math_answer, [r"\boxed{0.5}"], ["1/2"]).result(timeout=60.0) == [1.0]


def test_it_works_in_a_process() -> None:
    with loaded("grpo_async.rewards.math:math_answer", run_in="process", timeout_s=30.0) as reward:
        outcome = asyncio.run(score(reward, [r"\boxed{0.5}", "2"], columns={"solution": ["1/2", "1/2"]}))
    assert outcome.values == [1.0, 0.0]


def test_the_rewards_of_the_math_config_take_its_columns() -> None:
    config = ExperimentConfig.model_validate(yaml.safe_load(CONFIG.read_text()))
    rewards = load_rewards(config.rewards)
    assert [reward.name for reward in rewards] == ["math_answer", "think_format", "soft_overlong"]
    assert all(reward.missing_columns(["solution"]) == [] for reward in rewards)
    overlong = config.rewards[2].arguments
    assert overlong["max_completion_tokens"] == config.rollout.max_completion_tokens
