"""check_reward on real functions. Those that no time limit inside a process can end run in a worker, as the command runs all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from grpo_async.config.interaction_sections import RewardSection
from grpo_async.data import make_prompt
from grpo_async.rewards import audit
from grpo_async.rewards.audit import Observer
from grpo_async.rewards.audit_report import RewardReport, check_reward, make_report
from grpo_async.rewards.function import load_reward
from grpo_async.rewards.fuzz import cases_of

AUDITED = "tests.rewards.audited_rewards"
ROWS = [("What is 12 + 60?", "72"), ("What is 3 + 4?", "7"), ("Name a color.", "blue")]


def _report(
    function: str,
    *,
    rows: Any = ROWS,
    conversational: bool = False,
    in_worker: bool = False,
    slow_s: float = 60.0,
    **section: Any,
) -> RewardReport:
    """`slow_s`: no function is slow by it, however busy the machine, unless a test is about slow ones."""
    reference = function if ":" in function else f"{AUDITED}:{function}"
    settings = RewardSection(function=reference, **section)
    reward = load_reward(settings, "rewards.0")
    prompts = [
        make_prompt(
            {"prompt": [{"role": "user", "content": text}] if conversational else text, "answer": gold}, n, None
        )
        for n, (text, gold) in enumerate(rows)
    ]
    try:
        if in_worker:
            return check_reward(reward, settings, "rewards.0", prompts, slow_s=slow_s)
        cases = cases_of(prompts, gold_column=None, seed=0)
        seen = asyncio.run(Observer(reward, prompts, cases, seed=0, slow_s=slow_s).all())
        asks = reward.names("answer")
        limits = {"timeout_s": reward.timeout_s, "slow_s": slow_s}
        return make_report(seen, name=reward.name, place=reward.place, asks_for_gold=asks, **limits)
    finally:
        reward.close()


def _findings(function: str, **more: Any) -> list[tuple[str, str]]:
    return [(finding.severity.value, finding.title) for finding in _report(function, **more).findings]


def test_an_honest_function_passes_and_its_numbers_are_told() -> None:
    report = _report("honest", in_worker=True)
    assert report.findings == []
    assert report.gold is not None
    assert (report.gold.lowest, report.gold.mean, report.gold.highest) == (1.0, 1.0, 1.0)
    assert report.others["garbage"].highest == 0.0
    assert (report.place, report.num_failed, report.num_none) == ("thread", 0, 0)
    assert report.num_inputs == 3 * 41


@pytest.mark.parametrize(
    ("function", "severity", "what"),
    [
        ("raises_on_empty", "error", "It raised IndexError: list index out of range ("),
        ("pays_everything_with_a_digit", "error", "It pays wrong answers"),
        ("substring", "error", "It pays garbage: on row 0 `counting` got 1, as much as gold."),
        ("prefers_garbage", "error", "Gold is below the maximum: on row 0 gold got 0.5"),
        ("asks_but_ignores", "error", "It does not tell gold from garbage"),
        ("form_only", "note", "It does not tell gold from garbage"),
        ("constant", "warning", "It gives every input the same score (1)."),
        ("never_applies", "warning", "It returned None (not applicable) for all 123 inputs."),
        ("noisy", "warning", "The same input gets different scores from call to call."),
        ("ranks", "warning", "The score of a completion depends on the other completions of the call."),
        ("wants_one", "error", "Inputs that are fine one by one fail in one call: it raised ValueError"),
        ("slow_on_nothing", "warning", "It is slow: `empty` took "),
    ],
)
def test_each_fault_is_found(function: str, severity: str, what: str) -> None:
    found = _findings(function, slow_s=0.2 if function.startswith("slow") else 60.0)
    assert [level for level, text in found if text.startswith(what)] == [severity], found
    if what.endswith(" took "):  # it sleeps that long; how much longer it takes is the machine's
        (seconds,) = (float(text.removeprefix(what).split(" s")[0]) for _, text in found if text.startswith(what))
        assert seconds >= 0.3
    rank = ["error", "warning", "note"].index
    assert min(rank(level) for level, _ in found) == rank(severity), found


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("dies", "It lost its worker process, which ended with exit code 7 during the call."),
        (
            "catastrophic",
            "It took longer than 0.5 s for 1 completions; raise `rewards.0.timeout_s` if this is expected.",
        ),
    ],
)
def test_a_function_that_ends_or_holds_its_process_is_told_with_the_input_and_does_not_hold_up_the_check(
    function: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_MAX_LOST_IN_ALL", 2)
    report = _report(function, in_worker=True, timeout_s=0.5)
    lost, stopped = (finding for finding in report.findings if finding.key == "fails")
    assert (lost.title, report.num_failed, report.place) == (what, 2, "thread")
    assert "Set `run_in: process`" in lost.fix
    assert stopped.title == "It took longer than its timeout_s, or died, 2 times."
    if function == "dies":
        assert lost.inputs[0] == "gold, boxed"


def test_time_outs_are_observations_and_an_input_that_hangs_is_tried_twice_only() -> None:
    report = _report("hangs_on_boxes", timeout_s=0.4, run_in="process")
    assert report.findings[0].severity == "error"
    assert report.findings[0].title.startswith("It took longer than 0.4 s")
    # open braces, nested fractions and 200k braces hang, on 2 of the 3 rows each; 123 - 3 were tried
    assert (report.num_failed, report.num_inputs) == (6, 120)
    assert report.gold is not None
    assert report.gold.lowest == 1.0


@pytest.mark.parametrize(
    ("function", "conversational"),
    [("math:math_answer", True), ("text:number_match", False), ("text:exact_match", True)],
)
def test_the_built_in_judges_of_answers_have_no_findings(function: str, conversational: bool) -> None:
    rows = [("How many?", "72"), ("How far?", "35"), ("How much is it?", "1250")]
    run_in = "process" if function.startswith("math") else "thread"
    assert _findings(f"grpo_async.rewards.{function}", rows=rows, conversational=conversational, run_in=run_in) == []


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("format:think_format", {}),
        ("text:regex_match", {"pattern": "boxed"}),
        ("length:soft_overlong", {"max_completion_tokens": 100, "cache_tokens": 20}),
    ],
)
def test_the_built_in_judges_of_form_are_notes(function: str, arguments: dict[str, Any]) -> None:
    found = _findings(f"grpo_async.rewards.{function}", arguments=arguments)
    assert [level for level, _ in found] == ["note"]
