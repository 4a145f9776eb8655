"""The control calls against a server that refuses, is busy, or is not there."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from pathlib import Path
from typing import Any

import pytest
import trustme

from grpo_async.errors import BadResponseError, RequestRejectedError, RunError, ServerUnavailableError
from grpo_async.inference.api import GenerateRequest
from grpo_async.inference.client import InferenceClient
from grpo_async.inference.connect import trusted_certificates
from grpo_async.inference.control import ServerControl
from grpo_async.inference.router import Servers
from grpo_async.utils.retry import RetryPolicy
from tests.inference.fleet_support import watched
from tests.support.local_server import local_server


def _control(url: str) -> ServerControl:
    control = ServerControl(url, token=None, timeout_s=10.0)
    control._retry = RetryPolicy(max_retries=2, base_s=0.001, rng=random.Random(0))
    return control


@pytest.mark.parametrize(
    ("status", "kind", "message", "num_requests"),
    [
        (404, RequestRejectedError, "404: told to refuse", 1),
        (503, ServerUnavailableError, "3 times.*503: told to refuse", 3),
    ],
)
def test_a_refusal_is_raised_at_once_and_a_busy_server_asked_again_a_bounded_number_of_times(
    status: int, kind: type[Exception], message: str, num_requests: int
) -> None:
    """R6.5: for the calls around a weight push as for generation, with the server's own message. An update is never asked for
    again: the broadcast that goes with it cannot be repeated."""
    refuses = {"/pause": status, "/update_weights": status}
    with local_server(refuses=refuses) as server, _control(server.url) as control:
        with pytest.raises(kind, match=message) as raised:
            control.pause()
        assert len(server.requests) == num_requests
        assert getattr(raised.value, "answered", True)
        with pytest.raises(kind):
            control.update_weights(timeout_s=5.0)
        assert len(server.asked("/update_weights")) == 1


def test_a_silent_server_is_waited_for_once_and_no_longer_than_the_call_allows() -> None:
    with local_server(hangs={"/resume"}) as server, _control(server.url) as control:
        started = time.monotonic()
        with pytest.raises(ServerUnavailableError, match=r"1 time within 0\.3 s") as raised:
            control.resume(timeout_s=0.3)
        assert 0.3 <= time.monotonic() - started < 5.0
        assert not raised.value.answered
        assert len(server.requests) == 1


def test_a_server_behind_tls_is_reached_by_those_who_trust_its_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody talks to a server whose certificate another authority has signed."""
    authority, other = trustme.CA(), trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    def trust(signer: trustme.CA) -> None:
        signer.cert_pem.write_to_path(tmp_path / "trusted.pem")
        trusted_certificates.cache_clear()

    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "trusted.pem"))
    with local_server(certificate=context) as server:
        trust(authority)
        with _control(server.url) as control:
            assert control.info().instance_id == "first"
        with watched([server.url]) as watch:
            watch.serve_all()
            assert asyncio.run(_generate(watch.fleet)) == [7, 8]
        trust(other)
        with _control(server.url) as control, pytest.raises(ServerUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            control.info(retries=0)
        message = r"given up: .*CERTIFICATE_VERIFY.*SSL_CERT_FILE"  # at once, not at the deadline
        with watched([server.url]) as watch, pytest.raises(RunError, match=message):
            watch.wait_until_up()
    trusted_certificates.cache_clear()


async def _generate(servers: Servers) -> list[int]:
    request = GenerateRequest(request_id="r", token_ids=[1], max_tokens=8, temperature=1.0)
    async with InferenceClient(servers, token=None, request_timeout_s=10.0, wait_timeout_s=10.0) as client:
        return list((await client.generate(request)).token_ids)


@pytest.mark.parametrize(
    ("path", "answer", "field"),
    [
        ("/rollout/info", {"policy_version": -1}, "policy_version"),
        ("/pause", {"is_paused": False}, "was told to pause"),
        ("/resume", {"is_paused": True}, "was told to resume"),
    ],
)
def test_a_lie_about_the_server_itself_is_refused(path: str, answer: dict[str, Any], field: str) -> None:
    with local_server(answers={path: answer}) as server, _control(server.url) as control:
        calls = {"/pause": control.pause, "/resume": control.resume, "/rollout/info": control.info}
        with pytest.raises(BadResponseError, match=field):
            calls[path]()
