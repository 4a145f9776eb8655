"""The embedded engine over HTTP, beyond the contract: refusals, an engine that hangs, and the death of one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.contract import model_b, serves, weights_of
from tests.servers.embedded_support import Live, live, load, make_request, prompt, worst_error
from tests.support.weight_push import WeightPusher

__all__ = ["model_b"]  # a fixture


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return load(tiny_model)


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Live]:
    with live(model) as served:
        yield served


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": 512}, "max_model_len: 512"),
        ({"token_ids": [1, 5000]}, "5000"),
        ({"structured_outputs": {"choice": ["a"]}}, "inference.engine: vllm"),
    ],
)
def test_a_wrong_request_is_answered_with_400_and_its_cause(server: Live, change: dict[str, Any], words: str) -> None:
    response = server.post("/rollout/generate", make_request(prompt(4), max_tokens=4).model_dump() | change)
    assert (response.status_code, words in response.json()["error"]) == (400, True), response.text


def test_a_request_for_another_instance_is_refused_with_503(server: Live) -> None:
    mine = server.info().instance_id
    assert len(mine) == 16
    assert server.generate(make_request(prompt(4), max_tokens=2, instance_id=mine)).finish_reason == "length"
    response = server.post("/rollout/generate", make_request(prompt(4), instance_id="0" * 16).model_dump())
    assert response.status_code == 503


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
        # a request for its state does not wait for the step
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
        for response in (server.client.get("/health"), server.post("/rollout/generate", requests[0].model_dump())):
            assert (response.status_code, "out of luck" in response.json()["error"]) == (503, True)


def test_an_update_that_does_not_arrive_ends_at_the_servers_own_deadline_and_the_next_trainer_repeats_it(
    tiny_model: Path, model_b: Any
) -> None:
    """The trainer is alive, but sends nothing."""
    with live(load(tiny_model)) as server, WeightPusher(server.url, None, timeout_s=3.0) as silent:
        silent.connect()
        silent.post("/pause")
        silent.start(weights_of(model_b))
        answer = server.post("/update_weights")
        assert (answer.status_code, "did not arrive (bucket 0)" in answer.json()["error"]) == (500, True)
        with WeightPusher(server.url, None) as restarted:
            restarted.connect()
            restarted.push(weights_of(model_b), 5)
        serves(server, model_b, version=5)
