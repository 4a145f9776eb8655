"""check_reward on real functions, and its verdicts; numbers by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from grpo_async.config.sections import RewardSection
from grpo_async.data import make_prompt
from grpo_async.findings import Finding
from grpo_async.rewards.check import GOLD, WRONG, Observations, RewardReport, candidates, check_reward, report
from grpo_async.rewards.function import load_reward

AUDITED = "tests.rewards.audited_rewards"
ROWS = [("What is 12 + 60?", "72"), ("What is 3 + 4?", "7"), ("Name a color.", "blue")]


def _report(function: str, *, conversational: bool = False, **section: Any) -> RewardReport:
    settings = RewardSection(function=function if ":" in function else f"{AUDITED}:{function}", **section)
    prompts = [
        make_prompt(
            {"prompt": [{"role": "user", "content": text}] if conversational else text, "answer": gold}, n, None
        )
        for n, (text, gold) in enumerate(ROWS)
    ]
    reward = load_reward(settings, "rewards.0")
    try:
        return check_reward(reward, prompts, runs_in="thread")
    finally:
        reward.close()


@pytest.mark.parametrize(
    ("function", "severity", "what"),
    [
        ("raises_on_empty", "error", "It raised IndexError: list index out of range"),
        ("pays_everything_with_a_digit", "error", "It rewards `wrong answer`"),
        ("substring", "error", "It rewards `counting`: on row 0 it got 1, as much as the right answer."),
        ("prefers_garbage", "error", "The right answer does not get the highest score: on row 0 it got 0.5"),
        ("asks_but_ignores", "error", "It does not tell right from wrong"),
        ("form_only", "note", "It does not tell right from wrong"),
        ("constant", "warning", "It gives every completion the same score (1)."),
        ("never_applies", "warning", "It returned None (not applicable) for all"),
        ("noisy", "warning", "The score of a completion changes from call to call"),
        ("ranks", "warning", "The score of a completion changes from call to call, or with the other completions"),
        ("wants_one", "error", "Completions that are fine one by one fail in one call: it raised ValueError"),
    ],
)
def test_each_fault_is_found(function: str, severity: str, what: str) -> None:
    found = _report(function).findings
    assert [each.severity for each in found if each.title.startswith(what)] == [severity], found
    assert found[0].severity == severity, found  # nothing worse


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("dies", "It lost its worker process, which ended with exit code 7 during the call."),
        (
            "catastrophic",
            "It took longer than 0.5 s; raise `rewards.0.timeout_s` if this is expected.",
        ),
    ],
)
def test_a_function_that_ends_or_holds_its_process_does_not_hold_up_the_check(function: str, what: str) -> None:
    found = _report(function, timeout_s=0.5, run_in="process")
    lost, stopped = (finding for finding in found.findings if finding.key == "fails")
    assert (lost.title, found.num_failed, found.runs_in) == (what, 4, "thread")
    assert "Set `run_in: process`" in lost.fix
    assert stopped.title == "It took longer than its timeout_s, or ended its process, 4 times."


def test_a_right_answer_is_judged_where_the_function_applies_to_nothing_else() -> None:
    found = _report("judges_the_right_answer_only")
    assert (found.findings, list(found.scores)) == ([], [GOLD])


@pytest.mark.parametrize(
    ("function", "conversational"),
    [("math:math_answer", True), ("text:number_match", False), ("text:exact_match", True)],
)
def test_the_built_in_judges_of_answers_have_no_findings(
    function: str, conversational: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.ROWS", [("How many?", "72"), ("How far?", "1350"), ("How much is it?", "1250")])
    found = _report(f"grpo_async.rewards.{function}", conversational=conversational, timeout_s=60.0, run_in="process")
    assert found.findings == []
    assert (found.scores[GOLD]["lowest"], found.scores["garbage"]["highest"], found.num_failed) == (1.0, 0.0, 0)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("format:think_format", {}),
        ("text:regex_match", {"pattern": "boxed"}),
        ("length:soft_overlong", {"max_completion_tokens": 100, "cache_tokens": 20}),
    ],
)
def test_the_built_in_judges_of_form_are_notes(function: str, arguments: dict[str, Any]) -> None:
    assert [each.severity for each in _report(f"grpo_async.rewards.{function}", arguments=arguments).findings] == [
        "note"
    ]


def test_code_without_a_known_solution_is_checked_without_a_warning() -> None:
    prompt = make_prompt({"prompt": "Write add.", "tests": ["assert add(1, 2) == 3"]}, 0, None)
    reward = load_reward(RewardSection(function="grpo_async.rewards.code:code_tests"), "rewards.0")
    with contextlib.closing(reward):
        found = check_reward(reward, [prompt], runs_in="event loop")
    assert [finding.severity for finding in found.findings] == ["note"]
    assert found.scores["code that does nothing"]["highest"] == 0.0


def test_the_right_answer_is_tried_in_every_form_beside_a_wrong_one_of_its_shape() -> None:
    made = candidates(make_prompt({"prompt": "What is 12 + 60?"}, 0, None), "12 + 60 ... #### 72 km")
    gold = [text for kind, text in made if kind == GOLD]
    assert gold[8:12] == ["72 km", r"\boxed{72 km}", "<answer>72 km</answer>", "```python\n72 km\n```"]
    assert gold[12:] == [f"<think>Let me see.</think>\n{text}" for text in gold[8:12]]
    assert [text for kind, text in made if kind == WRONG] == [text.replace("72 km", "83 ln") for text in gold[8:]]
    assert ("prompt", "What is 12 + 60?") in made


# ------------------------------------------------------------------------------------------------ verdicts


def _find(rows: Sequence[dict[str, float | None]], *, asks_for_gold: bool = False) -> Sequence[Finding]:
    """`rows`: score by kind of completion."""
    values = [(row, kind, value) for row, scores in enumerate(rows) for kind, value in scores.items()]
    return report(Observations(values=list(values)), name="f", runs_in="thread", asks_for_gold=asks_for_gold).findings


@pytest.mark.parametrize(("score", "severity"), [(0.05, None), (0.3, "warning"), (0.89, "warning"), (0.95, "error")])
def test_what_garbage_earns_is_judged_by_its_share_of_the_right_answers(score: float, severity: str | None) -> None:
    found = _find([{GOLD: 1.0, WRONG: 0.0, "garbage": score}] * 4)
    assert [finding.severity for finding in found] == ([] if severity is None else [severity])


@pytest.mark.parametrize(("num_lucky", "severity"), [(2, "warning"), (3, "error")])
def test_garbage_that_is_right_on_a_quarter_of_the_rows_may_be_chance(num_lucky: int, severity: str) -> None:
    (finding,) = _find([{GOLD: 1.0, WRONG: 0.0, "garbage": float(row < num_lucky)} for row in range(8)])
    assert (finding.severity, list(finding.rows)) == (severity, list(range(num_lucky)))


def test_a_row_whose_right_answer_gets_nothing_or_less_than_garbage_is_an_error() -> None:
    good: dict[str, float | None] = {GOLD: 1.0, WRONG: 0.0}
    (lost,) = _find([good, good, {GOLD: 0.0, WRONG: 0.0}])
    assert (lost.severity, list(lost.rows)) == ("error", [2])
    less = _find([good, {**good, GOLD: 0.5, "garbage": 1.0}])[0]
    assert (less.severity, list(less.rows)) == ("error", [1])
    assert less.title == "The right answer does not get the highest score: on row 1 it got 0.5, `garbage` 1."


def test_the_same_score_for_everything_and_none_for_the_right_answer_are_told() -> None:
    same: list[dict[str, float | None]] = [{GOLD: 1.0, WRONG: 1.0, "empty": 1.0}]
    assert [finding.severity for finding in _find(same)] == ["warning"]
    assert [finding.severity for finding in _find(same, asks_for_gold=True)] == ["error"]
    (finding,) = _find([{"empty": 0.0, "garbage": 0.0}])  # no right answer is known, as in data with tests for code
    assert finding.severity == "note"
    (finding,) = _find([{GOLD: 1.0, WRONG: 0.0}, {GOLD: None, "empty": 0.0}])
    assert (finding.severity, list(finding.rows)) == ("warning", [1])
    assert "returned None for the right answer" in finding.title
