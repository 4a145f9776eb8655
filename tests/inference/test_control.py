"""The control calls against a server that refuses, is busy, or is not there."""

from __future__ import annotations

import asyncio
import random
import ssl
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trustme

from grpo_async.errors import BadResponseError, ConfigError, RequestRejectedError, RunError, ServerUnavailableError
from grpo_async.inference.client import Generation, InferenceClient
from grpo_async.inference.control import ServerControl
from grpo_async.inference.router import ServingServers
from grpo_async.inference.surface import GenerateRequest, WeightUpdateInfo
from grpo_async.utils.retry import RetryPolicy
from tests.inference.fake_server import fake_server
from tests.inference.fleet_support import watched
from tests.support.local_server import Refusal, Request, local_server


def _control(url: str) -> ServerControl:
    retry = RetryPolicy(max_retries=2, base_s=0.001, rng=random.Random(0))
    return ServerControl(url, token=None, timeout_s=10.0, retry=retry)


@pytest.mark.parametrize(
    ("status", "kind", "words", "num_requests"),
    [
        (404, RequestRejectedError, "404: what is missing", 1),
        (503, ServerUnavailableError, "3 times.*503: what is missing", 3),
        (504, ServerUnavailableError, "1 times.*504: what is missing", 1),
    ],
)
def test_a_refusal_is_raised_at_once_and_a_busy_server_asked_again_a_bounded_number_of_times(
    status: int, kind: type[Exception], words: str, num_requests: int
) -> None:
    """R6.5: for the calls around a weight push as for generation, with the server's own words."""

    async def refuse(request: Request) -> AsyncIterator[bytes]:
        raise Refusal(status, "what is missing")
        yield b""

    with local_server(refuse) as server, _control(server.url) as control:
        with pytest.raises(kind, match=words) as raised:
            control.pause()
        assert len(server.requests) == num_requests
        assert getattr(raised.value, "answered", True)


def test_an_update_is_never_asked_for_again() -> None:
    """R6.5: the broadcast that goes with it cannot be repeated."""

    async def busy(request: Request) -> AsyncIterator[bytes]:
        raise Refusal(503, "busy")
        yield b""

    fields = WeightUpdateInfo(names=[], dtype_names=[], shapes=[], bucket_bytes=1, timeout_s=1.0)
    with local_server(busy) as server, _control(server.url) as control:
        with pytest.raises(ServerUnavailableError):
            control.update_weights(fields, timeout_s=5.0)
        assert len(server.requests) == 1


def test_a_pause_says_its_mode_and_a_drain_has_longer_to_answer_than_to_drain() -> None:
    with fake_server() as server, _control(server.url) as control:
        control.pause(mode="keep", keep_cache=True, timeout_s=5.0)
        control.pause(mode="drain", timeout_s=5.0)
        assert [target for _, target, _ in server.seen] == [
            "/pause?mode=keep&keep_cache=true",
            "/pause?mode=drain&keep_cache=false&timeout_s=5",
        ]


def test_a_silent_server_is_waited_for_once_and_no_longer_than_the_call_allows() -> None:
    with fake_server(hangs={"/resume"}) as server, _control(server.url) as control:
        began = time.monotonic()
        with pytest.raises(ServerUnavailableError, match=r"1 times within 0\.3 s") as raised:
            control.resume(timeout_s=0.3)
        assert 0.3 <= time.monotonic() - began < 5.0
        assert not raised.value.answered
        assert len(server.asked("/resume")) == 1


def test_several_threads_may_talk_to_a_server_at_once() -> None:
    """The trainer waits in /update_weights while it sends; what else it asks meanwhile is answered."""
    fields = WeightUpdateInfo(names=[], dtype_names=[], shapes=[], bucket_bytes=1, timeout_s=1.0)
    with fake_server(hangs={"/update_weights"}) as server, _control(server.url) as control:
        with ThreadPoolExecutor() as threads:
            update = threads.submit(control.update_weights, fields, timeout_s=20.0)
            server.wait_for(lambda: bool(server.asked("/update_weights")), "the update")
            infos = list(threads.map(lambda _: control.info(), range(20)))
            assert not update.done()
            server.break_connections()
            with pytest.raises(ServerUnavailableError):
                update.result(20.0)
        assert {info.instance_id for info in infos} == {"first"}
        assert control.num_workers == 2


def test_an_answer_that_cannot_be_used_is_an_error_of_its_own() -> None:
    with fake_server(answers={"/rollout/score": {"logprobs": "none"}}) as server, _control(server.url) as control:
        with pytest.raises(BadResponseError, match="ScoreAnswer"):
            control.score([1, 2])
        with pytest.raises(BadResponseError, match="ServedParameters"):
            control.parameters()


def test_a_server_with_a_certificate_is_reached_by_those_who_trust_its_authority(tmp_path: Path) -> None:
    """Control calls, the fleet and the client; and nobody talks to a server whose certificate another authority has signed."""
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    other.cert_pem.write_to_path(tmp_path / "other.pem")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with fake_server(certificate=context) as server:
        trusted, wrong = tmp_path / "authority.pem", tmp_path / "other.pem"
        with ServerControl(server.url, token=None, timeout_s=10.0, authority=trusted) as control:
            assert control.info().instance_id == "first"
        retry = RetryPolicy(max_retries=0)
        control = ServerControl(server.url, token=None, timeout_s=10.0, authority=wrong, retry=retry)
        with control, pytest.raises(ServerUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            control.info()
        with watched([server.url], authority=trusted) as watch:
            watch.serve_all()
            generation = asyncio.run(_generate(watch.fleet, trusted))
            assert generation.token_ids == [7, 8]
        # it is given up at once: the wait ends long before its deadline
        words = r"given up: .*CERTIFICATE_VERIFY.*inference\.tls\.authority"  # at once, not at the deadline
        with watched([server.url], authority=wrong) as watch, pytest.raises(RunError, match=words):
            watch.fleet.wait_for_members(stop=threading.Event(), deadline_s=60.0, setting="x.y")
    with pytest.raises(ConfigError, match="not a PEM file"):
        ServerControl("https://localhost", token=None, timeout_s=1.0, authority=tmp_path)


async def _generate(servers: ServingServers, authority: Path) -> Generation:
    request = GenerateRequest(request_id="r", token_ids=[1], max_tokens=8, temperature=1.0)
    async with InferenceClient(
        servers, token=None, request_timeout_s=10.0, wait_timeout_s=10.0, authority=authority
    ) as client:
        return await client.generate(request)
