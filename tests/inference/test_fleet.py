"""The fleet against servers that die, hang, come back or lie. Real ones: tests/inference/test_failover.py."""

from __future__ import annotations

import threading
import time

import pytest

from grpo_async.errors import DeadlineError, RunError
from grpo_async.inference.fleet import ServerState
from tests.inference.fleet_support import watched
from tests.support.local_server import LocalServer, local_server

STARTING, READY, SERVING = ServerState.STARTING, ServerState.READY, ServerState.SERVING
DOWN, GONE = ServerState.DOWN, ServerState.GONE


def _wait_for_more(server: LocalServer, path: str, number: int = 1) -> None:
    """Until the server was asked so many times more."""
    asked = len(server.asked(path))
    server.wait_for(lambda: len(server.asked(path)) >= asked + number, f"{number} requests to {path}")


def _wake_up(server: LocalServer) -> None:
    """Answer again; what was asked before is not waited for."""
    server.hangs.clear()
    server.break_connections()


def test_a_server_serves_only_after_it_has_been_pushed_the_weights() -> None:
    with local_server() as server, watched([server.url]) as watch:
        watch.wait_state(READY)
        fleet = watch.fleet
        assert (len(fleet.servers_up()), fleet.serving(), fleet.has_ready) == (1, [], True)
        assert fleet.servers_up()[0].control.num_workers == 2  # as its info says
        changes = fleet.num_changes
        fleet.mark_serving(fleet.servers_up(), version=3)
        assert (len(fleet.serving()), fleet.has_ready) == (1, False)
        assert fleet.num_changes == changes + 1
        assert watch.states == [[STARTING], [READY], [SERVING]]  # the listener heard of each


def test_a_killed_server_is_fenced_and_its_restart_asked_for_once() -> None:
    """A suspected one is asked before its next heartbeat."""
    with local_server() as server, local_server() as other, watched([server.url, other.url], interval_s=600.0) as watch:
        watch.serve_all()
        server.stop()
        watch.fleet.suspect(0)
        watch.wait_state(DOWN)
        assert [one.url for one in watch.fleet.serving()] == [other.url]
        watch.wait(lambda: bool(watch.restarts), "the restart to be asked for")
        ((index, reason),) = watch.restarts
        assert (index, "connection was lost" in reason) == (0, True)
        assert [failure.reason for failure in watch.fleet.failures] == [reason]
        assert watch.fleet.failures[0].recovery_s is None


def test_a_server_that_comes_with_a_node_or_moves_to_another_is_found_at_its_new_address() -> None:
    with local_server() as first, local_server() as joined, local_server() as moved, watched([first.url, ""]) as watch:
        watch.wait_state(READY)
        assert watch.fleet.server(1).state is DOWN
        watch.tell("starting", index=1, url=joined.url)
        watch.wait_state(READY, index=1)
        watch.serve_all()
        moved.instance_id = "second"
        watch.tell("starting", "its node was lost", url=moved.url)  # before the fleet has missed it
        watch.wait_state(READY)
        assert [server.url for server in watch.fleet.servers()] == [moved.url, joined.url]
        assert [server.url for server in watch.fleet.serving()] == [joined.url]
        assert (watch.restarts, len(watch.fleet.failures)) == ([], 1)


def test_a_hung_engine_is_fenced_after_the_timeout_and_comes_back_as_a_new_instance_only() -> None:
    """Although /health answers 200: its restart was requested, and until then it would generate with weights that are out of
    date."""
    with local_server() as server, watched([server.url], timeout_s=1.0) as watch:
        watch.serve_all()
        started = time.monotonic()
        server.hangs.add("/is_paused")
        watch.wait_state(DOWN)
        assert time.monotonic() - started >= 1.0
        assert "did not answer for 1 s (inference.heartbeat_timeout_s)" in watch.fleet.failures[0].reason
        _wake_up(server)
        _wait_for_more(server, "/rollout/info", 4)
        assert watch.fleet.server(0).state is DOWN
        watch.tell("starting")  # the old one may still answer for a moment
        _wait_for_more(server, "/rollout/info", 4)
        assert watch.fleet.server(0).state is STARTING
        server.instance_id = "second"
        watch.wait_state(READY)
        assert watch.fleet.metrics()["servers/restarts"] == 1.0
        assert len(watch.restarts) == 1


def test_a_server_of_others_comes_back_when_it_answers_again_and_needs_the_weights_again() -> None:
    with local_server() as server, watched([server.url], spawned=False, timeout_s=1.0) as watch:
        watch.serve_all()
        server.hangs.add("/is_paused")
        watch.wait_state(DOWN)
        _wake_up(server)
        watch.wait_state(READY)
        assert watch.fleet.serving() == []
        watch.serve_all(version=2)
        (failure,) = watch.fleet.failures
        assert failure.recovery_s is not None


def test_a_server_that_was_restarted_behind_our_back_is_fenced_before_it_is_ready() -> None:
    """And weights that an earlier instance got do not make the present one serve."""
    with local_server() as server, watched([server.url]) as watch:
        pushed_to = watch.serve_all()
        server.instance_id = "second"
        watch.wait_state(READY)
        (failure,) = watch.fleet.failures  # it was fenced in between
        assert failure.reason == "it was restarted"
        assert watch.restarts == []  # it has been restarted already
        assert watch.fleet.metrics()["servers/restarts"] == 1.0
        watch.fleet.mark_serving(pushed_to, version=1)
        assert watch.fleet.serving() == []
        watch.fleet.fence(pushed_to[0], "the push to the first instance failed")
        assert watch.fleet.server(0).state is READY


def test_while_weights_are_loaded_silence_is_no_death_and_a_refused_connection_is() -> None:
    with local_server() as server, watched([server.url], timeout_s=1.0) as watch:
        watch.serve_all()
        with watch.fleet.loading_weights():
            server.hangs.add("/is_paused")
            _wait_for_more(server, "/is_paused", 2)
            assert watch.fleet.serving()
            server.stop()
            watch.wait_state(DOWN)


@pytest.mark.parametrize(("status", "fix"), [(401, "GRPO_ASYNC_TOKEN"), (404, "grpo-async serve-vllm")])
def test_a_server_that_will_never_take_part_is_given_up_at_once(status: int, fix: str) -> None:
    """It does not take the token, or it is vLLM without the plugin: healthy, and without our paths."""
    with local_server(refuses={"/is_paused": status}) as server, watched([server.url], spawned=False) as watch:
        watch.wait_state(GONE)
        with pytest.raises(RunError, match=f"{status}.*{fix}"):
            watch.wait_until_up()


def test_an_engine_that_is_said_to_be_dead_is_fenced_at_once() -> None:
    with local_server() as server, watched([server.url]) as watch:
        watch.serve_all()
        server.refuses |= {"/is_paused": 500, "/health": 503}
        watch.wait_state(DOWN)
        assert "503" in watch.fleet.failures[0].reason


def test_a_start_that_takes_too_long_is_asked_for_again() -> None:
    with local_server(refuses={"/health": 404}) as server, watched([server.url], startup_timeout_s=0.3) as watch:
        watch.wait(lambda: bool(watch.restarts), "the restart to be asked for")
        assert "inference.startup_timeout_s = 0.3 s" in watch.restarts[0][1]
        watch.tell("exited", "killed as asked")
        watch.tell("starting")
        watch.wait(lambda: len(watch.restarts) == 2, "the second start to take too long")
        watch.tell("starting")
        server.refuses.clear()
        watch.wait_state(READY)
        assert len(watch.fleet.failures) == 1  # until it serves it is one


def test_the_wait_for_a_server_ends_with_one_with_a_stop_with_its_deadline_or_when_all_are_given_up() -> None:
    stop = threading.Event()
    with local_server() as server, watched([server.url]) as watch:
        assert watch.wait_until_up()
        server.stop()
        watch.wait_state(DOWN)
        with pytest.raises(DeadlineError, match=rf"server 0 \({server.url}\) is down.*`inference\.startup_timeout_s`"):
            watch.wait_until_up(deadline_s=0.3)
        assert not watch.wait_until_up(stop=stop, heartbeat=stop.set)
        watch.tell("given_up", "died 3 times in a row; CUDA out of memory")
        assert watch.fleet.server(0).state is GONE
        with pytest.raises(RunError, match="CUDA out of memory"):
            watch.wait_until_up()
