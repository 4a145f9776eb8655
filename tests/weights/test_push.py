"""The order of a push on several servers, what holds when a phase fails, and which server failed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from grpo_async.config.sections import WeightsSection
from grpo_async.errors import DeadlineError, RequestRejectedError, ServerUnavailableError, WeightPushError
from grpo_async.weights import push as push_module
from grpo_async.weights.backends import NOT_FORMED
from grpo_async.weights.push import PushFailedError, push_weights
from grpo_async.weights.receiver import NOT_ARRIVED
from tests.weights.fakes import LIMIT_S, Events, FakeParameters, FakeServer, FakeTransport

SETTINGS = WeightsSection(timeout_s=LIMIT_S, drain_timeout_s=2 * LIMIT_S)
BROKEN = ServerUnavailableError("POST /x failed 1 times; the last error was ReadError")
NOT_ARRIVED_ANSWER = ServerUnavailableError(f"the server answered 500: {NOT_ARRIVED} (bucket 1): reset", answered=True)
OWN_ANSWER = ServerUnavailableError("the server answered 500: out of memory", answered=True)
REFUSED = RequestRejectedError(400, "a is not a parameter of the served model")


class _Push:
    """One push to servers "a" and "b", which fail as told."""

    def __init__(
        self,
        *,
        a: dict[str, Any] | None = None,
        b: dict[str, Any] | None = None,
        broken_at: int | None = None,
        settings: WeightsSection = SETTINGS,
    ) -> None:
        self.events = Events()
        self.servers = [FakeServer("a", self.events, a), FakeServer("b", self.events, b)]
        self.transport = FakeTransport(self.events, broken_at=broken_at)
        self.parameters: Any = FakeParameters(self.events)
        self.before_gather: Any = lambda bucket_bytes: self.events.add(f"before gathering {bucket_bytes}")
        for server in self.servers:
            server.transport = self.transport
        self._settings = settings

    def run(self) -> dict[str, float]:
        return push_weights(
            self.parameters,
            version=7,
            servers=self.servers,  # type: ignore[arg-type]
            transport=self.transport,  # type: ignore[arg-type]
            settings=self._settings,
            before_gather=self.before_gather,
        )

    def fail(self) -> PushFailedError:
        with pytest.raises(PushFailedError) as caught:
            self.run()
        for name in ("a", "b"):  # whatever happened
            assert self.events.of(name)[-1] == "resume"
        return caught.value


def test_the_order_of_a_push() -> None:
    push = _Push()
    push.transport.members = ()
    metrics = push.run()
    order = ["pause", "start", "transfer", "finish", "resume"]
    for name in ("a", "b"):
        assert push.events.of(name) == order
    events = push.events.all()
    # each phase starts when the one before has ended everywhere
    ends = [max(events.index(f"{name} {phase}") for name in "ab") for phase in order[:-1]]
    starts = [min(events.index(f"{name} {phase}") for name in "ab") for phase in order[1:]]
    assert all(end < start for end, start in zip(ends, starts, strict=True))
    # engines that are in step with each other (data parallelism) join only when they stand still
    assert ends[0] < events.index("connected") < starts[0]
    assert ends[1] < events.index("before gathering 16") < events.index("gathering 0")
    assert push.transport.sent == [0, 1, 2]
    assert [server.calls["start"]["info"] for server in push.servers] == [["0", "1", "2"]] * 2
    assert [server.calls["finish"]["version"] for server in push.servers] == [7, 7]
    assert (metrics["sync/bytes"], metrics["sync/servers"]) == (48.0, 2.0)  # 3 parameters x 4 floats x 4 bytes
    assert metrics["sync/push_s"] >= metrics["sync/pause_s"] > 0.0
    phases = {f"sync/phase/{phase}_s" for phase in [*order, "connect", "gather", "send"]}
    assert set(metrics) == phases | {
        f"sync/{name}" for name in ("push_s", "pause_s", "bytes", "bytes_per_s", "servers")
    }
    assert "connected" not in _connected_again(push)


def _connected_again(push: _Push) -> list[str]:
    """What happens in one more push over the same group."""
    before = len(push.events.all())
    push.transport.sent.clear()
    push.transport.is_over.clear()
    push.run()
    return push.events.all()[before:]


@pytest.mark.parametrize(
    ("mode", "pause", "keep_cache", "timeout_s"),
    [("recompute", "keep", False, LIMIT_S), ("keep_kv", "keep", True, LIMIT_S), ("drain", "drain", False, 2 * LIMIT_S),
     ("abort", "abort", False, LIMIT_S)],
)  # fmt: skip
def test_the_mode_decides_how_servers_pause(mode: Any, pause: str, keep_cache: bool, timeout_s: float) -> None:
    push = _Push(settings=SETTINGS.model_copy(update={"mode": mode}))
    push.run()
    for server in push.servers:
        assert server.calls["pause"] == {"mode": pause, "keep_cache": keep_cache, "timeout_s": timeout_s}
        assert server.calls["start"]["timeout_s"] == LIMIT_S


def test_the_next_bucket_is_gathered_and_packed_while_one_is_sent_and_never_two_ahead() -> None:
    push = _Push()
    may_end = push.transport.may_end = {number: threading.Event() for number in range(3)}
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(push.run()))
    thread.start()
    push.events.wait_for("sending 0", "packed 1")  # deadlocks here if a bucket is not gathered while another is sent
    assert "gathering 2" not in push.events.all()
    assert "sending 1" not in push.events.all()
    may_end[0].set()
    push.events.wait_for("sending 1", "packed 2")
    assert "sending 2" not in push.events.all()
    may_end[1].set()
    may_end[2].set()
    thread.join(LIMIT_S)
    assert done
    events = push.events.all()
    # the buffer of bucket 0 is filled again with bucket 2: not before bucket 0 is out
    assert events.index("sent 0") < events.index("packed 2")


@pytest.mark.parametrize(
    ("phase", "error", "gathered"), [("pause", OWN_ANSWER, 0), ("start", REFUSED, 0), ("finish", BROKEN, 3)]
)
def test_a_server_that_fails_in_a_phase_is_named_and_the_other_is_not(
    phase: str, error: Exception, gathered: int
) -> None:
    push = _Push(a={phase: error})
    failed = push.fail()
    assert (failed.phase, failed.failures) == (phase, {"a": error})
    assert f"{phase} of the push of version 7 failed: a: {type(error).__name__}" in str(failed)
    assert push.parameters.gathered == gathered  # nobody gathers before the servers are ready
    if phase != "finish":
        assert "finish" not in [*push.events.of("a"), *push.events.of("b")]


def test_a_server_that_holds_a_part_of_the_update_is_not_resumed_and_has_not_failed_for_that() -> None:
    """The next push mends it; to fence it would restart every server of the group when one has died."""
    refuses = RequestRejectedError(409, "a part of a weight update is loaded")
    push = _Push(a={"transfer": BROKEN}, b={"transfer": NOT_ARRIVED_ANSWER, "resume": refuses}, broken_at=1)
    failed = push.fail()
    assert (failed.failures, failed.affected) == ({"a": BROKEN}, {"b": NOT_ARRIVED_ANSWER})


def test_a_server_that_cannot_be_resumed_has_failed() -> None:
    """In the end, or after another failure: it stands still."""
    failed = _Push(b={"resume": BROKEN}).fail()
    assert (failed.phase, failed.failures) == ("resume", {"b": BROKEN})
    failed = _Push(a={"start": BROKEN}, b={"resume": OWN_ANSWER}).fail()
    assert (failed.phase, failed.failures) == ("start", {"a": BROKEN, "b": OWN_ANSWER})


def test_a_broken_broadcast_in_which_no_server_has_failed_may_be_tried_again() -> None:
    not_formed = ServerUnavailableError(f"the server answered 500: {NOT_FORMED}: x", answered=True)
    failed = _Push(a={"transfer": NOT_ARRIVED_ANSWER}, b={"transfer": not_formed}, broken_at=0).fail()
    assert failed.failures == {}
    assert set(failed.affected) == {"a", "b", "trainer"}
    assert "connection reset by peer" in str(failed)


def test_a_server_that_did_not_get_what_was_sent_has_failed_when_all_went_out() -> None:
    push = _Push(a={"transfer": NOT_ARRIVED_ANSWER})
    failed = push.fail()
    assert push.transport.is_closed
    assert (failed.failures, failed.affected) == ({"a": NOT_ARRIVED_ANSWER}, {})


def _short(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> WeightsSection:
    """Deadlines of a moment."""
    monkeypatch.setattr(push_module, "GRACE_S", 0.1)
    monkeypatch.setattr(push_module, "_RESUME_SILENT_S", 0.1)
    return WeightsSection(timeout_s=0.2, drain_timeout_s=0.2, **settings)


@pytest.mark.parametrize(
    ("phase", "mode", "setting"),
    [
        *((phase, "recompute", "weights.timeout_s") for phase in ("pause", "start", "transfer", "finish")),
        ("pause", "drain", "weights.drain_timeout_s"),
    ],
)
def test_a_server_that_does_not_answer_ends_the_phase_at_its_deadline(
    phase: str, mode: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    push = _Push(a={phase: never}, settings=_short(monkeypatch, mode=mode))
    failed = push.fail()
    never.set()
    assert (failed.phase, list(failed.failures)) == (phase, ["a"])
    assert isinstance(failed.failures["a"], DeadlineError)
    assert f"`{setting}`" in str(failed.failures["a"])


def test_a_send_is_ended_as_soon_as_a_server_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for a dead peer until its deadline; closing the transport ends that."""
    push = _Push(a={"transfer": BROKEN})
    push.transport.may_end = {0: threading.Event()}  # set by nobody but `close`
    wait_for_the_end = push.transport.wait_for_the_end

    def fail_while_sending(server: Any) -> None:
        push.events.wait_for("sending 0")
        wait_for_the_end(server)

    monkeypatch.setattr(push.transport, "wait_for_the_end", fail_while_sending)
    failed = push.fail()
    assert failed.failures == {"a": BROKEN}
    assert push.transport.is_closed
    assert push.parameters.gathered == 3


@pytest.mark.parametrize("where", ["before gather", "gather"])
@pytest.mark.parametrize("error", [ValueError("no memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failure_of_the_trainer_itself_resumes_the_servers_and_leaves_nobody_waiting(
    where: str, error: BaseException
) -> None:
    push = _Push()

    def fail(*_: Any) -> Any:
        raise error

    if where == "gather":
        push.parameters.buckets = fail
    else:
        push.before_gather = fail
    expected = WeightPushError if isinstance(error, Exception) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        push.run()
    if isinstance(error, Exception):
        assert str(caught.value) == "pushing version 7 failed: ValueError: no memory"
        assert not isinstance(caught.value, PushFailedError)
    for name in ("a", "b"):
        assert push.events.of(name)[-1] == "resume"
    assert push.transport.is_closed == (where == "gather")
