"""The embedded engine over HTTP, beyond the contract: refusals, pauses and updates that go wrong, and the death of the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_async.inference.api import WeightInitInfo
from grpo_async.weights.buckets import cut_into_buckets, pack
from grpo_async.weights.receiver import parameter_specs
from tests.servers.contract import model_b, serves, weights_of
from tests.servers.embedded_support import (
    Live,
    live,
    load,
    make_request,
    prompt,
    worst_error,
)
from tests.support.tiny_model import build_tiny_model
from tests.support.weight_push import WeightPusher, announcement, push_state_dict

__all__ = ["model_b"]  # a fixture


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return load(tiny_model)


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Live]:
    with live(model) as served:
        yield served


@pytest.fixture
def own(tiny_model: Path) -> Iterator[Live]:
    """For tests that change its engine or its weights."""
    with live(load(tiny_model)) as served:
        yield served


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": 512}, "max_model_len: 512"),
        ({"token_ids": [1, 5000]}, "5000"),
        ({"stop_token_ids": [-1]}, "vocabulary"),
        ({"temperature": 1e-9}, "too small"),
        ({"top_p": 1e-320}, "top_p"),
        ({"structured_outputs": {"choice": ["a"]}}, "inference.engine: vllm"),
        ({"stop": ["END"]}, "tokenizer"),
        ({"color": "red"}, "color"),
    ],
)
def test_a_wrong_request_is_answered_with_400_and_its_cause(server: Live, change: dict[str, Any], words: str) -> None:
    response = server.post("/rollout/generate", make_request(prompt(4), max_tokens=4).model_dump() | change)
    assert (response.status_code, words in response.json()["error"]) == (400, True), response.text


def test_unusable_bodies_paths_and_methods_are_answered_with_an_error_object(server: Live) -> None:
    for status, response in [
        (400, server.post("/rollout/score", {"token_ids": prompt(513)})),
        (400, server.client.post("/rollout/generate", content=b"{")),
        (400, server.post("/finish_weight_update", {"weight_version": "new"})),
        (404, server.post("/nothing")),
        (405, server.client.get("/rollout/generate")),
    ]:
        assert (response.status_code, "error" in response.json()) == (status, True)


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


# ---- pauses ----


def test_a_wrong_pause_is_refused_and_pauses_nothing(server: Live) -> None:
    for query in ({"mode": "sleep"}, {"keep_cache": "maybe"}, {"level": "1"}):
        response = server.post("/pause", **query)
        assert (response.status_code, next(iter(query)) in response.json()["error"]) == (400, True)
    assert server.post("/sleep", level="1").status_code == 409, "this engine cannot"
    assert not server.is_paused()
    assert server.generate(make_request(prompt(4), max_tokens=2)).finish_reason == "length"


# ---- weights ----


def test_a_model_with_its_own_lm_head_is_updated_too(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path, tie_word_embeddings=False)
    with live(load(folder)) as server:
        other = load(build_tiny_model(tmp_path / "other", seed=1, tie_word_embeddings=False))
        weights = weights_of(other)
        assert "lm_head.weight" in weights
        push_state_dict(server.url, None, weights, 1)
        serves(server, other, version=1)


def test_a_group_that_cannot_be_is_refused_at_once(server: Live) -> None:
    began = time.monotonic()
    membership = WeightInitInfo(
        master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, timeout_s=60.0, key="weights/0a"
    ).model_dump()
    cases = [
        ({"rank_offset": 2}, 400, "rank_offset 2"),
        ({"transport": "nccl"}, 500, "nccl"),
        ({"key": "AAAA me@home"}, 400, "key"),
    ]
    for change, status, words in cases:
        response = server.client.post("/init_weight_transfer_engine", json=membership | change)
        assert (response.status_code, words in response.json()["error"]) == (status, True)
    assert time.monotonic() - began < 15.0


def test_a_server_that_sleeps_loads_no_update_that_was_announced_before(own: Live, model_b: Any) -> None:
    async def sleep() -> None: ...  # as in an engine that can

    own.server.sleep = sleep  # type: ignore[method-assign]
    with WeightPusher(own.url, None, timeout_s=3.0) as pusher:
        pusher.connect()
        pusher.post("/pause")
        pusher.start(weights_of(model_b))
        pusher.post("/sleep")
        refused = own.post("/update_weights")
        assert (refused.status_code, "/start_weight_update first" in refused.json()["error"]) == (409, True)


def test_a_server_with_a_part_of_an_update_answers_nothing_until_it_has_a_whole_one(own: Live, model_b: Any) -> None:
    """The trainer stays alive but sends nothing more: the server's own deadline ends the update, and another trainer repeats it."""
    weights = weights_of(model_b)
    with WeightPusher(own.url, None, timeout_s=3.0) as stuck, WeightPusher(own.url, None) as pusher:
        stuck.connect()
        group = stuck.group
        assert group is not None
        [frozen] = own.ask(make_request(prompt(10), seed=2, max_tokens=400))
        own.wait_until(lambda info: info.generated_tokens > 0)
        stuck.post("/pause")
        stuck.start(weights, bucket_bytes=20_000)
        unsent = own.pool.submit(own.post, "/update_weights")
        first = next(cut_into_buckets(parameter_specs(announcement(weights)), 20_000))
        into = group.buffer(sum(spec.num_bytes for spec in first))
        group.send(pack([weights[spec.name] for spec in first], into=into), timeout_s=10.0)()
        answer = unsent.result(30.0)
        assert (answer.status_code, "did not arrive (bucket 1)" in answer.json()["error"]) == (500, True)
        refused = own.post("/resume")
        assert (refused.status_code, "part of a weight update" in refused.json()["error"]) == (409, True)
        assert own.is_paused()
        [held] = own.ask(make_request(prompt(12), seed=3, max_tokens=10))
        scored = own.pool.submit(own.post, "/rollout/score", {"token_ids": prompt(9)})
        own.wait_until(lambda info: info.active_requests == 3)
        assert own.post("/start_weight_update", announcement(weights).model_dump()).status_code == 400
        assert own.post("/finish_weight_update", {"weight_version": "0"}).status_code == 409
        assert not held.done()
        assert not scored.done()
        pusher.connect()
        pusher.push(weights, 5)
        output = held.result(30.0)
        assert set(output.versions) == {5}
        going_on = frozen.result(30.0).versions
        num_old = going_on.count(0)
        assert 0 < num_old < 400
        assert going_on == [0] * num_old + [5] * (400 - num_old)
        assert scored.result(30.0).json()["policy_version"] == 5
    serves(own, model_b, version=5)
