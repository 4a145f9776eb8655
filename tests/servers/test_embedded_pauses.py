"""Pause modes of the embedded engine over HTTP: what is in flight, what arrives later, and weights that come in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from grpo_async.inference.surface import GenerateRequest
from tests.servers.embedded_support import (
    Live,
    Output,
    live,
    load,
    make_request,
    over_kept_cache,
    perturbed,
    prompt,
    teacher_forced,
    wait_until,
    with_weights,
    worst_error,
)
from tests.support.weight_push import WeightPusher

NUM_SLOTS = 4


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return load(tiny_model)


@pytest.fixture
def server(tiny_model: Path) -> Iterator[Live]:
    with live(load(tiny_model), num_slots=NUM_SLOTS) as served, ThreadPoolExecutor(16) as pool:
        served.pool = pool  # type: ignore[attr-defined]
        served.num_added = 0  # type: ignore[attr-defined]
        add = served.engine.add

        def count_and_add(sequence: Any) -> None:
            add(sequence)
            served.num_added += 1  # type: ignore[attr-defined]

        served.engine.add = count_and_add  # type: ignore[method-assign]
        yield served
        served.client.post("/resume")  # of a test that failed, else its requests never end


def _ask(server: Live, *requests: GenerateRequest) -> list[Future[Output]]:
    """Send requests, and return when the engine has them."""
    wanted = server.num_added + len(requests)  # type: ignore[attr-defined]
    answers = [server.pool.submit(server.generate, request) for request in requests]  # type: ignore[attr-defined]
    wait_until(lambda: server.num_added == wanted, "the requests to arrive")  # type: ignore[attr-defined]
    return answers


def _requests(num_requests: int, *, max_tokens: int, first: int = 0) -> list[GenerateRequest]:
    numbers = range(first, first + num_requests)
    return [make_request(prompt(4 + i % 7, start=i), seed=i, max_tokens=max_tokens) for i in numbers]


def _pause(server: Live, **query: str) -> httpx.Response:
    return server.client.post("/pause", params=query)


def _wait_for_tokens(server: Live) -> None:
    """Until every slot has given some: 60 more than now are at least 15 steps, and slots are filled every fourth."""
    wanted = server.info().generated_tokens + 60
    wait_until(lambda: server.info().generated_tokens >= wanted, "tokens")


def test_a_drain_lets_what_is_in_flight_end_and_holds_what_arrives(server: Live, model: Any) -> None:
    in_flight = _requests(NUM_SLOTS + 2, max_tokens=150)  # two wait for a slot
    answers = _ask(server, *in_flight)
    drain = server.pool.submit(_pause, server, mode="drain", timeout_s="60")  # type: ignore[attr-defined]
    wait_until(lambda: server.engine._held is not None, "the drain to begin")
    late_requests = _requests(2, max_tokens=5, first=20)
    late = _ask(server, *late_requests)
    assert drain.result(60.0).status_code == 200
    for request, answer in zip(in_flight, answers, strict=True):
        output = answer.result(10.0)
        assert (output.finish_reason, len(output.token_ids)) == ("length", 150)
        assert worst_error(model, request, output) < 1e-5
    assert server.client.get("/is_paused").json() == {"is_paused": True}
    wait_until(lambda: server.info().active_requests == 2, "the late requests to arrive")
    assert server.info().generated_tokens == 6 * 150
    assert server.client.post("/resume").status_code == 200
    for request, answer in zip(late_requests, late, strict=True):
        assert worst_error(model, request, answer.result(20.0)) < 1e-5


def test_a_drain_that_takes_too_long_is_answered_504_and_does_not_pause(server: Live, model: Any) -> None:
    long_request, late_request = _requests(2, max_tokens=500)
    [answer] = _ask(server, long_request)
    step = server.engine.step
    may_step = threading.Semaphore(3)

    def slow_step() -> None:
        if may_step.acquire(timeout=0.05):
            step()

    server.engine.step = slow_step  # type: ignore[method-assign]
    began = time.monotonic()
    response = _pause(server, mode="drain", timeout_s="0.5")
    assert (response.status_code, "drain_timeout_s" in response.json()["error"]) == (504, True)
    assert 0.4 < time.monotonic() - began < 10.0
    assert server.client.get("/is_paused").json() == {"is_paused": False}
    [late] = _ask(server, late_request)
    server.engine.step = step  # type: ignore[method-assign]
    assert worst_error(model, long_request, answer.result(60.0)) < 1e-5
    assert worst_error(model, late_request, late.result(60.0)) < 1e-5  # nobody called /resume


def test_a_drain_ends_with_409_when_a_resume_comes_and_503_when_the_engine_fails(server: Live) -> None:
    [answer] = _ask(server, *_requests(1, max_tokens=500))
    step = server.engine.step
    frozen = threading.Event()

    def no_step() -> None:
        frozen.set()
        time.sleep(0.01)

    server.engine.step = no_step  # type: ignore[method-assign]
    assert frozen.wait(10.0)
    drains = []
    for _ in range(2):
        frozen.clear()
        drains.append(server.pool.submit(_pause, server, mode="drain"))  # type: ignore[attr-defined]
        wait_until(lambda: server.engine._held is not None, "the drain to begin")
        if len(drains) == 1:
            assert server.client.post("/resume").status_code == 200
            first = drains[0].result(10.0)
            assert (first.status_code, "/resume" in first.json()["error"]) == (409, True)

    def fail() -> None:
        raise RuntimeError("out of luck")

    server.engine.step = fail  # type: ignore[method-assign]
    second = drains[1].result(10.0)
    assert (second.status_code, "out of luck" in second.json()["error"]) == (503, True)
    assert "out of luck" in str(answer.result(10.0).error)
    server.engine.step = step  # type: ignore[method-assign]


def test_an_abort_ends_everything_in_flight_with_its_tokens_and_spares_what_arrives_later(
    server: Live, model: Any
) -> None:
    requests = _requests(NUM_SLOTS + 2, max_tokens=480)
    answers = _ask(server, *requests)
    _wait_for_tokens(server)
    assert _pause(server, mode="abort").status_code == 200
    assert server.client.get("/is_paused").json() == {"is_paused": True}
    outputs = [answer.result(10.0) for answer in answers]
    generated = server.info().generated_tokens
    assert {output.finish_reason for output in outputs} == {"abort"}
    assert sum(len(output.token_ids) for output in outputs) == generated >= 60  # all tokens it has
    assert sorted(len(output.token_ids) > 0 for output in outputs) == [False] * 2 + [True] * 4
    for request, output in zip(requests, outputs, strict=True):
        assert not output.token_ids or worst_error(model, request, output) < 1e-5
    [late] = _ask(server, *_requests(1, max_tokens=3, first=9))
    assert _pause(server, mode="abort").status_code == 200  # a second time: what is held is not in flight
    server.client.post("/resume")
    assert late.result(10.0).finish_reason == "length"
    # the partial tokens go on where they stopped, as if nothing had happened
    request, output = requests[0], outputs[0]
    rest = make_request(
        [*request.token_ids, *output.token_ids], seed=request.seed, max_tokens=480 - len(output.token_ids)
    )
    [whole] = [server.generate(request)]
    assert output.token_ids + server.generate(rest).token_ids == whole.token_ids


@pytest.mark.parametrize("keep_cache", [False, True])
def test_a_push_under_each_way_of_freezing_gives_exact_logprobs_and_stamps(
    server: Live, tiny_model: Path, model: Any, keep_cache: bool
) -> None:
    weights = perturbed(model, seed=4)
    models = {0: model, 7: with_weights(tiny_model, weights)}
    requests = [make_request(prompt(16), seed=i, max_tokens=400) for i in range(NUM_SLOTS + 1)]  # one group, one waits
    with WeightPusher(server.url, None) as pusher:
        pusher.connect()
        answers = _ask(server, *requests[:NUM_SLOTS])
        answers += _ask(server, requests[-1])
        _wait_for_tokens(server)
        pusher.push(weights, 7, keep_cache=keep_cache, bucket_bytes=50_000)
        late_request = make_request(prompt(16), seed=30, max_tokens=20)  # the prompt of rows that are still running
        late = server.pool.submit(server.generate, late_request)  # type: ignore[attr-defined]
        outputs = [answer.result(60.0) for answer in answers]
    for request, output in zip(requests[:NUM_SLOTS], outputs[:NUM_SLOTS], strict=True):
        num_old = output.versions.count(0)
        assert output.versions == [0] * num_old + [7] * (400 - num_old)
        assert 0 < num_old < 400
        kept = over_kept_cache(models, request.token_ids, output.token_ids, output.versions)
        recomputed = torch.where(
            torch.tensor(output.versions) == 7,
            teacher_forced(models[7], request.token_ids, output.token_ids),
            teacher_forced(models[0], request.token_ids, output.token_ids),
        )
        expected, other = (kept, recomputed) if keep_cache else (recomputed, kept)
        assert torch.allclose(expected, torch.tensor(output.logprobs), atol=2e-5)
        assert (expected - other).abs().max() > 0.01
    for request, output in ((requests[-1], outputs[-1]), (late_request, late.result(60.0))):
        assert set(output.versions) == {7}
        assert worst_error(models[7], request, output) < 2e-5


def test_a_drained_and_an_aborted_push_leave_no_token_of_new_weights_under_the_old_version(
    server: Live, tiny_model: Path, model: Any
) -> None:
    with WeightPusher(server.url, None) as pusher:
        pusher.connect()
        models = {0: model}
        for version, mode in ((1, "drain"), (2, "abort")):
            weights = perturbed(model, seed=version)
            models[version] = with_weights(tiny_model, weights)
            requests = [make_request(prompt(16), seed=i, max_tokens=150) for i in range(NUM_SLOTS + 2)]
            answers = _ask(server, *requests)
            _wait_for_tokens(server)
            pusher.push(weights, version, mode=mode)  # type: ignore[arg-type]
            for request, answer in zip(requests, answers, strict=True):
                output = answer.result(20.0)
                assert set(output.versions) <= {version - 1}
                assert not output.token_ids or worst_error(models[version - 1], request, output) < 1e-5
            request = make_request(prompt(16), seed=40, max_tokens=20)
            output = server.generate(request)
            assert set(output.versions) == {version}
            assert worst_error(models[version], request, output) < 1e-5


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"mode": "sleep"}, "mode"),
        ({"keep_cache": "maybe"}, "keep_cache"),
        ({"timeout_s": "0"}, "timeout_s"),
        ({"timeout_s": "nan"}, "timeout_s"),
        ({"level": "1"}, "level"),
    ],
)
def test_a_wrong_pause_is_refused_and_pauses_nothing(server: Live, query: dict[str, str], words: str) -> None:
    response = _pause(server, **query)
    assert (response.status_code, words in response.json()["error"]) == (400, True)
    assert server.client.get("/is_paused").json() == {"is_paused": False}
    assert server.generate(make_request(prompt(4), max_tokens=2)).finish_reason == "length"
