"""Pause modes over HTTP, on the embedded engine: what is in flight, what arrives later, and weights that come in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.inference.api import GenerateRequest
from tests.servers.embedded_support import (
    Live,
    by_version,
    live,
    load,
    make_request,
    over_kept_cache,
    perturbed,
    prompt,
    with_weights,
    worst_error,
)
from tests.support.waiting import eventually
from tests.support.weight_push import WeightPusher

NUM_SLOTS = 4


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return load(tiny_model)


@pytest.fixture
def server(tiny_model: Path) -> Iterator[Live]:
    with live(load(tiny_model), num_slots=NUM_SLOTS) as served:
        yield served


def _requests(num_requests: int, *, max_tokens: int, first: int = 0) -> list[GenerateRequest]:
    numbers = range(first, first + num_requests)
    return [make_request(prompt(4 + i % 7, start=i), seed=i, max_tokens=max_tokens) for i in numbers]


def _wait_for_tokens(server: Live) -> None:
    """Until every slot has given some: 60 more than now are at least 15 steps, and slots are filled every fourth."""
    wanted = server.info().generated_tokens + 60
    server.wait_until(lambda info: info.generated_tokens >= wanted)


def _wait_for_closed_gate(server: Live) -> None:
    assert eventually(lambda: not server.server.requests.gate.is_open)


def test_a_pause_freezes_between_two_tokens_and_holds_what_arrives_until_the_resume(server: Live, model: Any) -> None:
    """R6.3: a pause stops generation and dispatch; what arrives meanwhile waits."""
    request = make_request(prompt(5), seed=1, max_tokens=400, flush_interval_s=0.0)
    [running] = server.ask(request)
    assert server.post("/pause", mode="keep").status_code == 200
    assert server.is_paused()
    frozen = server.info()
    [late_request] = _requests(1, max_tokens=3)
    [late] = server.ask(late_request)
    still = server.info()
    assert (still.generated_tokens, still.busy_s) == (frozen.generated_tokens, frozen.busy_s)
    assert not running.done()
    for _ in range(2):  # always allowed
        assert server.post("/resume").status_code == 200
    assert worst_error(model, request, running.result(30.0)) < 1e-5
    assert worst_error(model, late_request, late.result(30.0)) < 1e-5


def test_a_drain_lets_what_is_in_flight_end_and_holds_what_arrives(server: Live, model: Any) -> None:
    in_flight = _requests(NUM_SLOTS + 2, max_tokens=150)  # two wait for a slot
    answers = server.ask(*in_flight)
    server.post("/pause", mode="keep")  # by a trainer that is gone: what it froze runs to its end too
    drain = server.pool.submit(server.post, "/pause", mode="drain", timeout_s="60")
    _wait_for_closed_gate(server)
    late_requests = _requests(2, max_tokens=5, first=20)
    late = [server.pool.submit(server.generate, request) for request in late_requests]
    assert drain.result(60.0).status_code == 200
    for request, answer in zip(in_flight, answers, strict=True):
        output = answer.result(10.0)
        assert (output.finish_reason, len(output.token_ids)) == ("length", 150)
        assert worst_error(model, request, output) < 1e-5
    assert server.is_paused()
    server.wait_until(lambda info: info.active_requests == 2)
    assert server.info().generated_tokens == 6 * 150
    assert server.post("/resume").status_code == 200
    for request, answer in zip(late_requests, late, strict=True):
        assert worst_error(model, request, answer.result(20.0)) < 1e-5


def test_a_drain_that_takes_too_long_is_answered_504_and_does_not_pause(server: Live, model: Any) -> None:
    long_request, late_request = _requests(2, max_tokens=500)
    step, may_step = server.engine.step, threading.Semaphore(3)

    def slow_step() -> None:
        if may_step.acquire(timeout=0.05):
            step()

    server.engine.step = slow_step  # type: ignore[method-assign]
    [answer] = server.ask(long_request)
    began = time.monotonic()
    response = server.post("/pause", mode="drain", timeout_s="0.5")
    assert (response.status_code, "drain_timeout_s" in response.json()["error"]) == (504, True)
    assert 0.4 < time.monotonic() - began < 10.0
    assert not server.is_paused()
    [late] = server.ask(late_request)
    server.engine.step = step  # type: ignore[method-assign]
    assert worst_error(model, long_request, answer.result(60.0)) < 1e-5
    assert worst_error(model, late_request, late.result(60.0)) < 1e-5  # nobody called /resume


def test_a_drain_ends_with_409_when_a_resume_comes_and_503_when_the_engine_fails(server: Live) -> None:
    server.engine.step = lambda: time.sleep(0.01)  # type: ignore[method-assign]
    [answer] = server.ask(*_requests(1, max_tokens=500))
    drain = server.pool.submit(server.post, "/pause", mode="drain", timeout_s="2")
    _wait_for_closed_gate(server)
    assert server.post("/resume").status_code == 200
    assert (drain.result(10.0).status_code, "/resume" in drain.result().json()["error"]) == (409, True)
    drain = server.pool.submit(server.post, "/pause", mode="drain")
    _wait_for_closed_gate(server)

    def fail() -> None:
        raise RuntimeError("out of luck")

    server.engine.step = fail  # type: ignore[method-assign]
    assert (drain.result(10.0).status_code, "out of luck" in drain.result().json()["error"]) == (503, True)
    assert "out of luck" in str(answer.result(10.0).error)


def test_an_abort_ends_everything_in_flight_with_its_tokens_and_spares_what_arrives_later(
    server: Live, model: Any
) -> None:
    requests = _requests(NUM_SLOTS + 2, max_tokens=480)
    answers = server.ask(*requests)
    _wait_for_tokens(server)
    assert server.post("/pause", mode="abort").status_code == 200
    assert server.is_paused()
    outputs = [answer.result(10.0) for answer in answers]
    assert {output.finish_reason for output in outputs} == {"abort"}
    assert sum(len(output.token_ids) for output in outputs) == server.info().generated_tokens >= 60  # all tokens it has
    assert sorted(len(output.token_ids) > 0 for output in outputs) == [False] * 2 + [True] * 4
    for request, output in zip(requests, outputs, strict=True):
        assert worst_error(model, request, output) < 1e-5
    [late] = server.ask(*_requests(1, max_tokens=3, first=9))
    assert server.post("/pause", mode="abort").status_code == 200  # a second time: what is held is not in flight
    server.post("/resume")
    assert late.result(10.0).finish_reason == "length"
    # the partial tokens go on where they stopped, as if nothing had happened
    request, output = requests[0], outputs[0]
    rest = make_request(
        [*request.token_ids, *output.token_ids], seed=request.seed, max_tokens=480 - len(output.token_ids)
    )
    assert output.token_ids + server.generate(rest).token_ids == server.generate(request).token_ids


@pytest.mark.parametrize("keep_cache", [False, True])
def test_a_push_under_each_way_of_freezing_gives_exact_logprobs_and_stamps(
    server: Live, tiny_model: Path, model: Any, keep_cache: bool
) -> None:
    weights = perturbed(model, seed=4)
    models = {0: model, 7: with_weights(tiny_model, weights)}
    requests = [make_request(prompt(16), seed=i, max_tokens=400) for i in range(NUM_SLOTS + 1)]  # one group, one waits
    with WeightPusher(server.url, None) as pusher:
        pusher.connect()
        answers = server.ask(*requests[:NUM_SLOTS])
        answers += server.ask(requests[-1])
        _wait_for_tokens(server)
        pusher.push(weights, 7, keep_cache=keep_cache, bucket_bytes=50_000)
        requests.append(make_request(prompt(16), seed=30, max_tokens=20))  # the prompt of rows that are still running
        answers.append(server.pool.submit(server.generate, requests[-1]))
        outputs = [answer.result(60.0) for answer in answers]
    for request, output in zip(requests[:NUM_SLOTS], outputs[:NUM_SLOTS], strict=True):
        num_old = output.versions.count(0)
        assert output.versions == [0] * num_old + [7] * (400 - num_old)
        assert 0 < num_old < 400
        case = models, request.token_ids, output.token_ids, output.versions
        kept, recomputed = over_kept_cache(*case), by_version(*case)
        expected, other = (kept, recomputed) if keep_cache else (recomputed, kept)
        assert torch.allclose(expected, torch.tensor(output.logprobs), atol=2e-5)
        assert (expected - other).abs().max() > 0.01
    for request, output in zip(requests[NUM_SLOTS:], outputs[NUM_SLOTS:], strict=True):
        assert set(output.versions) == {7}
        assert worst_error(models[7], request, output) < 2e-5


def test_a_wrong_pause_is_refused_and_pauses_nothing(server: Live) -> None:
    for query in ({"mode": "sleep"}, {"keep_cache": "maybe"}, {"timeout_s": "0"}, {"timeout_s": "nan"}, {"level": "1"}):
        response = server.post("/pause", **query)
        assert (response.status_code, next(iter(query)) in response.json()["error"]) == (400, True)
    assert server.post("/sleep", level="1").status_code == 409, "this engine cannot"
    assert not server.is_paused()
    assert server.generate(make_request(prompt(4), max_tokens=2)).finish_reason == "length"
