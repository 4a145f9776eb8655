"""POST /rollout/generate on the real vLLM: tokens, logprobs, ends, refusals."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from grpo_async.inference.surface import GENERATE_PATH
from tests.vllm.reference import TOLERANCE, Reference, largest_difference
from tests.vllm.server import MAX_MODEL_LEN, VllmServer, request_body

pytestmark = pytest.mark.vllm

PROMPT = [5, 6, 7, 8, 9, 10]
NOT_JSON = b"{"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_generate_streams_tokens_with_the_logprobs_of_the_sampled_distribution(
    vllm_server: VllmServer, model_a: Reference, version: int, temperature: float
) -> None:
    completion = vllm_server.generate(PROMPT, max_tokens=64, temperature=temperature)
    assert completion.finish_reason == "length"
    assert completion.error is None
    assert len(completion.token_ids) == 64
    assert set(completion.versions) == {version}
    expected = model_a.logprobs(PROMPT, completion.token_ids, temperature=temperature)
    assert largest_difference(completion.logprobs, expected) < TOLERANCE


def test_temperature_zero_is_greedy_with_unscaled_logprobs(
    vllm_server: VllmServer, model_a: Reference, version: int
) -> None:
    completion = vllm_server.generate(PROMPT, max_tokens=32, temperature=0.0)
    assert completion.token_ids == model_a.greedy(PROMPT, completion.token_ids)
    expected = model_a.logprobs(PROMPT, completion.token_ids, temperature=1.0)
    assert largest_difference(completion.logprobs, expected) < TOLERANCE


def test_a_stop_token_is_the_last_token_of_the_output(vllm_server: VllmServer, version: int) -> None:
    free = vllm_server.generate(PROMPT, max_tokens=16, temperature=0.0)
    stop = free.token_ids[5]
    stopped = vllm_server.generate(PROMPT, max_tokens=16, temperature=0.0, stop_token_ids=[stop])
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert len(stopped.logprobs) == len(stopped.token_ids)


def test_tokens_arrive_while_the_request_is_still_running(vllm_server: VllmServer, version: int) -> None:
    lines = list(vllm_server.chunks(PROMPT, max_tokens=256, flush_interval_s=0.02))
    assert len(lines) > 2
    assert [line.finish_reason for line in lines] == [None] * (len(lines) - 1) + ["length"]
    assert len(list(vllm_server.chunks(PROMPT, max_tokens=64, flush_interval_s=60.0))) == 1


def test_a_prompt_in_the_prefix_cache_gives_the_same_logprobs(
    vllm_server: VllmServer, model_a: Reference, version: int
) -> None:
    prompt = [20 + position % 200 for position in range(400)]  # more than two cache blocks of 128
    for _ in range(3):
        completion = vllm_server.generate(prompt, max_tokens=8)
        expected = model_a.logprobs(prompt, completion.token_ids, temperature=1.0)
        assert largest_difference(completion.logprobs, expected) < TOLERANCE


def test_a_client_that_disconnects_aborts_its_request(vllm_server: VllmServer, version: int) -> None:
    before = vllm_server.info().generated_tokens
    stream = vllm_server.chunks(PROMPT, max_tokens=1000, flush_interval_s=0.0)
    next(stream)
    assert _running(vllm_server) == 1
    stream.close()
    _eventually(lambda: vllm_server.info().active_requests == 0 and _running(vllm_server) == 0)
    assert vllm_server.info().generated_tokens - before < 1000, "the engine went on to the end"


def test_info_counts_tokens_and_busy_time(vllm_server: VllmServer, version: int) -> None:
    before, began = vllm_server.info(), time.monotonic()
    vllm_server.generate(PROMPT, max_tokens=40)
    vllm_server.generate(PROMPT, max_tokens=2)
    _eventually(
        lambda: vllm_server.info().active_requests == 0
    )  # the answer arrives a moment before the stream is closed
    after, wall_s = vllm_server.info(), time.monotonic() - began
    assert after.generated_tokens - before.generated_tokens == 42
    assert 0.0 < after.busy_s - before.busy_s < wall_s
    assert vllm_server.info().busy_s == after.busy_s  # idle time does not count
    assert after.engine == "vllm"
    assert after.num_workers == 1
    assert after.max_model_len == MAX_MODEL_LEN
    assert not after.per_request_seed


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [5, 100_000]}, "[100000] are outside the vocabulary"),
        ({"token_ids": [-1]}, "[-1] are outside the vocabulary"),
        ({"stop_token_ids": [100_000]}, "outside the vocabulary"),
        ({"max_tokens": MAX_MODEL_LEN}, f"more than max_model_len {MAX_MODEL_LEN}"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ],
)
def test_a_bad_request_is_refused_before_the_stream_starts(
    vllm_server: VllmServer, fields: dict[str, Any], words: str
) -> None:
    response = vllm_server.client.post(GENERATE_PATH, json=request_body(**({"token_ids": PROMPT} | fields)))
    assert response.status_code == 400
    assert words in response.json()["error"]


def test_broken_json_and_wrong_methods_are_refused_with_a_message(vllm_server: VllmServer) -> None:
    response = vllm_server.client.post(GENERATE_PATH, content=NOT_JSON)
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]
    assert vllm_server.client.get(GENERATE_PATH).status_code == 405
    assert vllm_server.client.post("/update_weights", content=NOT_JSON).status_code == 400


def _running(server: VllmServer) -> int:
    """Requests inside vLLM's own scheduler, by its own metrics (refreshed with every engine step)."""
    lines = server.client.get("/metrics").text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{")))


def _eventually(condition: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
