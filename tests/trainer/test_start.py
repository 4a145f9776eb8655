"""The order of rank 0's life; everything around the order is a fake that notes its calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_async.buffer.resume import ResumeState
from grpo_async.checks.preflight import PreflightContext
from grpo_async.checks.report import Check
from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError, RunError
from grpo_async.processes.assignment import Assignment
from grpo_async.processes.control import ControlClient
from grpo_async.run_directory import RunDir
from grpo_async.trainer import connections as connections_module
from grpo_async.trainer import start as start_module
from grpo_async.trainer.saving import Saver
from grpo_async.trainer.start import run_rank_zero
from grpo_async.training.checkpoint import CheckpointState
from grpo_async.weights.push import GatherCommand
from tests.launch.support import make_config
from tests.trainer.fakes import FakeChannel, FakeSource, FakeSync

PROVEN = "exchange", "push 0", "exchange"
"""A push of other weights."""


def _fleet(events: list[str]) -> Any:
    """inference.fleet.Fleet with one server, which serves what was pushed to it."""
    info = SimpleNamespace(engine="embedded", instance_id="first")
    control = SimpleNamespace(heartbeat=lambda: info)
    server = SimpleNamespace(info=info, instance_id="first", index=0, name="server 0", control=control)
    fleet = SimpleNamespace(
        failures=[],
        start=lambda: events.append("look for servers"),
        close=lambda: None,
        servers=list,
        wait_until_up=lambda **_: True,
        serving=lambda: [server] if any(event.startswith("push") for event in events) else [],
        read_counters=lambda: SimpleNamespace(busy_s=0.0, generated_tokens=0),
        metrics=dict,
    )
    fleet.subscribe = fleet.subscribe_info = fleet.on_server_event = lambda *_: None
    return fleet


class _Sync(FakeSync):
    """Pushes reach the server."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def push(self, version: int, *, send_to_ranks: Callable[[GatherCommand], None]) -> dict[str, float]:
        self.served_version = version
        self.events.append(f"push {version}")
        return {}


class _Source(FakeSource):
    """It is asked to stop at the first `take`."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.start = lambda: events.append("start generating")
        self.resume_state = lambda: ResumeState(data={}, outstanding=[], ledger={})
        self.ledger_snapshot = dict
        self.wake = self.interrupt = self.stop_generating = self.close = lambda: None
        self.tell_of_failures = lambda tell: None

    def take(self, num_groups: int, *, trainer_version: int) -> None:
        self.events.append(f"take {trainer_version}")
        self.is_stopping = True

    def advance(self, version: int) -> None:
        self.events.append(f"serve {version}")


class _Stub:
    """Everything that rank 0 talks to. `events`: what it did, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.sync = _Sync(self.events)
        self.checks: list[Check] = []
        self.saved_fingerprints = self.fingerprints = {"tokenizer": {"digest": "as it was", "source": "here"}}
        fleet, source = _fleet(self.events), _Source(self.events)

        def side(config: ExperimentConfig, *, store: Any, **_: Any) -> Any:
            store.supersede_from = lambda seq, step: self.events.append(f"supersede {seq}")
            return SimpleNamespace(
                config=config,
                source=source,
                evaluator=None,
                first_prompts=[],
                first_prompt_ids=[],
                tool_sets=[],
                next_seq=5,
            )

        for module, name, fake in (
            (connections_module, "Fleet", lambda urls, **_: fleet),
            (start_module, "build_rollout_side", side),
            (start_module, "WeightTransport", lambda *_, **__: SimpleNamespace(close=lambda: None)),
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

    def _state(self, step: int) -> CheckpointState:
        return CheckpointState(step=step, rollouts={}, fingerprints=self.saved_fingerprints)

    def _preflight(self, context: PreflightContext) -> list[Check]:
        self.events.append("preflight")
        assert context.num_embeddings == 7
        return self.checks


def _lead(stub: _Stub, config: ExperimentConfig, *, resume_step: int | None = None) -> None:
    """Run rank 0."""
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
        load=lambda step: stub.events.append(f"restore {step}"),
        checkpoints=SimpleNamespace(poll=lambda: None, take_metrics=dict),
        parameters=SimpleNamespace(specs=[], device=cpu), num_parameters=0, world_size=1, device=cpu, peaks=[1 << 30],
        channel=FakeChannel(), exchange_weights=lambda: stub.events.append("exchange"),
    )  # fmt: skip
    renderer: Any = SimpleNamespace(tokenizer=range(7))
    run_rank_zero(place, ControlClient(None), context, renderer)


def test_generation_starts_after_the_checkpoint_was_restored_and_its_weights_were_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1.7, R5.2: restore, push, check, and only then the first rollout, whatever makes it; a new run pushes version 0."""
    new = _Stub(monkeypatch)
    _lead(new, make_config(tmp_path))
    assert new.events == [
        "look for servers", *PROVEN, "push 0", "serve 0", "preflight", "start generating", "take 0", "save 0",
    ]  # fmt: skip
    stub = _Stub(monkeypatch)
    config = make_config(tmp_path, training={"max_steps": 9})
    _lead(stub, config, resume_step=3)
    assert stub.events == [
        "restore 3", "set aside 3", "supersede 5", "look for servers", "exchange", "push 3", "exchange", "push 3",
        "serve 3", "preflight", "start generating", "take 3",
    ]  # fmt: skip


def test_a_resume_with_another_tokenizer_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other contents: tests/training/test_fingerprints.py."""
    stub = _Stub(monkeypatch)
    stub.fingerprints = {"tokenizer": {"digest": "another", "source": "here"}}
    with pytest.raises(ConfigError, match=r"step 3(.|\n)*tokenizer: "):
        _lead(stub, make_config(tmp_path), resume_step=3)
    assert stub.events == []


def test_a_check_that_fails_ends_the_run_before_anything_is_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = _Stub(monkeypatch)
    stub.checks = [Check(name="logprobs", status="fail", detail="they differ by 3 nats")]
    with pytest.raises(RunError, match=r"problems that would spoil the run:\nlogprobs: they differ by 3 nats$"):
        _lead(stub, make_config(tmp_path))
    assert stub.events[-1] == "preflight"
