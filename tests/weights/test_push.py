"""The order of a push on several servers, what holds when a phase fails, and who is to blame."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import pytest
import torch

import grpo_async.weights.participants
import grpo_async.weights.push
import grpo_async.weights.sender
from grpo_async.errors import DeadlineError, RequestRejectedError, ServerUnavailableError, WeightPushError
from grpo_async.weights.participants import NOT_ARRIVED, NOT_FORMED, PushFailedError
from grpo_async.weights.push import PushReport, PushSettings, push_weights
from tests.weights.fakes import LIMIT_S, Events, FakeParameters, FakeTarget, FakeTransport

SETTINGS = PushSettings(mode="recompute", timeout_s=LIMIT_S, drain_timeout_s=2 * LIMIT_S)
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
        settings: PushSettings = SETTINGS,
    ) -> None:
        self.events = Events()
        self.targets = [FakeTarget("a", self.events, a), FakeTarget("b", self.events, b)]
        self.transport = FakeTransport(self.events, broken_at=broken_at)
        self.parameters: Any = FakeParameters(self.events)
        self._settings = settings

    def run(self) -> PushReport:
        return push_weights(
            self.parameters,
            version=7,
            targets=self.targets,
            transport=self.transport,
            settings=self._settings,
            before_gather=lambda: self.events.add("before gather"),
        )

    def fail(self) -> PushFailedError:
        with pytest.raises(PushFailedError) as caught:
            self.run()
        for name in ("a", "b"):  # whatever happened
            assert self.events.of(name)[-1] == "resume"
        return caught.value


@pytest.mark.parametrize(
    ("beside_steps", "order"),
    [
        (True, ["start", "update", "pause", "finish", "resume"]),
        (False, ["pause", "start", "update", "finish", "resume"]),
    ],
    ids=["staged beside the steps", "staged in the memory of the steps"],
)
def test_the_order_of_a_push(beside_steps: bool, order: list[str]) -> None:
    push = _Push()
    push.transport.receives_beside_steps = beside_steps
    report = push.run()
    for name in ("a", "b"):
        assert push.events.of(name) == order
    events = push.events.all()
    # each phase begins when the one before has ended everywhere
    ends = [max(events.index(f"{name} {phase}") for name in "ab") for phase in order[:-1]]
    begins = [min(events.index(f"{name} {phase}") for name in "ab") for phase in order[1:]]
    assert all(end < begin for end, begin in zip(ends, begins, strict=True))
    assert ends[order.index("start")] < events.index("before gather") < events.index("gathering 0")
    assert max(events.index(f"sending {number}") for number in range(3)) < begins[order.index("finish") - 1]
    assert push.transport.sent == [0, 1, 2]
    assert [target.calls["finish"]["version"] for target in push.targets] == [7, 7]
    assert (report.num_bytes, report.num_servers) == (48, 2)  # 3 parameters x 4 floats x 4 bytes
    metrics = report.metrics()
    assert metrics["sync/bytes"] == 48.0
    assert metrics["sync/push_s"] >= metrics["sync/pause_s"] > 0.0
    assert {"sync/pause_ms", "sync/gather_ms", "sync/send_ms", "sync/resume_ms", "sync/bytes_per_s"} <= set(metrics)


@pytest.mark.parametrize(
    ("mode", "pause", "keep_cache", "limit_s"),
    [("recompute", "keep", False, LIMIT_S), ("keep_kv", "keep", True, LIMIT_S), ("drain", "drain", False, 2 * LIMIT_S),
     ("abort", "abort", False, LIMIT_S)],
)  # fmt: skip
def test_the_mode_decides_how_servers_pause(mode: Any, pause: str, keep_cache: bool, limit_s: float) -> None:
    push = _Push(settings=replace(SETTINGS, mode=mode))
    push.run()
    for target in push.targets:
        assert target.calls["pause"] == {"mode": pause, "keep_cache": keep_cache, "timeout_s": limit_s}
        assert target.calls["start"] == {"timeout_s": LIMIT_S}


def test_the_phases_run_on_all_servers_at_once() -> None:
    """Server a answers each phase only when b has been asked too, and the other way round."""
    push = _Push()
    for phase in ("pause", "start", "finish", "resume"):
        both = threading.Barrier(2)
        for target in push.targets:
            _meet_in(target, phase, both)
    push.run()


def _meet_in(target: FakeTarget, phase: str, both: threading.Barrier) -> None:
    do = target._do

    def meet(name: str, **arguments: Any) -> None:
        do(name, **arguments)
        if name == phase:
            both.wait(LIMIT_S)

    target._do = meet  # type: ignore[assignment,method-assign]


def test_the_next_bucket_is_gathered_and_packed_while_one_is_sent_and_never_two_ahead() -> None:
    push = _Push()
    may_end = [threading.Event() for _ in range(3)]
    send = push.transport.send

    def blocking_send(buffer: torch.Tensor) -> None:
        send(buffer)
        assert may_end[int(buffer[0])].wait(LIMIT_S)
        push.events.add(f"sent {int(buffer[0])}")

    push.transport.send = blocking_send  # type: ignore[method-assign]
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


@pytest.mark.parametrize("phase", ["pause", "start", "finish"])
@pytest.mark.parametrize("error", [BROKEN, OWN_ANSWER, REFUSED], ids=["broken", "answered 500", "answered 400"])
def test_a_server_that_fails_in_a_phase_is_named_and_the_other_is_not(phase: str, error: Exception) -> None:
    push = _Push(a={phase: error})
    failed = push.fail()
    assert (failed.phase, failed.failures) == (phase, {"a": error})
    assert f"{phase} of the push of version 7 failed: a: {type(error).__name__}" in str(failed)
    assert failed.finished == (("b",) if phase == "finish" else ())
    # nobody gathers before the servers are ready
    assert push.parameters.gathered == (0 if phase == "start" else 3)
    if phase != "finish":
        assert "finish" not in [*push.events.of("a"), *push.events.of("b")]


def test_a_server_that_cannot_be_resumed_in_the_end_has_failed_and_all_have_the_new_version() -> None:
    failed = _Push(b={"resume": BROKEN}).fail()
    assert (failed.phase, failed.failures, failed.finished) == ("resume", {"b": BROKEN}, ("a", "b"))


def test_a_server_that_cannot_be_resumed_after_a_failure_stands_still_and_has_failed_too() -> None:
    failed = _Push(a={"start": BROKEN}, b={"resume": OWN_ANSWER}).fail()
    assert (failed.phase, failed.failures) == ("start", {"a": BROKEN, "b": OWN_ANSWER})


def test_when_a_server_dies_in_the_broadcast_only_it_has_failed_and_all_buckets_are_gathered() -> None:
    push = _Push(a={"update": BROKEN}, b={"update": NOT_ARRIVED_ANSWER}, broken_at=1)
    failed = push.fail()
    assert (failed.phase, failed.failures, failed.affected) == ("update", {"a": BROKEN}, {"b": NOT_ARRIVED_ANSWER})
    assert push.parameters.gathered == 3  # the other ranks wait in the collective
    assert push.transport.is_closed
    assert "finish" not in push.events.of("b")


def _gather_after_the_answer_of_a(push: _Push, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {}

    def start_each(calls: Any, *, what: str) -> Any:
        futures = grpo_async.weights.participants.start_each(calls, what=what)
        if what == "push update":
            answers.update(futures)
        return futures

    gather = push.parameters.buckets

    def buckets(bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
        wait([answers["a"]], LIMIT_S)
        yield from gather(bucket_bytes)

    monkeypatch.setattr(grpo_async.weights.push, "start_each", start_each)
    push.parameters.buckets = buckets


def test_a_server_that_refuses_the_update_has_failed_and_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    push = _Push(a={"update": REFUSED}, b={"update": NOT_ARRIVED_ANSWER})
    _gather_after_the_answer_of_a(push, monkeypatch)
    failed = push.fail()
    assert (failed.failures, list(failed.affected)) == ({"a": REFUSED}, ["b"])
    assert push.transport.sent == []
    assert push.transport.packed == [0]
    assert push.parameters.gathered == 3


def test_a_broken_broadcast_in_which_no_server_has_failed_may_be_tried_again() -> None:
    not_formed = ServerUnavailableError(f"the server answered 500: {NOT_FORMED}: x", answered=True)
    failed = _Push(a={"update": NOT_ARRIVED_ANSWER}, b={"update": not_formed}, broken_at=0).fail()
    assert failed.failures == {}
    assert set(failed.affected) == {"a", "b", "trainer"}
    assert "connection reset by peer" in str(failed)


def test_a_server_that_did_not_get_what_was_sent_has_failed_when_all_went_out() -> None:
    push = _Push(a={"update": NOT_ARRIVED_ANSWER})
    failed = push.fail()
    assert push.transport.is_closed
    assert (failed.failures, failed.affected) == ({"a": NOT_ARRIVED_ANSWER}, {})


def test_an_answer_before_everything_was_sent_is_a_failure_of_that_server(monkeypatch: pytest.MonkeyPatch) -> None:
    push = _Push(a={"update": _set_event()})  # answers at once, with success
    _gather_after_the_answer_of_a(push, monkeypatch)
    failed = push.fail()
    assert list(failed.failures) == ["a"]
    assert "before all parameters were sent" in str(failed)


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def _short(monkeypatch: pytest.MonkeyPatch) -> PushSettings:
    """Deadlines of a moment."""
    for module in (grpo_async.weights.push, grpo_async.weights.sender):
        monkeypatch.setattr(module, "GRACE_S", 0.1)
    monkeypatch.setattr(grpo_async.weights.push, "_RESUME_BROKEN_S", 0.1)
    return replace(SETTINGS, timeout_s=0.2, drain_timeout_s=0.2)


@pytest.mark.parametrize("phase", ["pause", "start", "update", "finish"])
def test_a_server_that_does_not_answer_ends_the_phase_at_its_deadline(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    push = _Push(a={phase: never}, settings=_short(monkeypatch))
    failed = push.fail()
    never.set()
    assert (failed.phase, list(failed.failures)) == (phase, ["a"])
    assert isinstance(failed.failures["a"], DeadlineError)
    assert "weights.timeout_s" in str(failed.failures["a"])


def test_a_drain_that_takes_too_long_names_its_own_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    push = _Push(a={"pause": never}, settings=replace(_short(monkeypatch), mode="drain"))
    assert "weights.drain_timeout_s" in str(push.fail().failures["a"])
    never.set()


def test_a_send_that_hangs_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    push = _Push(a={"update": never}, b={"update": NOT_ARRIVED_ANSWER}, settings=_short(monkeypatch))
    monkeypatch.setattr(push.transport, "send", lambda _: never.wait(LIMIT_S))
    failed = push.fail()
    assert list(failed.failures) == ["a"]
    assert push.parameters.gathered == 3
    assert isinstance(failed.__cause__, DeadlineError)
    never.set()


def test_a_send_is_ended_as_soon_as_a_server_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for a dead peer until its deadline; closing the transport ends that."""
    push = _Push(a={"update": BROKEN})
    announce = push.transport.announce

    def announce_while_sending(target: Any, specs: Any) -> None:
        push.events.wait_for("sending")
        announce(target, specs)

    def send(_: torch.Tensor) -> None:
        push.events.add("sending")
        _raise_after(push.transport)

    monkeypatch.setattr(push.transport, "announce", announce_while_sending)
    monkeypatch.setattr(push.transport, "send", send)
    failed = push.fail()
    assert failed.failures == {"a": BROKEN}
    assert str(failed.__cause__) == "aborted"


def _raise_after(transport: FakeTransport) -> None:
    assert transport._over.wait(LIMIT_S / 2), "the transport was not closed"
    raise RuntimeError("aborted")


@pytest.mark.parametrize("where", ["before gather", "gather"])
def test_a_failure_of_the_trainer_itself_resumes_the_servers_and_leaves_nobody_waiting(where: str) -> None:
    push = _Push()

    def fail(*_: Any) -> Any:
        raise ValueError("no memory")

    if where == "gather":
        push.parameters.buckets = fail
        run = push.run
    else:

        def run() -> Any:
            return push_weights(
                push.parameters, version=7, targets=push.targets, transport=push.transport, settings=SETTINGS,
                before_gather=fail,
            )  # fmt: skip

    with pytest.raises(WeightPushError, match="pushing version 7 failed: ValueError: no memory") as caught:
        run()
    assert not isinstance(caught.value, PushFailedError)
    for name in ("a", "b"):
        assert push.events.of(name)[-1] == "resume"
    assert push.transport.is_closed == (where == "gather")


def test_an_interrupt_resumes_the_servers_too() -> None:
    push = _Push()

    def interrupt(_: int) -> Any:
        raise KeyboardInterrupt

    push.parameters.buckets = interrupt
    with pytest.raises(KeyboardInterrupt):
        push.run()
    assert push.events.of("a")[-1] == "resume"
