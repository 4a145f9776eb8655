"""When evaluations begin, what they hold back, who hears of them; the rollouts are those of a fake, which ends them when told."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_async.errors import RunError
from grpo_async.evaluation.evaluations import RunEvaluations
from grpo_async.evaluation.evaluator import EvaluationTask
from grpo_async.evaluation.metrics import EvaluationResult
from grpo_async.run_directory import RunDir
from grpo_async.tracking.evaluation_record import read_evaluations
from tests.launch.support import make_config


class _Source:
    """Begins evaluations that end when a test says so."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []  # step, max_in_flight
        self.futures: list[Future[EvaluationResult]] = []

    def begin_evaluation(self, task: EvaluationTask, *, num_tokens: Any) -> Future[EvaluationResult]:
        """The evaluator gives its task back."""
        self.begun.append((task.step, task.max_in_flight))
        self.futures.append(Future())
        return self.futures[-1]

    def end(self, reward: float | Exception | None = 0.5) -> None:
        if reward is None:
            self.futures[-1].cancel()
        elif isinstance(reward, Exception):
            self.futures[-1].set_exception(reward)
        else:
            metrics = {"reward": reward, "mixed": 0.0}
            self.futures[-1].set_result(EvaluationResult(metrics=metrics, by_group={"a": {"reward": 1.0}}))


class _Run:
    """A run's evaluations and what was heard of them."""

    def __init__(self, folder: Path, *, start: int = 0, **section: Any) -> None:
        self.config = make_config(
            folder,
            training={"max_steps": 10},
            rollout={"max_in_flight": 40},
            evaluation={"data": {"type": "jsonl", "path": "held.jsonl"}, "every_steps": 2, **section},
        )
        self.run_dir = RunDir(self.config.run_path)
        self.run_dir.create()
        self.source: Any = _Source()
        self.heard: list[tuple[str, Mapping[str, float]]] = []
        self.tracked: list[tuple[int, Mapping[str, float]]] = []
        self.warnings: list[str] = []
        self.held: list[Future[Any]] = []
        evaluator: Any = SimpleNamespace(num_tokens=7, run=lambda task: task, majority_baseline=0.1)
        self.evaluations = RunEvaluations(
            self.config,
            self.run_dir,
            source=self.source,
            evaluator=evaluator,
            start=start,
            control=SimpleNamespace(send=self._send),  # type: ignore[arg-type]
            trackers=SimpleNamespace(log=lambda step, metrics: self.tracked.append((step, metrics))),  # type: ignore[arg-type]
            hold=self.held.append,
        )

    def _send(self, kind: str, **content: Any) -> None:
        if kind == "evaluation":
            self.heard.append((content["when"], content["metrics"]))
        elif kind == "warning":
            self.warnings.append(content["text"])

    def after(self, step: int, *, is_served: bool = True) -> dict[str, float]:
        metrics: dict[str, float] = {}
        self.evaluations.after_step(step, metrics, is_served=is_served)
        return metrics


def test_before_training_all_slots_are_used_and_the_first_step_reports_the_result(tmp_path: Path) -> None:
    run = _Run(tmp_path)
    assert run.evaluations.before_training(), "it is waited for"
    assert run.source.begun == [(0, 40)]
    run.source.end()
    run.evaluations.collect(raise_failure=True)
    assert run.heard == [("before", {"reward": 0.5, "mixed": 0.0, "majority_baseline": 0.1, "reward/a": 1.0})]
    assert run.evaluations.scores("reward") == {}  # a checkpoint of step 0 is never the best
    assert run.after(1) == {f"eval/{name}": value for name, value in {**run.heard[0][1], "step": 0.0}.items()}
    assert run.after(2) == {}


def test_an_evaluation_is_begun_with_a_quarter_of_the_slots_and_reported_by_the_step_that_finds_it_done(
    tmp_path: Path,
) -> None:
    run = _Run(tmp_path)
    assert run.after(1) == {}
    assert run.after(2) == {}
    assert run.source.begun == [(2, 10)]
    assert run.after(3) == {}
    run.source.end(0.25)
    assert run.heard == []  # until the main thread looks
    metrics = run.after(4)
    assert (metrics["eval/reward"], metrics["eval/step"]) == (0.25, 2.0)
    assert run.heard[0][0] == "step 2"
    assert run.evaluations.scores("reward") == {2: 0.25}
    assert run.evaluations.scores("pass@1") == {}
    assert run.source.begun == [(2, 10), (4, 10)]  # the next one, in the same breath


def test_pushes_are_held_until_a_pinned_evaluation_is_done(tmp_path: Path) -> None:
    pinned = _Run(tmp_path, pin_version=True)
    pinned.after(2)
    assert pinned.held == pinned.source.futures
    (tmp_path / "2").mkdir()
    mixed = _Run(tmp_path / "2")
    mixed.after(2)
    assert mixed.held == []


def test_a_failure_beside_training_is_recorded_and_training_goes_on(tmp_path: Path) -> None:
    run = _Run(tmp_path)
    run.after(2)
    run.source.end(RunError("3 of 8 rollouts failed"))
    assert run.after(3) == {"eval/num_errors": 1.0}
    assert run.warnings == ["the evaluation of step 2 failed: 3 of 8 rollouts failed"]
    assert [record.error for record in run.evaluations.records] == ["3 of 8 rollouts failed"]
    run.after(4)
    assert run.source.begun[-1][0] == 4


def test_a_failure_before_the_first_step_ends_the_run_and_one_after_the_last_does_not(tmp_path: Path) -> None:
    run = _Run(tmp_path)
    run.evaluations.before_training()
    run.source.end(RunError("no reward"))
    with pytest.raises(RunError, match="no reward"):
        run.evaluations.collect(raise_failure=True)
    run.evaluations.after_training(10)
    run.source.end(RunError("no reward"))
    run.evaluations.collect_last(10)
    assert run.evaluations.summary()["after"] is None  # type: ignore[index]


def test_after_the_last_step_the_running_one_is_waited_for_and_the_final_policy_is_evaluated(tmp_path: Path) -> None:
    """Nothing is begun at the last step itself: the evaluation after it is of the same policy."""
    run = _Run(tmp_path)
    run.after(8)
    assert run.after(10) == {}
    assert not run.evaluations.is_over
    run.source.end()
    assert run.evaluations.is_over
    run.evaluations.collect_last(10)
    run.evaluations.collect_last(10)
    run.evaluations.after_training(10)
    run.source.end(0.75)
    run.evaluations.collect_last(10)
    assert run.source.begun == [(8, 10), (10, 40)]
    assert [when for when, _ in run.heard] == ["step 8", "after"]
    assert [step for step, _ in run.tracked] == [10, 10]
    summary = run.evaluations.summary()
    assert summary is not None
    assert summary["after"]["reward"] == 0.75
    assert summary["during"] == [{"step": 8, "reward": 0.5, "mixed": 0.0, "majority_baseline": 0.1}]


def test_what_was_cancelled_is_made_again_after_a_resume_and_what_is_done_is_not(tmp_path: Path) -> None:
    first = _Run(tmp_path, at_start=False)
    first.after(2)
    first.source.end()
    first.after(4)
    first.source.end(None)  # the run stops
    assert first.after(5) == {}
    first.evaluations.close()
    resumed = _Run(tmp_path, at_start=False, start=4)
    resumed.evaluations.before_training()
    assert resumed.source.begun == [(4, 10)]
    resumed.source.end(0.9)
    assert resumed.after(5)["eval/step"] == 4.0
    for start, known in ((5, [2, 4]), (4, [2, 4]), (3, [2])):  # the policy of step 4 is another one after 3
        again = _Run(tmp_path, start=start)
        again.evaluations.before_training()
        assert again.source.begun == []
        assert [record.step for record in read_evaluations(again.run_dir.evaluation_log, [])] == known


def test_a_step_whose_weights_no_server_has_is_not_evaluated(tmp_path: Path) -> None:
    run = _Run(tmp_path)
    run.after(2, is_served=False)
    assert run.source.begun == []
    (record,) = run.evaluations.records
    assert (record.step, record.skipped) == (2, "no server had the weights of this step")
