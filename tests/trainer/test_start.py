"""The order of rank 0's life; everything around the order is a fake that notes its calls."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from grpo_async.buffer.resume import ResumeState
from grpo_async.checks.preflight import PreflightContext
from grpo_async.checks.report import Check
from grpo_async.config import ExperimentConfig
from grpo_async.config.sections import EvaluationSection
from grpo_async.display.summary import print_summary
from grpo_async.errors import ConfigError, RunError, ServerUnavailableError
from grpo_async.evaluation.metrics import EvaluationResult
from grpo_async.findings import RunHistory
from grpo_async.processes.assignment import Assignment
from grpo_async.processes.control import ControlClient
from grpo_async.run_directory import RunDir
from grpo_async.trainer import connections as connections_module
from grpo_async.trainer import start as start_module
from grpo_async.trainer.loop import Trainer
from grpo_async.trainer.saving import Saver
from grpo_async.trainer.start import run_rank_zero
from grpo_async.training.checkpoint import CheckpointState
from grpo_async.weights.push import GatherCommand
from tests.launch.support import make_config
from tests.trainer.fakes import FakeChannel, FakeSource, FakeSync


class _Fleet:
    """inference.fleet.Fleet with one server. `up`: answers of `wait_until_up`, one after the other; then True."""

    def __init__(self, events: list[str], closed: list[str]) -> None:
        self.events = events
        self.up: list[bool | Exception] = []
        self.failures: list[Any] = []
        self.listeners: list[Callable[[], None]] = []
        self.life, self.is_silent = "first", False
        self.start = lambda: events.append("look for servers")
        self.close = lambda: closed.append("fleet")
        self.subscribe_info: Callable[[Callable[[], None]], None] = lambda listener: None

    def servers(self) -> list[Any]:
        return []

    def wait_until_up(self, *, deadline_s: float, stop: Any, heartbeat: Callable[[], object] = lambda: None) -> bool:
        heartbeat()
        answer = self.up.pop(0) if self.up else True
        if isinstance(answer, Exception):
            raise answer
        return answer

    def serving(self) -> list[Any]:
        if not any(event.startswith("push") for event in self.events):
            return []
        info = SimpleNamespace(engine="embedded", instance_id=self.life)
        control = SimpleNamespace(info=self._info, heartbeat=self._heartbeat)
        return [SimpleNamespace(info=info, instance_id=self.life, index=0, name="server 0", control=control)]

    def _heartbeat(self) -> SimpleNamespace:
        if self.is_silent:
            raise ServerUnavailableError("Connection refused")
        return self._info()

    def _info(self) -> SimpleNamespace:
        """A process answers this also when its engine hangs."""
        return SimpleNamespace(instance_id=self.life)

    def suspect(self, index: int) -> None:
        self.events.append(f"suspect {index}")

    def subscribe(self, listener: Callable[[], None]) -> None:
        self.listeners.append(listener)

    def on_server_event(self, message: Any) -> None: ...

    def read_counters(self) -> SimpleNamespace:
        return SimpleNamespace(busy_s=0.0, generated_tokens=0)

    def metrics(self) -> dict[str, float]:
        return {}


PROVEN = "exchange", "push 0", "exchange"
"""A push of other weights."""


class _Sync(FakeSync):
    """`outcomes` of the next pushes; then they reach the server."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.calls = events
        self.outcomes: list[Exception | None] = []

    def push(self, version: int, *, send_to_ranks: Callable[[GatherCommand], None]) -> dict[str, float] | None:
        if not self.outcomes:
            self.served_version = version
            self.calls.append(f"push {version}")
            return {}
        outcome = self.outcomes.pop(0)
        if outcome is not None:
            raise outcome
        self.calls.append(f"no server for {version}")
        return None


class _Source(FakeSource):
    """It is asked to stop at the first `take`. `result`: of evaluations."""

    result: EvaluationResult | None = None

    def __init__(self, events: list[str], closed: list[str]) -> None:
        self.events = events
        self.start = lambda: events.append("start generating")
        self.close = lambda: closed.append("rollout side")
        self.resume_state = lambda: ResumeState(data={}, outstanding=[], ledger={})
        self.ledger_snapshot = dict
        self.wake = self.interrupt = self.stop_generating = self.wait_for_change = lambda: None
        self.tell_of_failures = lambda tell: None

    def begin_evaluation(self, task: Any, *, num_tokens: Any) -> Future[Any]:
        self.events.append(f"evaluate {task.step}")  # the evaluator gives its task back
        running: Future[Any] = Future()
        if self.result is None:  # the run is to stop
            running.cancel()
        else:
            running.set_result(self.result)
        return running

    def take(self, num_groups: int, *, trainer_version: int) -> None:
        self.events.append(f"take {trainer_version}")
        self.is_stopping = True

    def advance(self, version: int) -> None:
        self.events.append(f"serve {version}")


class _Stub:
    """Everything that rank 0 talks to. `events`: what it did, in order; `closed`: what it closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.closed: list[str] = []
        self.fleet = _Fleet(self.events, self.closed)
        self.sync = _Sync(self.events)
        self.source = _Source(self.events, self.closed)
        self.checks: list[Check] = []
        self.meanwhile: list[Callable[[], None]] = []  # what happens during the next preflights
        self.context: PreflightContext | None = None
        self.fingerprints = {"tokenizer": {"digest": "as it was", "source": "here"}}
        self.saved_fingerprints = self.fingerprints
        evaluator = SimpleNamespace(num_tokens=0, run=lambda task: task, majority_baseline=None)

        def side(config: ExperimentConfig, *, store: Any, **_: Any) -> Any:
            store.supersede_from = lambda seq, step: self.events.append(f"supersede {seq}")
            return SimpleNamespace(
                config=config, source=self.source, evaluator=evaluator, first_prompts=[], first_prompt_ids=[], tool_sets=[],
                next_seq=5,
            )  # fmt: skip

        for module, name, fake in (
            (connections_module, "Fleet", lambda urls, **_: self.fleet),
            (start_module, "build_rollout_side", side),
            (start_module, "WeightTransport", lambda *_, **__: self._transport()),
            (start_module, "FleetSync", lambda *_, **__: self.sync),
            (start_module, "run_preflight", self._preflight),
            (start_module, "run_fingerprints", lambda *_: self.fingerprints),
            (start_module, "load_state", lambda run_dir, step: self._state(step)),
            (
                start_module,
                "set_aside_later_checkpoints",
                lambda run_dir, step: self.events.append(f"set aside {step}"),
            ),
            (Saver, "save", lambda saver, step, wait=False: self._save(saver.saved_step, step)),
        ):
            monkeypatch.setattr(module, name, fake)

    def _save(self, saved_step: int | None, step: int) -> None:
        if step != saved_step:
            self.events.append(f"save {step}")

    def _transport(self) -> SimpleNamespace:
        return SimpleNamespace(close=lambda: self.closed.append("weight group"))

    def _state(self, step: int) -> CheckpointState:
        return CheckpointState(step=step, rollouts={}, fingerprints=self.saved_fingerprints)

    def _preflight(self, context: PreflightContext) -> list[Check]:
        self.events.append("preflight")
        self.context = context
        if self.meanwhile:
            self.meanwhile.pop(0)()
        return self.checks


def _lead(
    stub: _Stub,
    config: ExperimentConfig,
    *,
    resume_step: int | None = None,
) -> list[str]:
    """Run rank 0; what it told the other ranks."""
    config = config.model_copy(update={"evaluation": EvaluationSection()})
    run_dir = RunDir(config.run_path)
    run_dir.create()
    place = Assignment(
        run_dir=run_dir, attempt_dir=run_dir.latest_logs, private_dir=run_dir.root, server_urls=("http://127.0.0.1:1",),
        resume_step=resume_step,
    )  # fmt: skip
    sizes = SimpleNamespace(get_text_config=lambda: SimpleNamespace(to_dict=dict))
    model = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(num_embeddings=7), config=sizes)
    cpu = torch.device("cpu")
    context: Any = SimpleNamespace(
        config=config, run_dir=run_dir, policy=SimpleNamespace(model=model),
        load=lambda step: stub.events.append(f"restore {step}"), export=lambda **_: stub.events.append("export"),
        checkpoints=SimpleNamespace(poll=lambda: None, take_metrics=dict),
        parameters=SimpleNamespace(specs=[], device=cpu), num_parameters=0, world_size=1, device=cpu, peaks=[1 << 30],
        channel=FakeChannel(), exchange_weights=lambda: stub.events.append("exchange"),
    )  # fmt: skip
    renderer: Any = SimpleNamespace(tokenizer=range(7))
    run_rank_zero(place, ControlClient(None), context, renderer)
    return [type(command).__name__ for command in context.channel.of_first]


def test_generation_starts_after_the_checkpoint_was_restored_and_its_weights_were_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1.7, R5.2: restore, push, check, and only then the first rollout, whatever makes it; a new run pushes version 0."""
    new = _Stub(monkeypatch)
    _lead(new, make_config(tmp_path))
    assert new.events == [
        "look for servers", *PROVEN, "push 0", "serve 0", "preflight", "evaluate 0", "start generating", "take 0", "save 0",
    ]  # fmt: skip
    assert sorted(new.closed) == ["fleet", "rollout side", "weight group"]
    stub = _Stub(monkeypatch)
    config = make_config(tmp_path, training={"max_steps": 9})
    _lead(stub, config, resume_step=3)
    assert stub.events == [
        "restore 3", "set aside 3", "supersede 5", "look for servers", "exchange", "push 3", "exchange", "push 3",
        "serve 3", "preflight",
        "start generating", "take 3",
    ]  # fmt: skip


def test_a_resume_with_another_tokenizer_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other contents: tests/training/test_fingerprints.py."""
    stub = _Stub(monkeypatch)
    stub.fingerprints = {"tokenizer": {"digest": "another", "source": "here"}}
    with pytest.raises(ConfigError, match=r"step 3(.|\n)*tokenizer: "):
        _lead(stub, make_config(tmp_path), resume_step=3)
    assert stub.events == []


def test_a_push_that_fails_generates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R1.7, R1.8: and the weight group and the rollout thread are ended, as at the end of every run."""
    stub = _Stub(monkeypatch)
    stub.sync.outcomes = [OSError("no way to the server")]
    with pytest.raises(OSError, match="no way to the server"):
        _lead(stub, make_config(tmp_path))
    assert stub.events == ["look for servers", "exchange", "exchange"]
    assert sorted(stub.closed) == ["fleet", "rollout side", "weight group"]


def test_a_check_that_fails_ends_the_run_before_anything_is_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = _Stub(monkeypatch)
    stub.checks = [
        Check(name="dtype", status="warn", detail="hm"),
        Check(name="logprobs", status="fail", detail="they differ by 3 nats"),
    ]
    with pytest.raises(
        RunError, match=r"the preflight found problems that would spoil the run:\nlogprobs: they differ by 3 nats$"
    ):
        _lead(stub, make_config(tmp_path))
    assert stub.events[-1] == "preflight"
    assert stub.context is not None
    assert (stub.context.policy_version, stub.context.num_embeddings) == (0, 7)


@pytest.mark.parametrize("seen", [True, False])
def test_a_server_that_dies_while_it_is_checked_is_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """Whether the fleet has noticed it already, or nobody has."""
    stub = _Stub(monkeypatch)
    broken, whole = Check("generation", "fail", "Connection refused"), Check("generation", "pass", "it does")
    stub.checks = [broken]

    def dies() -> None:
        if seen:
            stub.fleet.life = "second"
        else:
            stub.fleet.is_silent = True

    def is_back() -> None:
        stub.fleet.is_silent = False
        stub.checks = [whole]

    stub.meanwhile = [dies, is_back]
    _lead(stub, make_config(tmp_path))
    assert stub.events.count("preflight") == 2
    assert ("suspect 0" in stub.events) is not seen
    assert "start generating" in stub.events


def test_without_a_server_at_the_end_the_model_is_saved_and_exported_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = _Stub(monkeypatch)

    def all_its_steps(trainer: Trainer) -> int:
        trainer.is_complete = True
        trainer.publisher.version = 2
        return 2

    monkeypatch.setattr(Trainer, "train", all_its_steps)
    stub.fleet.up = [True, RunError("all servers were given up")]
    _lead(stub, make_config(tmp_path))
    assert stub.events[-5:] == ["save 2", "export", "push 2", "serve 2", "evaluate 2"]


def test_a_stop_during_the_evaluation_after_training_leaves_a_run_that_a_resume_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    run_dir = RunDir(config.run_path)
    run_dir.model.mkdir(parents=True)

    def lead_from_the_last_step(result: EvaluationResult | None) -> dict[str, Any]:
        stub = _Stub(monkeypatch)
        stub.source.result = result
        _lead(stub, config, resume_step=2)
        assert stub.events[-2:] == ["export", "evaluate 2"]
        summary: dict[str, Any] = json.loads(run_dir.summary.read_text())
        return summary

    stopped = lead_from_the_last_step(None)
    assert (stopped["status"], stopped["steps"], stopped["model"]) == ("stopped", 2, str(run_dir.model))
    console = Console(file=io.StringIO(), width=200)
    print_summary(console, RunHistory(status="stopped", summary=stopped), run_dir.root)
    assert "--resume latest    # make the evaluation after training" in console.file.getvalue()  # type: ignore[attr-defined]
    finished = lead_from_the_last_step(EvaluationResult(metrics={"reward": 0.5}, by_group={}))
    assert (finished["status"], finished["evaluation"]["after"]) == ("finished", {"reward": 0.5})
