"""The embedded engine over HTTP: generation, scores, refusals, load, disconnects, and the death of the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.config.sections import InferenceSection
from grpo_async.inference.api import GENERATE_PATH, SCORE_PATH, ScoreAnswer
from grpo_async.inference.fleet import Fleet
from tests.servers.embedded_support import Live, live, load, make_request, prompt, teacher_forced, worst_error


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
    for request, output in zip(requests, server.pool.map(server.generate, requests), strict=True):
        assert worst_error(model, request, output) < 1e-5
        assert set(output.versions) == {0}
    after = server.info()
    assert after.generated_tokens - before.generated_tokens == sum(request.max_tokens for request in requests)
    assert (after.active_requests, after.running_requests, after.waiting_requests, after.kv_usage) == (0, 0, 0, 0.0)
    assert before.busy_s < after.busy_s
    assert server.info().busy_s == after.busy_s  # idle time does not count


def test_a_client_that_disconnects_frees_its_slot(model: Any) -> None:
    with live(model, num_slots=1) as server:
        chunks = server.stream(make_request(prompt(4), max_tokens=500, flush_interval_s=0.0))
        assert next(chunks).token_ids
        server.post("/pause")  # else it might be over before the connection is
        chunks.close()  # type: ignore[attr-defined]  # a generator: leaves `with client.stream`
        server.wait_until(lambda info: info.active_requests == info.running_requests == 0)
        server.post("/resume")
        assert server.generate(make_request(prompt(4), max_tokens=2)).finish_reason == "length"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": 512}, "max_model_len: 512"),
        ({"token_ids": [1, 5000]}, r"[5000] are outside the vocabulary"),
        ({"stop_token_ids": [-1]}, "outside the vocabulary"),
        ({"token_ids": []}, "token_ids"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 1e-9}, "too small"),
        ({"top_p": 1e-320}, "top_p"),
        ({"structured_outputs": {"choice": ["a"]}}, "set inference.engine: vllm"),
        ({"stop": ["END"]}, "the model's tokenizer cannot be loaded"),
        ({"color": "red"}, "color"),
        ({"max_tokens": None}, "max_tokens"),
    ],
)
def test_a_wrong_request_is_answered_with_400_and_its_cause(server: Live, change: dict[str, Any], words: str) -> None:
    response = server.post(GENERATE_PATH, make_request(prompt(4), max_tokens=4).model_dump() | change)
    assert (response.status_code, words in response.json()["error"]) == (400, True), response.text


def test_unusable_bodies_paths_and_methods_are_answered_with_an_error_object(server: Live) -> None:
    for status, response in [
        (400, server.post(SCORE_PATH, {"token_ids": prompt(513)})),
        (400, server.post(SCORE_PATH, {"token_ids": [1, 5000]})),
        (400, server.client.post(GENERATE_PATH, content=b"{")),
        (400, server.post("/finish_weight_update", {"weight_version": "new"})),
        (400, server.post("/init_weight_transfer_engine", {})),
        (404, server.post("/nothing")),
        (405, server.client.get(GENERATE_PATH)),
    ]:
        assert (response.status_code, "error" in response.json()) == (status, True)


def test_a_request_for_another_instance_is_refused_with_503(server: Live) -> None:
    mine = server.info().instance_id
    assert len(mine) == 16
    assert server.generate(make_request(prompt(4), max_tokens=2, instance_id=mine)).finish_reason == "length"
    response = server.post(GENERATE_PATH, make_request(prompt(4), instance_id="0" * 16).model_dump())
    assert response.status_code == 503
    assert "0" * 16 in response.json()["error"]
    assert "restarted" in response.json()["error"]


def test_scores_equal_a_plain_forward_also_while_others_generate_and_while_paused(server: Live, model: Any) -> None:
    requests = [make_request(prompt(5, start=i), seed=i, max_tokens=300) for i in range(6)]
    answers = server.ask(*requests)
    for length in (2, 90, 512):
        if length == 512:
            server.post("/pause")
        scored = ScoreAnswer.model_validate_json(server.post(SCORE_PATH, {"token_ids": prompt(length)}).content)
        expected = teacher_forced(model, prompt(length)[:1], prompt(length)[1:])
        assert scored.policy_version == 0
        assert torch.allclose(expected, torch.tensor(scored.logprobs), atol=1e-5)
    server.post("/resume")
    for request, answer in zip(requests, answers, strict=True):
        assert worst_error(model, request, answer.result(30.0)) < 1e-5


def test_a_busy_engine_reports_its_load_and_the_fleet_makes_metrics_of_it(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(model, num_slots=2) as server:
        step = server.engine.step
        monkeypatch.setattr(server.engine, "step", lambda: (time.sleep(0.005), step())[1])  # so that requests last
        inference = InferenceSection(heartbeat_interval_s=0.05, heartbeat_timeout_s=30.0, startup_timeout_s=30.0)
        fleet = Fleet([server.url], inference, token=None, control_timeout_s=10.0)
        heard = threading.Semaphore(0)
        fleet.subscribe_load(heard.release)
        assert "servers/running" not in fleet.metrics(), "nobody has said anything yet"
        fleet.start()
        try:
            assert fleet.wait_for_members(stop=threading.Event(), deadline_s=30.0, setting="x")
            answers = server.ask(*(make_request(prompt(50, start=number), max_tokens=400) for number in range(3)))
            server.wait_until(lambda info: (info.running_requests, info.waiting_requests) == (2, 1))
            while heard.acquire(blocking=False):
                pass
            for _ in range(2):  # the first may have been asked before
                assert heard.acquire(timeout=10.0)
            fleet.metrics()  # what was heard until now is over
            fleet.read()
            metrics, known = fleet.metrics(), fleet.load(0)
            assert (metrics["servers/running"], metrics["servers/waiting"]) == (2.0, 1.0)
            assert 0.09 < metrics["servers/kv_usage"] < 0.9  # 100 to 900 of 2 x 512 positions
            assert known is not None
            assert known.max_running_requests == 2
            for answer in answers:
                answer.result(60.0)
            fleet.fence(fleet.server(0), "for the test")
            assert fleet.load(0) is None, "what a server said before it was lost is no news of it"
            assert "servers/running" not in fleet.metrics()
        finally:
            fleet.close()


def test_a_stuck_engine_is_answered_with_503_within_the_engine_timeout_while_health_stays_200(model: Any) -> None:
    with live(model, engine_timeout_s=1.0) as server:
        stuck, go_on = threading.Event(), threading.Event()
        step = server.engine.step

        def hang() -> None:
            stuck.set()
            go_on.wait(60.0)
            step()

        server.engine.step = hang  # type: ignore[method-assign]
        request = make_request(prompt(4), max_tokens=3)
        [answer] = server.ask(request)
        assert stuck.wait(20.0)
        began = time.monotonic()
        for method, path in (("GET", "/is_paused"), ("POST", "/resume"), ("POST", "/pause")):
            response = server.client.request(method, path)
            assert (response.status_code, "heartbeat_timeout_s" in response.json()["error"]) == (503, True)
        assert 2.5 < time.monotonic() - began < 20.0
        assert server.client.get("/health").status_code == 200  # which is why /is_paused is the probe
        # whoever asks how it is does not wait for the step
        info = server.info()
        assert (info.active_requests, info.running_requests, info.waiting_requests) == (1, 0, 1)
        assert info.generated_tokens == 0
        assert info.busy_s > 2.5
        server.engine.step = step  # type: ignore[method-assign]
        go_on.set()
        assert worst_error(model, request, answer.result(20.0)) < 1e-5
        assert not server.is_paused()  # the pause that was refused never came


def test_an_engine_that_raises_ends_every_request_with_an_error_and_health_with_503(model: Any) -> None:
    with live(model, num_slots=2) as server:
        step, may_fail, num_steps = server.engine.step, threading.Event(), 0

        def fail_at_third_step() -> None:
            nonlocal num_steps
            may_fail.wait(30.0)
            num_steps += 1
            if num_steps == 3:
                raise RuntimeError("out of luck")
            step()

        server.engine.step = fail_at_third_step  # type: ignore[method-assign]
        requests = [make_request(prompt(4, start=i), max_tokens=50) for i in range(3)]  # one more than slots
        answers = server.ask(*requests)
        may_fail.set()
        outputs = [answer.result(30.0) for answer in answers]
        assert all("out of luck" in str(output.error) for output in outputs)
        assert max(len(output.token_ids) for output in outputs) == 2  # what was sampled is not lost
        assert server.failed.wait(10.0)
        for response in (
            server.client.get("/health"),
            server.client.get("/is_paused"),
            server.client.get("/rollout/info"),
            server.post(GENERATE_PATH, requests[0].model_dump()),
        ):
            assert (response.status_code, "out of luck" in response.json()["error"]) == (503, True)


def test_stopping_the_server_ends_open_answers_with_abort_and_refuses_what_is_held(model: Any) -> None:
    with live(model) as server:
        request = make_request(prompt(4), max_tokens=500)
        [running] = server.ask(request)
        server.post("/pause")  # it cannot end by itself
        held = server.pool.submit(server.post, GENERATE_PATH, request.model_dump())
        server.wait_until(lambda info: info.active_requests == 2)
        server.stop()
        assert running.result(20.0).finish_reason == "abort"
        assert (held.result(20.0).status_code, "shutting down" in held.result().json()["error"]) == (503, True)
