"""Who is pushed to, who is blamed, and when servers are compared with the trainer. Servers and pushes are scripted here; the real
ones meet in tests/e2e/test_failover.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_async.errors import ConfigError, RequestRejectedError, RunError, ServerUnavailableError, WeightPushError
from grpo_async.inference.api import ScoreAnswer, ServedParameters, ServerInfo
from grpo_async.inference.fleet import Fleet, ServerState
from grpo_async.trainer.weight_sync import FleetSync
from grpo_async.training.verify import TrainerScores
from grpo_async.weights.buckets import ParameterSpec, update_problems
from grpo_async.weights.push import PushFailedError
from tests.launch.support import make_config

SPEC = ParameterSpec(name="w", dtype_name="float32", shape=(2, 3))
PROBES = [[1, 2, 3], [4, 5]]
METRICS = {
    **{f"sync/phase/{name}_s": 0.001 for name in ("pause", "start", "transfer", "finish", "resume")},
    "sync/bytes": 24.0, "sync/bytes_per_s": 24e6, "sync/push_s": 0.006,
}  # fmt: skip


class _Control:
    """Stands for the ServerControl of a fleet's server: what that reports, and what it was asked to do."""

    def __init__(self, url: str, *, name: str, **_: Any) -> None:
        self.name = name.partition(" (")[0]
        self.life = "a"
        self.dtype, self.max_model_len = "float32", 2048
        self.shapes = {"w": [2, 3]}
        self.logprob, self.version = -1.0, 0
        self.events: list[str] = []
        self.fails: Callable[[str], Exception] | None = None

    def info(self) -> ServerInfo:
        return ServerInfo(
            engine="embedded", model="m", instance_id=self.life, dtype=self.dtype, max_model_len=self.max_model_len,
            policy_version=0,
        )  # fmt: skip

    def parameters(self) -> ServedParameters:
        self._answer("parameters")
        return ServedParameters(shapes=self.shapes)

    def score(self, token_ids: Sequence[int]) -> ScoreAnswer:
        self._answer("score")
        return ScoreAnswer(logprobs=[self.logprob] * (len(token_ids) - 1), policy_version=self.version)

    def sleep(self, *, timeout_s: float) -> None:
        self._answer("sleep")

    def wake_up(self, *, timeout_s: float) -> None:
        self._answer("wake up")

    def _answer(self, call: str) -> None:
        if self.fails is not None:
            raise self.fails("gone")
        self.events.append(call)


class _Transport:
    """A push that finds it closed connects it."""

    def __init__(self) -> None:
        self.members: tuple[str, ...] = ()
        self.groups: list[tuple[str, ...]] = []

    def connect(self, targets: Sequence[_Control]) -> None:
        self.members = tuple(target.name for target in targets)
        self.groups.append(self.members)

    def close(self) -> None:
        self.members = ()


class _Pushes:
    """Stands in for push_weights; `script` holds what the next pushes do, None for success."""

    def __init__(self) -> None:
        self.script: list[WeightPushError | None] = []
        self.made: list[tuple[int, tuple[str, ...]]] = []

    def __call__(
        self, parameters: Any, *, version: int, servers: Sequence[_Control], transport: _Transport, **_: Any
    ) -> dict[str, float]:
        if not transport.members:
            transport.connect(servers)
        self.made.append((version, tuple(server.name for server in servers)))
        outcome = self.script.pop(0) if self.script else None
        if outcome is not None:
            raise outcome
        return dict(METRICS)


class _World:
    """A FleetSync over a real Fleet of `count` servers, none of which is up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, count: int, **sections: Any) -> None:
        self.transport, self.pushes, self.told = _Transport(), _Pushes(), list[int]()
        monkeypatch.setattr("grpo_async.inference.fleet.ServerControl", _Control)
        monkeypatch.setattr("grpo_async.trainer.weight_sync.push_weights", self.pushes)
        config = make_config(folder, **sections)
        self.fleet = Fleet(["http://server"] * count, config.inference, token=None, control_timeout_s=1.0)
        self.controls: list[Any] = [server.control for server in self.fleet.servers()]
        parameters: Any = SimpleNamespace(
            specs=[SPEC], problems=lambda served: update_problems([SPEC], served.shapes, served.optional)
        )
        transport: Any = self.transport
        self.sync = FleetSync(
            config, self.fleet, transport, parameters, probes=PROBES,
            control=SimpleNamespace(send=lambda kind, index: self.told.append(index)),  # type: ignore[arg-type]
        )  # fmt: skip

    def is_up(self, *indices: int) -> None:
        for index in indices:
            self.fleet.found(self.fleet.server(index), self.controls[index].info())

    def push(self, version: int) -> dict[str, float] | None:
        return self.sync.push(version, send_to_ranks=lambda command: None)

    def reasons(self) -> list[str]:
        """Why servers were fenced."""
        return [failure.reason for failure in self.fleet.failures]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., _World]:
    return partial(_World, monkeypatch, tmp_path)


def _failed(phase: str = "send", **failures: Exception) -> PushFailedError:
    return PushFailedError(
        "it failed", phase=phase, failures={name.replace("_", " "): e for name, e in failures.items()}
    )


def _score(sequences: Sequence[Sequence[int]], rounding: str) -> TrainerScores:
    """Rounding moves the trainer's own by 0.01 in bfloat16, by 1e-6 in float32."""
    moved = -1.0 - {"bfloat16": 0.01, "float32": 1e-6}[rounding]
    lengths = [len(sequence) - 1 for sequence in sequences]
    return TrainerScores(logprobs=[[-1.0] * n for n in lengths], perturbed_logprobs=[[moved] * n for n in lengths])


def test_a_push_goes_to_every_server_that_is_up_in_one_group_that_lasts(world: Any) -> None:
    w = world(3)
    w.is_up(0, 1)
    assert w.push(0) == METRICS
    w.push(1)
    assert w.pushes.made == [(0, ("server 0", "server 1")), (1, ("server 0", "server 1"))]
    assert w.transport.groups == [("server 0", "server 1")]
    assert w.told == [0, 1]
    w.is_up(2)
    w.push(2)
    assert w.transport.groups[1:] == [("server 0", "server 1", "server 2")], "one that joins makes a new group"
    assert w.told[2:] == [2]
    assert not w.fleet.has_ready


def test_who_failed_is_fenced_and_the_others_get_the_same_version_in_a_new_group(world: Any) -> None:
    w = world(2)
    w.is_up(0, 1)
    w.pushes.script = [_failed("send", server_1=ServerUnavailableError("connection reset"))]
    w.push(3)
    assert w.pushes.made == [(3, ("server 0", "server 1")), (3, ("server 0",))]
    (reason,) = w.reasons()
    assert "send of a weight push failed" in reason
    assert "connection reset" in reason
    assert w.transport.groups == [("server 0", "server 1"), ("server 0",)]
    assert w.told == [0]
    w.pushes.script = [_failed("finish", server_0=ServerUnavailableError("gone"))]
    assert w.push(4) is None, "none is left: the push is skipped"


def test_an_update_that_a_server_refuses_ends_the_run(world: Any) -> None:
    """It would refuse it again; fencing it would restart a server for nothing."""
    w = world(2)
    w.is_up(0, 1)
    w.pushes.script = [_failed("update", server_1=RequestRejectedError(400, "w has shape [3, 2]"))]
    with pytest.raises(WeightPushError):
        w.push(3)
    assert w.reasons() == []


def test_a_server_that_was_restarted_in_the_middle_of_a_push_gets_the_push_in_its_new_life(world: Any) -> None:
    """It answers to the second phase and knows nothing of the first."""
    w = world(1)
    w.is_up(0)
    w.push(0)
    w.controls[0].life = "b"
    w.pushes.script = [_failed("start", server_0=RequestRejectedError(400, "there is no weight group"))]
    assert w.push(1) is not None
    assert w.reasons() == ["it was restarted, or several servers share its address"]
    assert w.transport.groups == [("server 0",), ("server 0",)]
    assert w.fleet.serving()


def test_pushes_that_fail_although_every_server_is_well_end_the_run_after_three(world: Any) -> None:
    w = world(1)
    w.is_up(0)
    w.pushes.script = [_failed(), _failed(), None]
    assert w.push(1) is not None
    w.pushes.script = [_failed(), _failed(), _failed(), None]
    with pytest.raises(PushFailedError):
        w.push(2)
    assert w.reasons() == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_model_len": 100}, "accepts 100 tokens, but inference.max_model_len is 2048"),
        ({"shapes": {"w": [3, 2]}}, "serves another model than model.path"),
    ],
)
def test_a_first_server_that_cannot_serve_this_run_is_refused_before_anything_is_sent(
    world: Any, wrong: dict[str, Any], words: str
) -> None:
    w = world(1)
    vars(w.controls[0]).update(wrong)
    w.is_up(0)
    with pytest.raises(ConfigError) as refusal:
        w.push(0)
    assert words in str(refusal.value)
    assert w.pushes.made == []


def test_a_late_server_that_cannot_serve_this_run_is_given_up_and_the_run_goes_on(world: Any) -> None:
    w = world(2)
    w.is_up(0)
    w.push(0)
    w.pushes.script = [_failed("update", server_1=RequestRejectedError(400, "w is bfloat16"))]
    w.is_up(1)
    w.push(1)
    assert w.fleet.server(1).state is ServerState.GONE
    assert w.pushes.made[-1] == (1, ("server 0",))


def test_servers_are_compared_every_nth_push_and_when_one_joins_but_not_at_the_first(world: Any) -> None:
    w = world(2, weights={"verify_every_pushes": 3})
    w.is_up(0)
    compared = []
    for version in range(7):
        w.controls[0].version = w.controls[1].version = version
        if version == 5:
            w.is_up(1)
        w.push(version)
        if w.sync.verify(_score):
            compared.append(version)
    assert compared == [3, 5, 6]


@pytest.mark.parametrize(("logprob", "version"), [(-1.0011, 4), (-1.0, 9), (float("nan"), 4)])
def test_a_server_that_does_not_serve_the_trainers_weights_ends_the_run(
    world: Any, logprob: float, version: int
) -> None:
    w = world(2, weights={"verify_every_pushes": 1})
    w.is_up(0, 1)
    w.push(3)
    w.push(4)
    w.controls[0].version = 4
    w.controls[1].version, w.controls[1].logprob = version, logprob
    with pytest.raises(RunError, match=r"server 1 .*does not serve the trainer's weights after the push of version 4"):
        w.sync.verify(_score)


def test_a_server_that_was_restarted_or_dies_before_it_is_compared_is_no_reason_to_stop(world: Any) -> None:
    w = world(1, weights={"verify_every_pushes": 1})
    w.is_up(0)
    w.push(0)
    w.push(1)
    w.controls[0].life = "b"  # of version 0
    assert w.sync.verify(_score) == {}
    assert w.reasons() == ["it was restarted, or several servers share its address"]
    w.push(2)
    w.controls[0].logprob, w.controls[0].version = -1.0005, 2
    assert w.sync.verify(_score)["sync/verify_mean"] == pytest.approx(5e-4, rel=1e-2), "the comparison is still due"
    w.push(3)
    w.controls[0].fails = ServerUnavailableError
    assert w.sync.verify(_score) == {}


def test_servers_sleep_while_a_step_trains_and_wake_for_the_push_and_one_that_does_not_is_fenced(world: Any) -> None:
    w = world(1, inference={"vllm": {"sleep_while_training": True}}, rollout={"max_staleness": 0})
    w.is_up(0)
    w.push(0)
    w.sync.sleep_servers()
    w.push(1)
    w.push(2)
    assert w.controls[0].events == ["parameters", "sleep", "wake up"]
    w.controls[0].fails = ServerUnavailableError
    w.sync.sleep_servers()
    assert "did not sleep" in w.reasons()[0]
