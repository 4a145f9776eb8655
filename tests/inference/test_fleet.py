"""The fleet against servers that die, hang, come back or lie. Real ones: tests/inference/test_failover.py."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from grpo_async.errors import DeadlineError, RequestRejectedError, RunError
from grpo_async.inference import fleet
from grpo_async.inference import server as server_module
from grpo_async.inference.fleet import FleetSettings, ServerState
from grpo_async.inference.monitor import _why_hopeless
from tests.inference.fake_server import fake_server
from tests.inference.fleet_support import watched

STARTING, READY, SERVING = ServerState.STARTING, ServerState.READY, ServerState.SERVING
DOWN, GONE = ServerState.DOWN, ServerState.GONE


def test_a_server_serves_only_after_it_has_been_pushed_the_weights() -> None:
    with fake_server() as server, watched([server.url]) as watch:
        watch.wait_state(READY)
        fleet = watch.fleet
        assert (len(fleet.members()), fleet.serving(), fleet.has_joiners) == (1, [], True)
        assert fleet.members()[0].control.num_workers == 2  # as its info says
        events = fleet.num_events
        fleet.mark_serving(fleet.members(), version=3)
        assert (len(fleet.serving()), fleet.has_joiners) == (1, False)
        assert fleet.num_events == events + 1
        assert watch.states == [[STARTING], [READY], [SERVING]]  # the listener heard of each


def test_a_killed_server_is_fenced_and_its_restart_asked_for_once() -> None:
    with fake_server() as server, fake_server() as other, watched([server.url, other.url]) as watch:
        watch.serve_all()
        server.stop()
        watch.wait_state(DOWN)
        assert [one.url for one in watch.fleet.serving()] == [other.url]
        watch.wait(lambda: bool(watch.restarts), "the restart to be asked for")
        ((index, reason),) = watch.restarts
        assert (index, "connection broke" in reason) == (0, True)
        assert [failure.reason for failure in watch.fleet.failures] == [reason]
        assert watch.fleet.failures[0].recovery_s is None


def test_a_suspected_server_is_looked_at_before_its_next_heartbeat() -> None:
    with fake_server() as server, watched([server.url], interval_s=600.0) as watch:
        watch.serve_all()
        server.stop()
        watch.fleet.suspect(0)
        watch.wait_state(DOWN)


def test_one_broken_connection_is_no_death() -> None:
    """A server may close what it kept open; only a second refusal in a row counts."""
    with fake_server() as server, watched([server.url], interval_s=600.0) as watch:
        watch.serve_all()
        for _ in range(3):
            since = len(watch.heartbeats)
            server.break_connections()
            watch.fleet.suspect(0)
            watch.wait_heartbeats(1, since=since)
        assert watch.states[-1] == [SERVING]
        assert watch.fleet.failures == []


def test_a_hung_engine_is_fenced_after_the_timeout_although_its_process_says_that_it_is_well() -> None:
    with fake_server() as server, watched([server.url], timeout_s=1.5) as watch:
        watch.serve_all()
        began = time.monotonic()
        server.hangs.add("/is_paused")
        watch.wait_state(DOWN)
        assert time.monotonic() - began >= 1.5
        assert "did not answer for 1.5 s (inference.heartbeat_timeout_s)" in watch.fleet.failures[0].reason


def test_a_hung_server_that_wakes_up_comes_back_in_a_new_life_only() -> None:
    """It was told to be killed; what it would still generate is of weights that nobody counts on."""
    with fake_server() as server, watched([server.url], timeout_s=1.0) as watch:
        watch.serve_all()
        server.hangs.add("/is_paused")
        watch.wait_state(DOWN)
        server.hangs.clear()
        asked = len(server.asked("/rollout/info"))
        server.wait_for(lambda: len(server.asked("/rollout/info")) > asked + 3, "some looks at it")
        assert watch.fleet.server(0).state is DOWN
        watch.tell("starting")  # the old one may still answer for a moment
        asked = len(server.asked("/rollout/info"))
        server.wait_for(lambda: len(server.asked("/rollout/info")) > asked + 3, "some looks at it")
        assert watch.fleet.server(0).state is STARTING
        server.instance_id = "second"
        watch.wait_state(READY)
        assert watch.fleet.metrics()["servers/restarts"] == 1.0
        assert len(watch.restarts) == 1


def test_a_server_of_others_comes_back_when_it_answers_again_and_needs_the_weights_again() -> None:
    with fake_server() as server, watched([server.url], spawned=False, timeout_s=1.0) as watch:
        watch.serve_all()
        server.hangs.add("/is_paused")
        watch.wait_state(DOWN)
        server.hangs.clear()
        watch.wait_state(READY)
        assert watch.fleet.serving() == []
        watch.serve_all(version=2)
        (failure,) = watch.fleet.failures
        assert failure.recovery_s is not None
        metrics = watch.fleet.metrics()
        assert metrics["servers/recovery_s"] == failure.recovery_s
        assert (metrics["servers/restarts"], metrics["servers/failures"]) == (0.0, 1.0)


def test_a_server_that_was_restarted_behind_our_back_is_fenced_before_it_is_ready() -> None:
    with fake_server() as server, watched([server.url]) as watch:
        watch.serve_all()
        server.instance_id = "second"
        watch.wait_state(READY)
        (failure,) = watch.fleet.failures  # it was taken out in between
        assert failure.reason == "it was restarted"
        assert watch.restarts == []  # it has been restarted already
        assert watch.fleet.metrics()["servers/restarts"] == 1.0


def test_weights_that_an_earlier_life_got_do_not_make_the_present_one_serve() -> None:
    with fake_server() as server, watched([server.url]) as watch:
        pushed_to = [watch.wait_state(READY)]
        server.instance_id = "second"
        watch.wait(lambda: watch.states[-2:] == [[DOWN], [READY]], "the restart to be noticed")
        watch.fleet.mark_serving(pushed_to, version=1)
        assert watch.fleet.serving() == []
        watch.fleet.fence(pushed_to[0], "the push to the first life failed")
        assert watch.fleet.server(0).state is READY


def test_while_weights_are_loaded_silence_is_no_death_and_a_refused_connection_is() -> None:
    with fake_server() as server, watched([server.url], timeout_s=1.0) as watch:
        watch.serve_all()
        with watch.fleet.applying():
            server.hangs.add("/is_paused")
            asked = len(server.asked("/is_paused"))
            server.wait_for(lambda: len(server.asked("/is_paused")) > asked + 3, "heartbeats that hang")
            assert watch.fleet.serving()
            server.stop()
            watch.wait_state(DOWN)


def test_a_heartbeat_that_such_a_load_has_overlapped_does_not_count_either() -> None:
    """The load was longer than the time-out, and is over before the heartbeat that it held up."""
    with fake_server() as server, watched([server.url], timeout_s=1.0, interval_s=600.0) as watch:
        watch.serve_all()
        server.hangs.add("/is_paused")
        asked = len(server.asked("/is_paused"))
        watch.fleet.suspect(0)
        server.wait_for(lambda: len(server.asked("/is_paused")) > asked, "a heartbeat that hangs")
        with watch.fleet.applying():
            pass
        connections = server.num_connections
        server.wait_for(lambda: server.num_connections < connections, "the heartbeat to time out")
        assert watch.fleet.serving()
        watch.fleet.suspect(0)
        watch.wait_state(DOWN)  # this one was not overlapped


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_does_not_take_the_token_is_given_up_at_once(status: int) -> None:
    """It will not take it in five minutes either."""
    with fake_server() as server:
        server.refuses |= {"/is_paused": status, "/rollout/info": status}
        with watched([server.url], spawned=False) as watch:
            watch.wait_state(GONE)
            with pytest.raises(RunError, match=str(status)) as given_up:
                watch.fleet.wait_for_members(stop=threading.Event(), deadline_s=60.0, setting="s")
    assert "GRPO_ASYNC_TOKEN" in str(given_up.value)


def test_a_certificate_that_is_not_trusted_is_hopeless_and_a_refused_connection_is_not() -> None:
    refused = httpx.ConnectError(
        "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get local issuer"
    )
    assert "inference.tls.authority" in _why_hopeless(refused, is_healthy=False)
    assert _why_hopeless(httpx.ConnectError("All connection attempts failed"), is_healthy=False) == ""
    assert _why_hopeless(RequestRejectedError(404, "no such path"), is_healthy=False) == ""


def test_a_server_that_is_none_of_ours_is_given_up_at_once() -> None:
    """As vLLM without the plugin: healthy, and without our paths."""
    with fake_server() as server:
        server.refuses |= {"/is_paused": 404}
        with watched([server.url], spawned=False) as watch:
            watch.wait_state(GONE)
            with pytest.raises(RunError, match="grpo-async serve-vllm"):
                watch.fleet.wait_for_members(stop=threading.Event(), deadline_s=60.0, setting="s")


def test_an_external_server_that_fails_every_push_is_left_alone_for_longer_and_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answers every probe; without a delay it would be pushed to several times a second, for ever."""
    assert [server_module.return_delay_s(number) for number in (0, 1, 2, 3, 6, 7, 50)] == [
        0.0,
        0.0,
        2.0,
        4.0,
        32.0,
        60.0,
        60.0,
    ]
    monkeypatch.setattr(server_module, "return_delay_s", lambda num_lost: 0.0 if num_lost < 2 else 3600.0)
    with fake_server() as server, watched([server.url], spawned=False, interval_s=0.02) as watch:
        for _ in range(2):
            watch.wait_state(READY)
            watch.fleet.fence(watch.fleet.server(0), "the update was refused")
        since = len(server.asked("/rollout/info"))
        server.wait_for(lambda: len(server.asked("/rollout/info")) > since + 3, "it to be found well several times")
        assert watch.fleet.server(0).state is DOWN
    with fake_server() as server, watched([server.url], spawned=False, interval_s=0.02) as watch:
        for _ in range(3):  # one that has served in between is back at once
            watch.wait_state(READY)
            watch.serve_all()
            watch.fleet.fence(watch.fleet.server(0), "its connection broke")
        assert len(watch.fleet.failures) == 3  # each a new one, after it had served


def test_an_engine_that_is_said_to_be_dead_is_fenced_at_once() -> None:
    with fake_server() as server, watched([server.url]) as watch:
        watch.serve_all()
        server.refuses |= {"/is_paused": 500, "/health": 503}
        watch.wait_state(DOWN)
        assert "503" in watch.fleet.failures[0].reason


def test_errors_of_an_engine_that_is_said_to_be_well_count_when_they_last() -> None:
    with fake_server() as server, watched([server.url], timeout_s=3.0) as watch:
        watch.serve_all()
        server.refuses["/is_paused"] = 500
        asked = len(server.asked("/is_paused"))
        server.wait_for(lambda: len(server.asked("/is_paused")) > asked + 1, "two answers with an error")
        assert watch.fleet.serving()
        watch.wait_state(DOWN)
        assert "has answered with errors" in watch.fleet.failures[0].reason


def test_a_start_that_takes_too_long_is_asked_for_again() -> None:
    with fake_server(refuses={"/health": 503}) as server, watched([server.url], startup_timeout_s=0.3) as watch:
        watch.wait(lambda: bool(watch.restarts), "the restart to be asked for")
        assert "inference.startup_timeout_s = 0.3 s" in watch.restarts[0][1]
        watch.tell("exited", "killed as asked")
        watch.tell("starting")
        watch.wait(lambda: len(watch.restarts) == 2, "the second start to take too long")
        watch.tell("starting")
        server.refuses.clear()
        watch.wait_state(READY)
        assert len(watch.fleet.failures) == 1  # until it serves it is one


def test_a_restart_that_the_launcher_makes_by_itself_is_not_asked_for() -> None:
    with fake_server() as server, watched([server.url], interval_s=600.0) as watch:
        watch.serve_all()
        server.hangs.add("/is_paused")  # no heartbeat ends before the launcher has spoken
        watch.tell("exited", "exit code -9; the last lines of its log")
        server.stop()
        watch.wait_state(DOWN)
        assert "the last lines of its log" in watch.fleet.failures[0].reason
        watch.tell("starting")
        watch.wait_state(STARTING)
        server.instance_id = "second"
        server.hangs.clear()
        server.start()
        watch.wait_state(READY)
        assert watch.restarts == []


def test_when_all_are_given_up_the_wait_for_one_ends_with_the_launchers_words() -> None:
    with fake_server() as server, watched([server.url]) as watch:
        server.stop()
        watch.tell("given_up", "died 3 times in a row; CUDA out of memory")
        assert watch.fleet.server(0).state is GONE
        with pytest.raises(RunError, match="CUDA out of memory"):
            watch.fleet.wait_for_members(stop=threading.Event(), deadline_s=20.0, setting="x.y")


def test_the_wait_for_a_server_ends_with_one_with_a_stop_or_with_its_deadline() -> None:
    stop = threading.Event()
    with fake_server() as server, watched([server.url]) as watch:
        assert watch.fleet.wait_for_members(stop=stop, deadline_s=20.0, setting="x.y")
        server.stop()
        watch.wait_state(DOWN)
        with pytest.raises(DeadlineError, match=r"server 0.*is down.*`x\.y`") as raised:
            watch.fleet.wait_for_members(stop=stop, deadline_s=0.3, setting="x.y")
        assert server.url in str(raised.value)
        threading.Timer(0.3, stop.set).start()
        assert not watch.fleet.wait_for_members(stop=stop, deadline_s=20.0, setting="x.y")


@pytest.mark.clock
def test_counters_go_on_over_a_restart_and_a_dead_or_hung_server_does_not_hold_them_up() -> None:
    with fake_server() as server, fake_server() as other, watched([server.url, other.url], interval_s=600.0) as watch:
        watch.serve_all()
        server.generated_tokens, server.busy_s = 500, 10.0
        other.generated_tokens, other.busy_s = 600, 11.0
        counters = watch.fleet.read()
        assert (counters.generated_tokens, counters.busy_s) == (1100, 10.5)  # (10 + 11) / 2
        other.hangs.add("/rollout/info")
        watch.fleet.read()  # waits for it once
        began = time.monotonic()
        assert watch.fleet.read() == counters
        assert time.monotonic() - began < 1.0
        other.hangs.clear()
        server.stop()
        assert watch.fleet.read() == counters
        watch.fleet.suspect(0)
        watch.wait_state(DOWN)
        server.instance_id, server.generated_tokens, server.busy_s = "second", 90, 2.0
        server.start()
        watch.fleet.suspect(0)
        watch.wait_state(READY)
        counters = watch.fleet.read()
        assert (counters.generated_tokens, counters.busy_s) == (1190, 11.5)  # (10 + 2 + 11) / 2


@pytest.mark.clock
def test_closing_does_not_wait_for_an_engine_that_hangs() -> None:
    with fake_server() as server, watched([server.url], timeout_s=600.0) as watch:
        watch.serve_all()
        server.hangs.add("/is_paused")
        asked = len(server.asked("/is_paused"))
        server.wait_for(lambda: len(server.asked("/is_paused")) > asked, "a heartbeat that hangs")
        began = time.monotonic()
        watch.fleet.close()
        assert time.monotonic() - began < 3.0
        assert not [thread for thread in threading.enumerate() if thread.name == "server-monitor"]


def test_a_start_that_is_seen_to_work_has_six_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(fleet, "time", SimpleNamespace(monotonic=lambda: now[0]))
    asked: list[str] = []
    settings = FleetSettings(
        heartbeat_interval_s=1.0, heartbeat_timeout_s=1.0, startup_timeout_s=300.0, longest_startup_s=1800.0
    )
    servers = fleet.Fleet(
        ["http://127.0.0.1:9"],
        token=None,
        settings=settings,
        control_timeout_s=1.0,
        ask_restart=lambda _, why: asked.append(why),
    )

    def wait(seconds: float, *, works: bool) -> ServerState:
        now[0] += seconds
        if works:
            servers.on_launcher_message({"kind": "server", "index": 0, "event": "working"})
        servers.not_found(servers.server(0), "refused")
        return servers.server(0).state

    assert [wait(200.0, works=True) for _ in range(8)] == [ServerState.STARTING] * 8
    assert wait(199.0, works=True) is ServerState.STARTING
    assert wait(2.0, works=True) is ServerState.DOWN
    assert "although it works: it has had 1801 s" in asked[0]
    servers.on_launcher_message({"kind": "server", "index": 0, "event": "starting"})
    assert wait(299.0, works=False) is ServerState.STARTING
    assert wait(2.0, works=False) is ServerState.DOWN
    assert "works" not in asked[1]
