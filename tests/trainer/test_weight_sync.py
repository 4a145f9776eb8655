"""Who is pushed to, who is blamed, and when servers are compared with the trainer. Fleet and push are scripted here; the real ones
meet in tests/e2e/test_failover.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_async.errors import ConfigError, RequestRejectedError, RunError, ServerUnavailableError, WeightPushError
from grpo_async.inference.api import ScoreAnswer, ServedParameters, ServerInfo
from grpo_async.inference.fleet import ServerState
from grpo_async.trainer import weight_sync as module
from grpo_async.trainer.weight_sync import FleetSync
from grpo_async.training.verify import TrainerScores
from grpo_async.weights.buckets import ParameterSpec, update_problems
from grpo_async.weights.push import PushFailedError
from tests.launcher.support import make_config

SPEC = ParameterSpec(name="w", dtype_name="float32", shape=(2, 3))
PROBES = [[1, 2, 3], [4, 5]]
METRICS = {
    **{f"sync/phase/{name}_s": 0.001 for name in ("pause", "start", "transfer", "finish", "resume")},
    "sync/bytes": 24.0, "sync/bytes_per_s": 24e6, "sync/push_s": 0.006,
}  # fmt: skip


@dataclass(eq=False)
class _Server:
    """A server of the fleet and its control in one."""

    index: int
    info: ServerInfo
    shapes: dict[str, list[int]] = field(default_factory=lambda: {"w": [2, 3]})
    logprob: float = -1.0
    version: int = 0
    events: list[str] = field(default_factory=list)
    fails: Callable[[str], Exception] | None = None
    instance_id: str = "a"
    state: ServerState = ServerState.READY
    answers_as: str = "a"
    """The life of what answers at its address."""

    @property
    def name(self) -> str:
        return f"server {self.index}"

    @property
    def control(self) -> _Control:
        return _Control(self)

    def parameters(self) -> ServedParameters:
        if self.fails is not None:
            raise self.fails("gone")
        return ServedParameters(shapes=self.shapes)

    def score(self, token_ids: Sequence[int]) -> ScoreAnswer:
        if self.fails is not None:
            raise self.fails("gone")
        return ScoreAnswer(logprobs=[self.logprob] * (len(token_ids) - 1), policy_version=self.version)

    def sleep(self, *, timeout_s: float) -> None:
        if self.fails is not None:
            raise self.fails("no sleep")
        self.events.append("sleep")

    def wake_up(self, *, timeout_s: float) -> None:
        self.events.append("wake up")


def _server(index: int = 0, **fields: Any) -> _Server:
    info = {"engine": "embedded", "model": "m", "dtype": "float32", "max_model_len": 2048}
    return _Server(index, ServerInfo(**info | {"policy_version": 0} | fields.pop("info", {})), **fields)


class _Control:
    """The calls of a server; `info` is a call here, and a fact of the server's record."""

    def __init__(self, server: _Server) -> None:
        self._server = server

    def info(self) -> ServerInfo:
        return self._server.info.model_copy(update={"instance_id": self._server.answers_as})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


class _Fleet:
    def __init__(self, servers: Sequence[_Server]) -> None:
        self.up = list(servers)
        self.fenced: list[tuple[str, str]] = []
        self.given_up: list[str] = []
        self.suspected: list[int] = []

    def servers_up(self) -> list[_Server]:
        return list(self.up)

    def serving(self) -> list[_Server]:
        return [server for server in self.up if server.state is ServerState.SERVING]

    @property
    def has_ready(self) -> bool:
        return self.serving() != self.up

    def mark_serving(self, servers: Sequence[_Server], *, version: int) -> list[_Server]:
        new = [server for server in servers if server.state is not ServerState.SERVING]
        for server in servers:
            server.version, server.state = version, ServerState.SERVING
        return new

    def fence(self, server: _Server, reason: str) -> None:
        self.fenced.append((server.name, reason))
        self.up.remove(server)

    def restarted(self, server: _Server, info: ServerInfo) -> None:
        self.fenced.append((server.name, "it was restarted"))
        server.instance_id, server.state = info.instance_id, ServerState.READY

    def give_up(self, server: _Server, reason: str) -> None:
        self.given_up.append(server.name)
        self.up.remove(server)

    def suspect(self, index: int) -> None:
        self.suspected.append(index)

    @contextmanager
    def loading_weights(self) -> Iterator[None]:
        yield


class _Transport:
    """A push that finds it closed connects it."""

    def __init__(self) -> None:
        self.members: tuple[str, ...] = ()
        self.groups: list[tuple[str, ...]] = []

    def connect(self, targets: Sequence[_Server]) -> None:
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
        self, parameters: Any, *, version: int, servers: Sequence[_Server], transport: _Transport, **_: Any
    ) -> dict[str, float]:
        if not transport.members:
            transport.connect(servers)
        self.made.append((version, tuple(server.name for server in servers)))
        outcome = self.script.pop(0) if self.script else None
        if outcome is not None:
            raise outcome
        return dict(METRICS)


@dataclass
class _Sync:
    fleet: _Fleet
    transport: _Transport
    pushes: _Pushes
    sync: FleetSync
    told: list[str]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., _Sync]:
    def make(*servers: _Server, **sections: Any) -> _Sync:
        fleet, transport, pushes, told = _Fleet(servers), _Transport(), _Pushes(), []
        monkeypatch.setattr(module, "push_weights", pushes)
        sync = FleetSync(
            make_config(tmp_path, **sections),
            fleet,  # type: ignore[arg-type]
            transport,  # type: ignore[arg-type]
            SimpleNamespace(  # type: ignore[arg-type]
                specs=[SPEC], problems=lambda served: update_problems([SPEC], served.shapes, served.optional)
            ),
            probes=PROBES,
            on_serving=lambda server: told.append(server.name),
        )
        return _Sync(fleet, transport, pushes, sync, told)

    return make


def _failed(phase: str = "send", **failures: Exception) -> PushFailedError:
    return PushFailedError(
        "it failed", phase=phase, failures={name.replace("_", " "): e for name, e in failures.items()}
    )


def _nothing(bucket_bytes: int) -> None: ...


def _score(sequences: Sequence[Sequence[int]], rounding: str) -> TrainerScores:
    """Rounding moves the trainer's own by 0.01 in bfloat16, by 1e-6 in float32."""
    moved = -1.0 - {"bfloat16": 0.01, "float32": 1e-6}[rounding]
    lengths = [len(sequence) - 1 for sequence in sequences]
    return TrainerScores(logprobs=[[-1.0] * n for n in lengths], perturbed_logprobs=[[moved] * n for n in lengths])


def test_a_push_goes_to_every_server_that_is_up_in_one_group_that_lasts(world: Any) -> None:
    w = world(_server(0), _server(1))
    assert w.sync.push(0, before_gather=_nothing) == METRICS
    w.sync.push(1, before_gather=_nothing)
    assert w.pushes.made == [(0, ("server 0", "server 1")), (1, ("server 0", "server 1"))]
    assert w.transport.groups == [("server 0", "server 1")]
    assert w.told == ["server 0", "server 1"]
    w.fleet.up.append(_server(2))
    assert w.fleet.has_ready
    w.sync.push(2, before_gather=_nothing)
    assert w.transport.groups[1:] == [("server 0", "server 1", "server 2")], "one that joins makes a new group"
    assert w.told[2:] == ["server 2"]
    assert w.fleet.serving() == w.fleet.up


def test_who_failed_is_fenced_and_the_others_get_the_same_version_in_a_new_group(world: Any) -> None:
    w = world(_server(0), _server(1))
    w.pushes.script = [_failed("send", server_1=ServerUnavailableError("connection reset"))]
    w.pushes.script.append(None)
    w.sync.push(3, before_gather=_nothing)
    assert w.pushes.made == [(3, ("server 0", "server 1")), (3, ("server 0",))]
    ((name, reason),) = w.fleet.fenced
    assert name == "server 1"
    assert "send of a weight push failed" in reason
    assert "connection reset" in reason
    assert w.transport.groups == [("server 0", "server 1"), ("server 0",)]
    assert w.told == ["server 0"]
    w.pushes.script = [_failed("finish", server_0=ServerUnavailableError("gone"))]
    assert w.sync.push(4, before_gather=_nothing) is None, "none is left: the push is skipped"


def test_requests_that_do_not_drain_in_time_end_the_run_and_restart_no_server(world: Any) -> None:
    """They would take as long on any server; a server that does not answer at all is to blame, here as ever."""
    w = world(_server(0), weights={"mode": "drain"})
    w.pushes.script = [_failed("pause", server_0=ServerUnavailableError("504: 3 requests still run", answered=True))]
    with pytest.raises(WeightPushError, match="3 requests still run"):
        w.sync.push(3, before_gather=_nothing)
    assert w.fleet.fenced == []
    w.pushes.script = [_failed("pause", server_0=ServerUnavailableError("connection reset"))]
    assert w.sync.push(3, before_gather=_nothing) is None
    assert len(w.fleet.fenced) == 1


def test_an_update_that_a_server_refuses_ends_the_run(world: Any) -> None:
    """It would refuse it again; fencing it would restart a server for nothing."""
    w = world(_server(0), _server(1))
    w.pushes.script = [_failed("update", server_1=RequestRejectedError(400, "w has shape [3, 2]"))]
    with pytest.raises(WeightPushError):
        w.sync.push(3, before_gather=_nothing)
    assert w.fleet.fenced == []


def test_a_server_that_was_restarted_in_the_middle_of_a_push_gets_the_push_in_its_new_life(world: Any) -> None:
    """It answers to the second phase and knows nothing of the first."""
    w = world(_server(0))
    w.sync.push(0, before_gather=_nothing)
    w.fleet.up[0].answers_as = "b"
    w.pushes.script = [_failed("start", server_0=RequestRejectedError(400, "there is no weight group"))]
    assert w.sync.push(1, before_gather=_nothing) is not None
    assert w.fleet.fenced == [("server 0", "it was restarted")]
    assert w.transport.groups == [("server 0",), ("server 0",)]
    assert w.fleet.serving()


def test_pushes_that_fail_although_every_server_is_well_end_the_run_after_three(world: Any) -> None:
    w = world(_server(0))
    w.pushes.script = [_failed(), _failed(), None]
    assert w.sync.push(1, before_gather=_nothing) is not None
    w.pushes.script = [_failed(), _failed(), _failed(), None]
    with pytest.raises(PushFailedError):
        w.sync.push(2, before_gather=_nothing)
    assert w.fleet.fenced == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"info": {"max_model_len": 100}}, "accepts 100 tokens, but inference.max_model_len is 2048"),
        ({"shapes": {"w": [3, 2]}}, "server 0 serves another model than model.path"),
    ],
)
def test_a_first_server_that_cannot_serve_this_run_is_refused_before_anything_is_sent(
    world: Any, wrong: dict[str, Any], words: str
) -> None:
    w = world(_server(0, **wrong))
    with pytest.raises(ConfigError) as refusal:
        w.sync.push(0, before_gather=_nothing)
    assert words in str(refusal.value)
    assert w.pushes.made == []


@pytest.mark.parametrize("refuses", ["at its check", "the update"])
def test_a_late_server_that_cannot_serve_this_run_is_given_up_and_the_run_goes_on(
    world: Any, caplog: pytest.LogCaptureFixture, refuses: str
) -> None:
    w = world(_server(0))
    w.sync.push(0, before_gather=_nothing)
    w.fleet.up.append(_server(1, shapes={"w": [3, 2]}) if refuses == "at its check" else _server(1))
    if refuses == "the update":
        w.pushes.script = [_failed("update", server_1=RequestRejectedError(400, "w is bfloat16"))]
    with caplog.at_level(logging.ERROR):
        w.sync.push(1, before_gather=_nothing)
    assert w.fleet.given_up == ["server 1"]
    assert "server 1 cannot take part in this run" in caplog.text
    assert w.pushes.made[-1] == (1, ("server 0",))


def test_servers_are_compared_every_nth_push_and_when_one_joins_but_not_at_the_first(world: Any) -> None:
    w = world(_server(0), weights={"verify_every_pushes": 3})
    compared = []
    for version in range(7):
        if version == 5:
            w.fleet.up.append(_server(1))
        w.sync.push(version, before_gather=_nothing)
        if w.sync.verify(_score):
            compared.append(version)
    assert compared == [3, 5, 6]


@pytest.mark.parametrize(("logprob", "version"), [(-1.0011, None), (-1.0, 9), (float("nan"), None)])
def test_a_server_that_does_not_serve_the_trainers_weights_ends_the_run(
    world: Any, logprob: float, version: int | None
) -> None:
    w = world(_server(0), _server(1, logprob=logprob), weights={"verify_every_pushes": 1})
    w.sync.push(3, before_gather=_nothing)
    w.sync.push(4, before_gather=_nothing)
    if version is not None:
        w.fleet.up[1].version = version
    with pytest.raises(RunError, match=r"server 1 does not serve the trainer's weights after the push of version 4"):
        w.sync.verify(_score)


def test_a_server_that_was_restarted_or_dies_before_it_is_compared_is_no_reason_to_stop(world: Any) -> None:
    w = world(_server(0), weights={"verify_every_pushes": 1})
    w.sync.push(0, before_gather=_nothing)
    w.sync.push(1, before_gather=_nothing)
    w.fleet.up[0].version, w.fleet.up[0].answers_as = 0, "b"
    assert w.sync.verify(_score) == {}
    assert w.fleet.fenced == [("server 0", "it was restarted")]
    w.sync.push(2, before_gather=_nothing)
    w.fleet.up[0].logprob = -1.0005
    figures = {"mean": 5e-4, "p99": 5e-4, "max": 5e-4, "k3": 1.25e-7, "rounding": 1e-6}
    expected = {f"sync/verify_{name}": pytest.approx(value, rel=1e-2, abs=0.0) for name, value in figures.items()}
    assert w.sync.verify(_score) == expected, "the comparison is still due"
    w.sync.push(3, before_gather=_nothing)
    w.fleet.up[0].fails = ServerUnavailableError
    w.sync.verify(_score)
    assert w.fleet.suspected == [0]


def test_a_server_that_refuses_to_score_ends_the_run(world: Any) -> None:
    w = world(_server(0), weights={"verify_every_pushes": 1})
    w.sync.push(0, before_gather=_nothing)
    w.sync.push(1, before_gather=_nothing)
    w.fleet.up[0].fails = partial(RequestRejectedError, 400)
    with pytest.raises(RunError, match=r"server 0 does not score sequences for the verification: .*gone"):
        w.sync.verify(_score)


def test_servers_sleep_while_a_step_trains_and_wake_for_the_push_and_one_that_does_not_is_fenced(world: Any) -> None:
    w = world(_server(0), inference={"vllm": {"sleep_while_training": True}}, rollout={"max_staleness": 0})
    w.sync.push(0, before_gather=_nothing)
    w.sync.sleep_servers()
    w.sync.push(1, before_gather=_nothing)
    w.sync.push(2, before_gather=_nothing)
    assert w.fleet.up[0].events == ["sleep", "wake up"]
    w.fleet.up[0].fails = ServerUnavailableError
    w.sync.sleep_servers()
    assert "did not sleep" in w.fleet.fenced[0][1]
