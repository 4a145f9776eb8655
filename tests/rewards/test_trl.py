"""The reward functions of trl.rewards through our own calls: the numbers of TRL's own tests."""

from __future__ import annotations

import ast
import asyncio
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from grpo_async.config.sections import RewardSection
from grpo_async.errors import ConfigError
from grpo_async.rewards import TrainerState, load_rewards

pytest.importorskip("trl.rewards")

OVERLONG = {"max_completion_len": 100, "soft_punish_cache": 20}
TWO = {"ngram_size": 2, "max_penalty": -1.0}
THREE = {**TWO, "ngram_size": 3}
THIRD, HALF = r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}"


def _ids(*lengths: int) -> list[list[int]]:
    return [[1] * length for length in lengths]


def _cosine(texts: list[str], lengths: list[int], expected: list[Any], gold: str = r"\frac{1}{3}", **more: Any) -> Any:
    return "get_cosine_scaled_reward", {"max_len": 100, **more}, texts, _ids(*lengths), gold, expected


def _accuracy(text: str, gold: str, expected: Any, name: str = "accuracy_reward", **arguments: Any) -> Any:
    return name, arguments, [text], _ids(9), gold, [expected]


def _reasoning(text: str, expected: Any, gold: str = r"\frac{63}{400}", **arguments: Any) -> Any:
    return _accuracy(text, gold, expected, "reasoning_accuracy_reward", **arguments)


def _format(text: str, expected: float) -> Any:
    return "think_format_reward", {}, [text], _ids(9), "", [expected]


def _repetition(arguments: dict[str, Any], ids: list[int], expected: float) -> Any:
    return "get_repetition_penalty_reward", arguments, ["x"], [ids], "", [expected]


@pytest.mark.parametrize(
    ("function", "arguments", "texts", "ids", "gold", "expected"),
    [
        _format("<think>This is my reasoning.</think>This is my answer.", 1.0),
        ("get_soft_overlong_punishment", OVERLONG, ["x"] * 3, _ids(50, 110, 90), "", [0.0, -1.0, -0.5]),
        _repetition(TWO, [5, 5, 5, 5, 5], -0.75),
        _repetition(THREE, [1, 2], 0.0),
        _repetition(THREE, [1, 2, 3, 1, 2, 3], -0.25),
        _accuracy(r"\boxed{\frac{63}{400}}", "63/400", 1.0),
        _accuracy(r"\boxed{3}", "6", 0.0),
        _accuracy("Answer is forty two.", "Answer is forty two.", None),
        _reasoning(r"<think> Reasoning content </think> \boxed{\frac{63}{400}}", 1.0),
        _reasoning(r"<R> So </R> \boxed{\frac{63}{400}}", 1.0, reasoning_delimiters=["</R>"]),
        _reasoning(r"<think> Reasoning content </think> \boxed{\frac{64}{400}}", 0.0),
        _reasoning("<think> Incomplete reasoning without closing tag", 0.0),
        _cosine([THIRD] * 2, [25, 75], [0.92678, 0.57322]),
        _cosine([HALF] * 2, [25, 75], [-0.92678, -0.57322]),
        _cosine([r"\boxed{42}"], [50], [None], "forty two"),
    ],
)
def test_functions_and_what_factories_make_score_as_in_trl(
    function: str, arguments: Any, texts: list[str], ids: list[list[int]], gold: str, expected: list[Any]
) -> None:
    (reward,) = load_rewards([RewardSection(function=f"trl.rewards:{function}", arguments=arguments)])
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    try:
        outcome = asyncio.run(reward.score(["p"] * len(ids), completions, ids, {"solution": [gold] * len(ids)}))
    finally:
        reward.close()
    assert outcome.values == [None if each is None else pytest.approx(each, abs=1e-5) for each in expected]


def test_what_a_factory_makes_runs_in_a_process_too_and_wrong_arguments_stop_the_start() -> None:
    section = RewardSection(
        function="trl.rewards:get_soft_overlong_punishment", arguments=OVERLONG, run_in="process", timeout_s=120.0
    )
    (reward,) = load_rewards([section])
    try:
        assert reward.name == "soft_overlong_punishment_reward"
        assert asyncio.run(reward.score(["p"], ["x"], _ids(90), {})).values == [-0.5]
    finally:
        reward.close()
    for arguments, told in (({}, "missing 2 required"), ({**OVERLONG, "size": 1}, "takes no `size`")):
        with pytest.raises(ConfigError, match=f"get_soft_overlong_punishment.*{told}"):
            load_rewards([section.model_copy(update={"arguments": arguments})])


def test_the_state_has_every_field_of_the_class_of_transformers() -> None:
    """Read from its file: the import takes seconds."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "trainer_callback.py").read_text())
    (found,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "TrainerState")
    targets = [each.target for each in found.body if isinstance(each, ast.AnnAssign)]
    theirs = {target.id for target in targets if isinstance(target, ast.Name)}
    assert {"epoch", "log_history"} <= theirs <= {each.name for each in fields(TrainerState)}
