"""The embedded engine over HTTP: generation, pause, refusals, disconnects, and the death of the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.inference.surface import GENERATE_PATH, PARAMETERS_PATH, SCORE_PATH, TOKEN_VARIABLE, ScoreAnswer
from tests.servers.embedded_support import (
    Live,
    live,
    load,
    make_request,
    prompt,
    teacher_forced,
    wait_until,
    worst_error,
)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return load(tiny_model)


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Live]:
    with live(model) as served:
        yield served


def test_many_requests_over_http_are_exact_and_counted(server: Live, model: Any) -> None:
    before = server.info()
    requests = [make_request(prompt(2 + i, start=i), seed=i, max_tokens=10 + i) for i in range(20)]
    with ThreadPoolExecutor(20) as pool:
        outputs = list(pool.map(server.generate, requests))
    for request, output in zip(requests, outputs, strict=True):
        assert worst_error(model, request, output) < 1e-5
        assert set(output.versions) == {0}
    after = server.info()
    assert after.generated_tokens - before.generated_tokens == sum(request.max_tokens for request in requests)
    assert after.active_requests == 0
    assert before.busy_s < after.busy_s
    assert server.info().busy_s == after.busy_s  # idle time does not count


def test_pause_freezes_between_two_tokens_and_resume_goes_on(server: Live, model: Any) -> None:
    """R6.3: a pause stops generation and dispatch; what arrives meanwhile waits."""
    request = make_request(prompt(5), seed=1, max_tokens=400, flush_interval_s=0.0)
    late = make_request(prompt(6), seed=2, max_tokens=3)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(server.generate, request)
        wait_until(lambda: server.info().active_requests == 1, "the request to start")
        assert server.client.post("/pause", params={"mode": "keep"}).status_code == 200
        assert server.client.get("/is_paused").json() == {"is_paused": True}
        frozen = server.info()
        waiting = pool.submit(server.generate, late)
        wait_until(lambda: server.info().active_requests == 2, "the second request to arrive")
        still = server.info()
        assert still.generated_tokens == frozen.generated_tokens
        assert still.busy_s == frozen.busy_s
        assert not running.done()
        assert server.client.post("/resume").status_code == 200
        assert server.client.post("/resume").status_code == 200  # always allowed
        assert worst_error(model, request, running.result(30.0)) < 1e-5
        assert worst_error(model, late, waiting.result(30.0)) < 1e-5


def test_a_client_that_disconnects_frees_its_slot(model: Any) -> None:
    with live(model, num_slots=1) as server:
        chunks = server.stream(make_request(prompt(4), max_tokens=500, flush_interval_s=0.0))
        assert next(chunks).token_ids
        server.client.post("/pause")  # else it might be over before the connection is
        chunks.close()  # type: ignore[attr-defined]  # a generator: leaves `with client.stream`
        wait_until(lambda: server.info().active_requests == 0, "the aborted request to go")
        server.client.post("/resume")
        assert server.generate(make_request(prompt(4), max_tokens=2)).finish_reason == "length"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": 512}, "max_model_len"),
        ({"token_ids": [1, 5000]}, "vocabulary"),
        ({"token_ids": []}, "token_ids"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 1e-9}, "too small"),
        ({"colour": "red"}, "colour"),
        ({"max_tokens": None}, "max_tokens"),
    ],
)
def test_a_wrong_request_is_answered_with_400_and_its_cause(server: Live, change: dict[str, Any], words: str) -> None:
    body = make_request(prompt(4), max_tokens=4).model_dump() | change
    response = server.client.post(GENERATE_PATH, json=body)
    assert response.status_code == 400
    assert words in response.json()["error"]


def test_unusable_bodies_paths_and_modes_are_answered_with_an_error_object(server: Live) -> None:
    post = server.client.post
    assert post(GENERATE_PATH, content=b"{").status_code == 400
    assert post("/finish_weight_update", json={"weight_version": "new"}).status_code == 400
    assert post("/init_weight_transfer_engine", json={}).status_code == 400
    assert (post("/nothing").status_code, "error" in post("/nothing").json()) == (404, True)
    assert server.client.get(GENERATE_PATH).status_code == 405


def test_a_request_for_another_instance_is_refused_with_503_and_words(server: Live, model: Any) -> None:
    info = server.info()
    assert len(info.instance_id) == 16
    mine = make_request(prompt(4), max_tokens=2, instance_id=info.instance_id)
    assert server.generate(mine).finish_reason == "length"
    body = make_request(prompt(4), max_tokens=2, instance_id="0" * 16).model_dump()
    response = server.client.post(GENERATE_PATH, json=body)
    assert response.status_code == 503
    assert "0" * 16 in response.json()["error"]
    assert "restarted" in response.json()["error"]
    with live(model) as again:
        assert again.info().instance_id != info.instance_id


def test_scores_equal_a_plain_forward_also_while_others_generate_and_while_paused(server: Live, model: Any) -> None:
    requests = [make_request(prompt(5, start=i), seed=i, max_tokens=300) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(server.generate, request) for request in requests]
        for length in (2, 90, 512):
            if length == 512:
                server.client.post("/pause")
            response = server.client.post(SCORE_PATH, json={"token_ids": prompt(length)})
            scored = ScoreAnswer.model_validate_json(response.content)
            expected = teacher_forced(model, prompt(length)[:1], prompt(length)[1:])
            assert scored.policy_version == 0
            assert torch.allclose(expected, torch.tensor(scored.logprobs), atol=1e-5)
        server.client.post("/resume")
        for request, answer in zip(requests, answers, strict=True):
            assert worst_error(model, request, answer.result(30.0)) < 1e-5


@pytest.mark.parametrize(
    ("token_ids", "words"),
    [(prompt(513), "max_model_len: 512"), ([1, 5000], "vocabulary"), ([1, -1], "vocabulary"), ([1], "token_ids")],
)
def test_a_wrong_score_is_answered_with_400_and_its_cause(server: Live, token_ids: list[int], words: str) -> None:
    response = server.client.post(SCORE_PATH, json={"token_ids": token_ids})
    assert (response.status_code, words in response.json()["error"]) == (400, True)


def test_a_stuck_engine_is_answered_with_503_within_the_engine_timeout_while_health_stays_200(model: Any) -> None:
    with live(model, engine_timeout_s=1.0) as server, ThreadPoolExecutor(1) as pool:
        stuck, go_on = threading.Event(), threading.Event()
        step = server.engine.step

        def hang() -> None:
            stuck.set()
            go_on.wait(60.0)
            step()

        server.engine.step = hang  # type: ignore[method-assign]
        request = make_request(prompt(4), max_tokens=3)
        answer = pool.submit(server.generate, request)
        assert stuck.wait(20.0)
        began = time.monotonic()
        for method, path in (("GET", "/is_paused"), ("POST", "/resume"), ("POST", "/pause")):
            response = server.client.request(method, path)
            assert (response.status_code, "heartbeat_timeout_s" in response.json()["error"]) == (503, True)
        assert 2.5 < time.monotonic() - began < 20.0
        assert server.client.get("/health").status_code == 200  # which is why /is_paused is the probe
        # whoever asks how it is does not wait for the step: it is said as it was before
        info = server.info()
        assert (info.active_requests, info.running_requests, info.waiting_requests) == (1, 0, 1)
        assert info.generated_tokens == 0
        assert info.busy_s > 2.5
        server.engine.step = step  # type: ignore[method-assign]
        go_on.set()
        assert worst_error(model, request, answer.result(20.0)) < 1e-5
        assert server.client.get("/is_paused").json() == {"is_paused": False}  # the pause that was refused never came


def test_every_route_asks_for_the_token_whatever_the_method(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    wrong_ones: list[list[tuple[str, str]]] = [
        [],
        [("authorization", "Bearer wrong")],
        [("authorization", "secret")],
        [("authorization", "Bearer secret"), ("authorization", "Bearer wrong")],
    ]
    right = {"authorization": "Bearer secret"}
    methods = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")
    with live(model) as server:
        routes = server.service.app._app.routes  # type: ignore[attr-defined]
        paths = [route.path for route in routes]
        assert len(paths) == 12
        assert {GENERATE_PATH, SCORE_PATH, PARAMETERS_PATH, "/health", "/pause", "/finish_weight_update"} <= set(paths)
        for path in [*paths, "/", "/nothing", "/docs", "/metrics", "/health/", "//health", "/rollout/"]:
            for method in methods:
                if (method, path) == ("GET", "/health"):
                    continue
                for headers in wrong_ones:
                    response = server.client.request(method, path, headers=headers)
                    assert response.status_code == 401, (method, path, headers)
                    assert method == "HEAD" or "bearer token" in response.json()["error"]
        assert server.client.get("/health").status_code == 200
        for route in routes:
            for method in route.methods:
                response = server.client.request(method, route.path, headers=right)
                assert response.status_code not in (401, 403, 404, 405), (method, route.path)
        assert server.client.get("/nothing", headers=right).status_code == 404


def test_an_engine_that_raises_ends_every_request_with_an_error_and_health_with_503(model: Any) -> None:
    with live(model, num_slots=2) as server, ThreadPoolExecutor(3) as pool:
        server.client.post("/pause")
        requests = [make_request(prompt(4, start=i), max_tokens=50) for i in range(3)]  # one more than slots
        answers = [pool.submit(server.generate, request) for request in requests]
        wait_until(lambda: server.info().active_requests == 3, "the requests to arrive")
        step, steps = server.engine.step, iter(range(100))

        def fail_at_third_step() -> None:
            if next(steps) == 2:
                raise RuntimeError("out of luck")
            step()

        server.engine.step = fail_at_third_step  # type: ignore[method-assign]
        server.client.post("/resume")
        outputs = [answer.result(30.0) for answer in answers]
        assert all("out of luck" in str(output.error) for output in outputs)
        assert sorted(len(output.token_ids) for output in outputs) == [0, 2, 2]  # what was sampled is not lost
        assert server.failed.wait(10.0)
        health = server.client.get("/health")
        assert (health.status_code, "out of luck" in health.json()["error"]) == (503, True)
        assert server.client.get("/is_paused").status_code == 503
        response = server.client.post(GENERATE_PATH, content=requests[0].model_dump_json())
        assert response.status_code == 503


def test_stopping_the_server_ends_open_answers_with_abort(model: Any) -> None:
    outputs = []
    with live(model) as server:
        request = make_request(prompt(4), max_tokens=500)
        with ThreadPoolExecutor(1) as pool:
            server.client.post("/pause")  # it cannot end by itself
            answer = pool.submit(server.generate, request)
            wait_until(lambda: server.info().active_requests == 1, "the request to arrive")
            server.stop()
            outputs.append(answer.result(20.0))
    assert outputs[0].finish_reason == "abort"
