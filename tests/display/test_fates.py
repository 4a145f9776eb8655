"""Eight fates of a run: every surface tells the state, the cause and the remedy in its first two lines."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from grpo_async.display.render import screen
from grpo_async.display.status import print_status, read_status
from grpo_async.display.summary import print_summary
from grpo_async.findings import RunHistory, diagnose
from grpo_async.run_directory import RunDir
from grpo_async.viewer.web import overview
from grpo_async.viewer.web.report import write_report
from grpo_async.viewer.web.sources import RunRegistry
from tests.findings.support import Run, line, peak
from tests.viewer.support import answers_by_view

SLOW = {"step_time": 20.0, "pipeline/trainer_idle_ratio": 0.9, "pipeline/generator_idle_ratio": 0.8,
        "scoring/duration_s": 12.0, "rollout/duration_s": 2.0}  # fmt: skip
REWARDS = {"rewards": [{"function": "rewards:judge"}]}
HELD_OUT = {0: 0.2, 60: 0.8}
CONSTANT = "320 groups in a row had nothing to learn from\nof the last one all rewards are 0.5: the completions differ, and " \
    "`judge` gave all of them the same\n`grpo-async inspect-rollouts` shows"  # fmt: skip

FATES: dict[str, tuple[Run, str, tuple[str, ...], tuple[str, ...]]] = {
    "learning": (Run(reward=line(0.2, 0.8), held_out=HELD_OUT), "learns", ("It learns", "from 0.19 to 0.805: +0.615"), ()),
    "learning rate near 0": (
        Run(reward=line(0.3, 0.3), metrics={"lr": 1e-9}, held_out={0: 0.3, 60: 0.3}),
        "hardly-moves", ("does not learn: the policy hardly moves", "6e-08"), ("Raise optimizer.lr (it is 1e-09)",),
    ),
    "constant reward": (
        Run(state="failed", error=CONSTANT), "zero-variance",
        ("does not learn: all rewards are 0.5", "differ, and `judge` gave all of them the same"), ("correct the reward",),
    ),
    "all truncated": (
        Run(reward=line(0.02, 0.2), metrics={"completions/clipped_ratio": 1.0}, held_out={0: 0.02, 60: 0.2}, baseline=0.2,
            config={"rollout": {"max_completion_tokens": 3}}),
        "truncated", ("does not learn: 100% of the completions are cut off", "max_completion_tokens is 3"),
        ("Raise rollout.max_completion_tokens",),
    ),
    "collapse": (
        Run(reward=peak(0.05, 0.8, 0.1), metrics={"lr": 0.004}, held_out={0: 0.02, 60: 0.15}, baseline=0.2, num_prompts=400),
        "collapsed", ("does not learn: the reward collapsed, from 0.7", " at steps "),
        ("Resume from an earlier checkpoint with a lower optimizer.lr (it was 0.004",),
    ),
    "slow reward": (
        Run(reward=line(0.2, 0.8), metrics=SLOW, held_out=HELD_OUT, config=REWARDS), "learns", ("It learns",),
        ("Scoring limits the speed: rewards:judge takes 12 s a group, generating it 2 s", "rewards.0.run_in: process"),
    ),
    "tools": (
        Run(reward=line(0.1, 0.1), metrics={"tools/call_frequency": 0.0}, held_out={0: 0.1, 60: 0.1}), "tools",
        ("does not learn: the tools are hardly ever called",), ("Explain in data.train.system_prompt",),
    ),
    "agent": (
        Run(reward=line(0.1, 0.1), config={"rollout": {"agent": {"function": "agents:solve"}}},
            metrics={"ledger/groups/started": 100.0, "ledger/groups/failed": 70.0, "failures/rollout/KeyError": 280.0}),
        "failed-groups", ("does not learn: 70% of the groups failed", "rollout/KeyError, 280 times"), ("trainer.log",),
    ),
}  # fmt: skip


def _printed(lines: int, show: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=500)
    show(console)
    return console.file.getvalue().splitlines()[:lines]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FATES)
def test_state_cause_and_remedy_come_first_on_every_surface(tmp_path: Path, name: str) -> None:
    run, key, state, remedy = FATES[name]
    run_dir = run.write(tmp_path, 0)
    found = diagnose(RunHistory.read(run_dir))
    assert found.key == key, found.lines
    text, fix = found.text, found.fix
    assert [part for part in state if part not in text] == [], text
    assert [part for part in remedy if part not in fix] == [], fix
    assert bool(fix) is bool(remedy), fix

    terminal = {
        "summary": _printed(2, lambda console: print_summary(console, RunHistory.read(run_dir), run_dir.root)),
        "status": _printed(2, lambda console: print_status(console, read_status(run_dir))),
    }
    for surface, (first, second) in terminal.items():
        assert first.endswith(text), surface
        assert not fix or second.endswith(fix), surface
    content = {"run": "x", "step": 60, "state": "running", "learning": found.as_dict(), "metrics": {}}
    picture = screen(content, (len(text + fix) + 30, 12), footer="")
    drawn = _printed(6, lambda console: console.print(picture))
    assert text in drawn[1]
    assert fix in drawn[2]

    source = RunRegistry([run_dir]).source(RunRegistry([run_dir]).names[0])
    pages = {
        "home": overview.card(source),
        "page": overview.page(source),
        "report": answers_by_view(write_report(run_dir))["run"],
    }
    for surface, page in pages.items():
        assert page["verdict"]["text"] == "\n".join(filter(None, [text, fix])), surface


def test_an_evaluation_is_no_training_that_was_killed(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    Run(state="finished").write(tmp_path, 0)
    run_dir.metrics.unlink()
    run_dir.evaluation_result.write_text('{"evaluated": "tiny", "metrics": {"reward": 0.5, "num_prompts": 200}}')
    assert read_status(run_dir).exit_code == 0
    (first,) = _printed(1, lambda console: print_status(console, read_status(run_dir)))
    assert first.endswith("An evaluation of tiny: reward 0.5 on 200 held-out prompts.")
    run_dir.evaluation_result.unlink()
    run_dir.status.write_text('{"state": "failed", "error": "a server is gone", "purpose": "evaluation"}')
    found = diagnose(RunHistory.read(run_dir))
    assert found.lines == ["The evaluation has no result. A server is gone."]
