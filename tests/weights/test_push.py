"""A push to several servers over real gloo groups: its order, what arrives, and which server failed when a phase fails."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from grpo_async.config.sections import WeightsSection
from grpo_async.errors import DeadlineError, RequestRejectedError, ServerUnavailableError, WeightPushError
from grpo_async.weights import push as push_module
from grpo_async.weights.backends import NOT_FORMED
from grpo_async.weights.push import PushFailedError, WeightTransport, push_weights
from grpo_async.weights.receiver import NOT_ARRIVED, NOT_AS_SENT
from tests.weights.servers import LIMIT_S, DyingWorkers, Events, Parameters, Workers

SETTINGS = WeightsSection(timeout_s=LIMIT_S)
BROKEN = ServerUnavailableError("POST /x failed 1 time; the last error: ReadError")
NOT_ARRIVED_ANSWER = ServerUnavailableError(f"the server answered 500: {NOT_ARRIVED} (bucket 1): reset", answered=True)
OWN_ANSWER = ServerUnavailableError("the server answered 500: out of memory", answered=True)
REFUSED = RequestRejectedError(400, "a is not a parameter of the served model")
PHASES = ["pause", "connect", "start", "transfer", "transferred", "finish", "resume"]


def _transport(timeout_s: float = LIMIT_S, host: str = "127.0.0.1") -> WeightTransport:
    return WeightTransport("gloo", host=host, bucket_bytes=4096, timeout_s=timeout_s, device=torch.device("cpu"))


@pytest.fixture
def transport() -> Iterator[WeightTransport]:
    transport = _transport()
    yield transport
    transport.close()


class _Push:
    """Pushes to servers "a" and "b", which fail as told."""

    def __init__(self, transport: WeightTransport, *, a: Any = None, b: Any = None, settings: Any = SETTINGS) -> None:
        self.events = Events()
        self.servers: Any = [Workers("a", events=self.events, faults=a), Workers("b", events=self.events, faults=b)]
        self.transport = transport
        self.parameters: Any = Parameters(events=self.events)
        self.send_to_ranks: Any = lambda command: self.events.append(f"before gathering {command.bucket_bytes}")
        self._settings = settings

    def run(self, version: int = 7) -> dict[str, float]:
        return push_weights(
            self.parameters,
            version=version,
            servers=self.servers,
            transport=self.transport,
            settings=self._settings,
            send_to_ranks=self.send_to_ranks,
        )

    def fail(self) -> PushFailedError:
        with pytest.raises(PushFailedError) as caught:
            self.run()
        for server in self.servers:  # whatever happened
            assert not server.is_whole or self.events.of(server.name)[-1] == "resume"
        return caught.value


def test_the_order_of_a_push(transport: WeightTransport) -> None:
    push = _Push(transport)
    metrics = push.run()
    for name in ("a", "b"):
        assert push.events.of(name) == PHASES
    events = push.events
    # each phase starts when the one before has ended everywhere; engines that step together (data parallelism) join only
    # while they are paused
    places = {phase: [events.index(f"{name} {phase}") for name in "ab"] for phase in PHASES if phase != "transferred"}
    for one, next_one in itertools.pairwise(places.values()):
        assert max(one) < min(next_one)
    assert max(places["start"]) < events.index("before gathering 4096") < events.index("gathering 0")
    for server in push.servers:
        assert server.calls["start"]["info"].names == list(push.parameters.tensors)
        assert server.version == 7
    assert metrics["sync/bytes"] == sum(tensor.nbytes for tensor in push.parameters.tensors.values())
    assert metrics["sync/servers"] == 2.0
    assert "sync/recomputed_ratio" not in metrics, "caches are kept"
    assert metrics["sync/push_s"] >= metrics["sync/stopped_s"] > 0.0


def test_adapters_that_are_swapped_pause_nothing(transport: WeightTransport) -> None:
    push = _Push(transport)
    push.parameters.swap = True
    metrics = push.run()
    for server in push.servers:
        assert push.events.of(server.name) == [phase for phase in PHASES if phase not in ("pause", "resume")]
        assert server.calls["start"]["info"].swap
    assert metrics["sync/push_s"] > metrics["sync/stopped_s"] > 0.0


def test_every_worker_of_every_server_gets_the_same_bytes_also_of_one_that_joins_later(
    transport: WeightTransport,
) -> None:
    push = _Push(transport)
    push.servers = [Workers("a", num_workers=2)]
    push.run()
    push.servers.append(Workers("b"))
    transport.close()
    push.run()
    assert transport.members == ("a", "b")
    for version in (2, 3):  # the group and its buffers are used again
        push.parameters.tensors["0.weight"] = torch.full((33, 17), float(version))
        push.run(version)
    assert push.servers[1].events.of("b").count("connect") == 1
    for served in [*push.servers[0].served, *push.servers[1].served]:
        assert list(served) == list(push.parameters.tensors)
        for name, tensor in push.parameters.tensors.items():
            assert served[name].dtype == tensor.dtype
            assert torch.equal(served[name], tensor), name
    assert [server.version for server in push.servers] == [3, 3]


@pytest.mark.parametrize(
    ("mode", "pause", "keep_cache"),
    [("recompute", "keep", False), ("keep_kv", "keep", True), ("abort", "abort", False)],
)
def test_the_mode_decides_how_servers_pause(
    transport: WeightTransport, mode: Any, pause: str, keep_cache: bool
) -> None:
    push = _Push(transport, settings=SETTINGS.model_copy(update={"mode": mode}))
    metrics = push.run()
    asked = push.servers[0].calls["pause"]
    assert (asked["mode"], asked["keep_cache"]) == (pause, keep_cache)
    if mode == "recompute":  # 30 of each server, which computed 60 and 180 since the push before: 60 / (60 + 240)
        assert (metrics["sync/recomputed_tokens"], metrics["sync/recomputed_ratio"]) == (60.0, 0.2)


# ---- a group that does not form ----


@pytest.mark.parametrize(
    ("error", "num_others"),
    [(ServerUnavailableError("connection refused"), 2), (RequestRejectedError(400, "no"), 0), (OWN_ANSWER, 2)],
    ids=["unreachable", "400", "500"],
)
def test_a_server_that_does_not_join_ends_the_wait_of_all_at_once(
    transport: WeightTransport, error: Exception, num_others: int
) -> None:
    others: list[Any] = [Workers(f"good {number}") for number in range(num_others)]
    started = time.monotonic()
    with pytest.raises(PushFailedError) as caught:
        transport.connect([*others, Workers("bad", faults={"connect": error})])  # type: ignore[list-item]
    assert time.monotonic() - started < LIMIT_S / 2
    assert (caught.value.phase, caught.value.failures) == ("connect", {"bad": error})
    assert set(caught.value.affected) == {other.name for other in others}
    assert all(NOT_FORMED in str(affected) for affected in caught.value.affected.values())
    assert transport.members == ()
    if others:
        transport.connect(others)  # they are well
        assert transport.members == ("good 0", "good 1")


# ---- a push that fails ----


@pytest.mark.parametrize(("phase", "error"), [("pause", OWN_ANSWER), ("start", REFUSED), ("finish", BROKEN)])
def test_a_server_that_fails_in_a_phase_is_named_and_the_other_is_not(
    transport: WeightTransport, phase: str, error: Exception
) -> None:
    push = _Push(transport, a={phase: error})
    failed = push.fail()
    assert (failed.phase, failed.failures) == (phase, {"a": error})
    assert f"{phase} of the push of version 7 failed: a: {error}" in str(failed)
    assert (push.parameters.num_gathered > 0) == (phase == "finish")  # nobody gathers before the servers are ready
    assert ("finish" in push.events.of("b")) == (phase == "finish")


def test_a_server_that_cannot_be_resumed_has_failed(transport: WeightTransport) -> None:
    """At the end, or after another failure: it stays paused."""
    with pytest.raises(PushFailedError) as caught:
        _Push(transport, b={"resume": BROKEN}).run()
    assert (caught.value.phase, caught.value.failures) == ("resume", {"b": BROKEN})
    failed = _Push(transport, a={"start": BROKEN}, b={"resume": OWN_ANSWER}).fail()
    assert (failed.phase, failed.failures) == ("start", {"a": BROKEN, "b": OWN_ANSWER})


def test_a_server_that_dies_in_the_broadcast_has_failed_and_the_others_take_the_next_push(
    transport: WeightTransport,
) -> None:
    """It is rank 1: gloo lets it pass buckets on to the others. With real processes: tests/e2e/test_failover.py."""
    push = _Push(transport)
    push.servers = [DyingWorkers("a"), Workers("b"), Workers("c")]
    push.parameters = Parameters(num_layers=40)
    started = time.monotonic()
    failed = push.fail()
    assert time.monotonic() - started < LIMIT_S
    assert (failed.phase, list(failed.failures)) == ("transfer", ["a"])
    # they hold a part of the update, which the next push mends: to fence them would restart every server of the group
    assert set(failed.affected) == {"b", "c"}
    assert all("resume" not in server.calls for server in push.servers), "nobody generates with parts of two versions"
    assert transport.members == ()
    assert push.parameters.num_gathered == push.parameters.num_buckets(4096)  # the other ranks wait in the collective
    del push.servers[0]
    push.run(8)
    for server in push.servers:
        assert "resume" in server.calls
        (served,) = server.served
        assert all(torch.equal(served[name], tensor) for name, tensor in push.parameters.tensors.items())


def test_a_server_that_did_not_get_what_was_sent_has_failed_when_all_went_out(transport: WeightTransport) -> None:
    failed = _Push(transport, a={"transferred": NOT_ARRIVED_ANSWER}).fail()
    assert transport.members == ()
    assert (failed.failures, failed.affected) == ({"a": NOT_ARRIVED_ANSWER}, {})


@pytest.mark.parametrize("phase", ["pause", "start", "transfer"])
def test_a_server_that_does_not_answer_ends_the_phase_at_its_deadline(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_module, "GRACE_S", 0.5)
    never = threading.Event()
    settings = WeightsSection(timeout_s=1.0)
    transport = _transport(5.0)  # a bucket waits for its receiver so long
    push, started = _Push(transport, a={phase: never}, settings=settings), time.monotonic()
    with pytest.raises(PushFailedError) as caught:
        push.run()
    assert time.monotonic() - started < LIMIT_S / 4
    never.set()
    transport.close()
    assert (caught.value.phase, list(caught.value.failures)) == (phase, ["a"])
    assert isinstance(caught.value.failures["a"], DeadlineError)
    assert "`weights.timeout_s`" in str(caught.value.failures["a"])


def test_a_failure_of_the_trainer_itself_resumes_the_servers_and_leaves_nobody_waiting(
    transport: WeightTransport,
) -> None:
    push = _Push(transport)

    def fail(*_: Any) -> Any:
        raise ValueError("no memory")

    push.parameters.buckets = fail
    with pytest.raises(WeightPushError, match="pushing version 7 failed: ValueError: no memory") as caught:
        push.run()
    assert not isinstance(caught.value, PushFailedError)
    for server in push.servers:
        assert not server.is_whole or push.events.of(server.name)[-1] == "resume"
    assert transport.members == ()


# ---- what arrives is what the trainer holds ----


def _spoil(transport: WeightTransport, tensor: torch.Tensor, how: str) -> None:
    """Every bucket from now on has zeros, or what lay there before, in place of `tensor`."""
    pack, wrong = transport.pack, torch.zeros_like if how == "zeros" else torch.ones_like

    def spoiled(tensors: Any) -> torch.Tensor:
        return pack([wrong(each) if each.data_ptr() == tensor.data_ptr() else each for each in tensors])

    transport.pack = spoiled  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["zeros", "left out"])
def test_a_tensor_that_is_sent_as_something_else_is_found_at_that_push_by_its_name(
    transport: WeightTransport, how: str
) -> None:
    push = _Push(transport)
    push.run()
    _spoil(transport, push.parameters.tensors["3.weight"], how)
    failed = push.fail()
    # the same on every server: it is not they who have failed
    assert (failed.phase, failed.failures, set(failed.affected)) == ("transfer", {}, {"a", "b"})
    assert f"a: the inference server answered 500: {NOT_AS_SENT} 3.weight" in str(failed)
    assert [server.is_whole for server in push.servers] == [False, False], "they generate nothing with it"


def test_a_server_that_gets_something_else_than_the_others_has_failed(transport: WeightTransport) -> None:
    push = _Push(transport)
    push.run()
    backend = push.servers[1]._receivers[0]._backend
    receive = backend.receive

    def receive_wrongly(num_bytes: int, *, timeout_s: float) -> Callable[[], torch.Tensor]:
        wait = receive(num_bytes, timeout_s=timeout_s)
        return lambda: wait().index_fill_(0, torch.tensor([num_bytes // 2]), 77)

    backend.receive = receive_wrongly
    failed = push.fail()
    assert list(failed.failures) == ["b"]
    assert NOT_AS_SENT in str(failed.failures["b"])


def test_the_fraction_of_tensors_that_a_push_changed_is_reported(transport: WeightTransport) -> None:
    push = _Push(transport)
    assert "sync/changed" not in push.run(1)
    assert push.run(2)["sync/changed"] == 0.0
    push.parameters.tensors["0.weight"][3, 5] += 1e-6
    assert push.run(3)["sync/changed"] == pytest.approx(1 / len(push.parameters.tensors))
    assert "sync/changed" not in push.run(3), "the same version again, for a server that is back"
