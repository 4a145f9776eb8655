"""What becomes of requests in flight, by mode of a push: every token has the logprob of the weights that its stamp names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from grpo_async.inference.api import GenerateChunk
from tests.servers.embedded_support import Output, over_kept_cache
from tests.support.waiting import eventually
from tests.support.weight_push import WeightPusher
from tests.vllm.reference import TOLERANCE, Reference, assert_exact, largest_difference
from tests.vllm.server import MAX_NUM_SEQS, VllmServer, join

pytestmark = pytest.mark.vllm

PROMPT = [5, 6, 7, 8, 9, 10]
LONG_PROMPT = [20 + position % 200 for position in range(300)]  # more than two cache blocks of 128


@dataclass
class _Stream:
    """A request in a thread of its own; `began` is set with its first tokens."""

    prompt: list[int]
    began: threading.Event = field(default_factory=threading.Event)
    done: Future[Output] = field(default_factory=Future)


@contextmanager
def _streams(server: VllmServer) -> Iterator[Callable[..., _Stream]]:
    """A function that starts streams. Whatever happens, the server goes on in the end."""
    with ThreadPoolExecutor(2 * MAX_NUM_SEQS) as pool:

        def start(prompt: list[int], max_tokens: int) -> _Stream:
            stream = _Stream(prompt)

            def watched() -> Iterator[GenerateChunk]:
                for chunk in server.chunks(prompt, max_tokens=max_tokens, flush_interval_s=0.01):
                    stream.began.set()
                    yield chunk

            stream.done = pool.submit(lambda: join(watched()))
            return stream

        try:
            yield start
        finally:
            server.client.post("/resume")


def _exchange_weights(pusher: WeightPusher, model: Reference, version: int) -> None:
    """The phases between /pause and /resume."""
    pusher.start(model.parameters())
    pusher.update(model.parameters())
    pusher.post("/finish_weight_update", {"weight_version": str(version)})


def _wait_until_queued(server: VllmServer, number: int) -> None:
    """Until vLLM runs as many requests as it can and `number` more stand in its queue. A request that only the server's process
    has seen would be held by a pause, not part of it."""

    def is_so() -> bool:
        info = server.info()
        return (info.running_requests, info.waiting_requests) == (MAX_NUM_SEQS, number)

    assert eventually(is_so, 30.0), server.info()


def _wait_for_active(server: VllmServer, number: int) -> None:
    assert eventually(lambda: server.info().active_requests >= number, 30.0), server.info()


@pytest.mark.parametrize("mode", ["recompute", "keep_kv"])
def test_requests_in_flight_go_on_with_the_new_weights_and_queued_ones_start_with_them(
    vllm_server: VllmServer, model_a: Reference, model_b: Reference, version: int, pusher: WeightPusher, mode: str
) -> None:
    vllm_server.generate(LONG_PROMPT, max_tokens=1)  # its blocks are cached now, made by A
    with _streams(vllm_server) as start:
        running = [start([*PROMPT, 30 + number], 450) for number in range(MAX_NUM_SEQS)]
        assert all(stream.began.wait(30) for stream in running)
        queued = start(LONG_PROMPT, 24)  # vLLM runs no more at once, so it has no token when the weights change
        scored_prompt = [*PROMPT, *LONG_PROMPT]
        _wait_until_queued(vllm_server, 1)
        pusher.post("/pause", mode="keep", keep_cache="true" if mode == "keep_kv" else "false")
        assert not queued.began.is_set()
        held = start(LONG_PROMPT, 24)  # arrives during the pause
        _wait_for_active(vllm_server, MAX_NUM_SEQS + 2)
        _exchange_weights(pusher, model_b, version + 1)
        assert not held.done.done()
        pusher.post("/resume")
        # with keep_kv the queued one starts, as those that run go on, over the cache that there is
        for stream in (queued, held) if mode == "recompute" else (held,):
            assert_exact(model_b, LONG_PROMPT, stream.done.result(60), version + 1)
        assert_exact(model_b, LONG_PROMPT, vllm_server.generate(LONG_PROMPT, max_tokens=24), version + 1)
        score = vllm_server.score(scored_prompt)
        expected = model_b.logprobs(scored_prompt[:1], scored_prompt[1:], temperature=1.0)
        assert largest_difference(score.logprobs, expected) < TOLERANCE
        for stream in running:
            completion = stream.done.result(60)
            assert completion.finish_reason == "length"
            assert len(completion.token_ids) == 450
            assert completion.versions == sorted(completion.versions)
            assert set(completion.versions) == {version, version + 1}, "the push did not fall into this request"
            num_old = completion.versions.count(version)
            old = model_a.logprobs(stream.prompt, completion.token_ids, temperature=1.0)[:num_old]
            assert largest_difference(completion.logprobs[:num_old], old) < TOLERANCE
            recomputed = model_b.logprobs(stream.prompt, completion.token_ids, temperature=1.0)[num_old:]
            models = {version: model_a.module, version + 1: model_b.module}
            kept = over_kept_cache(models, stream.prompt, completion.token_ids, completion.versions)
            over_old = kept[num_old:].tolist()
            new = completion.logprobs[num_old:]
            right, wrong = (recomputed, over_old) if mode == "recompute" else (over_old, recomputed)
            assert largest_difference(new, right) < TOLERANCE
            assert largest_difference(new, wrong) > 100 * TOLERANCE


def test_abort_ends_requests_with_what_they_have_and_a_client_goes_on_exactly(
    vllm_server: VllmServer, model_a: Reference, model_b: Reference, version: int, pusher: WeightPusher
) -> None:
    with _streams(vllm_server) as start:
        prompts = [[*LONG_PROMPT, 30 + number] for number in range(MAX_NUM_SEQS + 1)]
        running = [start(prompt, 350) for prompt in prompts[:-1]]
        assert all(stream.began.wait(30) for stream in running)
        queued = start(prompts[-1], 350)
        _wait_until_queued(vllm_server, 1)
        pusher.post("/pause", mode="abort", keep_cache="true")
        partial = [stream.done.result(30) for stream in [*running, queued]]
        again = [
            start(prompt + part.token_ids, 350 - len(part.token_ids))
            for prompt, part in zip(prompts, partial, strict=True)
        ]  # as the client does, at once
        _exchange_weights(pusher, model_b, version + 1)
        pusher.post("/resume")
        assert partial[-1].token_ids == []  # it had not begun
        for prompt, part, rest in zip(prompts, partial, again, strict=True):
            assert part.finish_reason == "abort"
            assert len(part.token_ids) < 350
            if part.token_ids:
                assert_exact(model_a, prompt, part, version)
            assert_exact(model_b, prompt + part.token_ids, rest.done.result(60), version + 1)


def test_vllms_own_routes_wait_too_and_never_see_the_cache_of_older_weights(
    vllm_server: VllmServer, model_a: Reference, model_b: Reference, version: int, pusher: WeightPusher
) -> None:
    model = vllm_server.info().model
    body = {"model": model, "prompt": LONG_PROMPT, "max_tokens": 4, "temperature": 0.0, "logprobs": 0}
    body["return_token_ids"] = True

    def complete() -> tuple[list[int], list[float]]:
        (choice,) = vllm_server.client.post("/v1/completions", json=body).raise_for_status().json()["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    tokens, logprobs = complete()  # fills the cache
    expected = model_a.logprobs(LONG_PROMPT, tokens, temperature=1.0)
    assert largest_difference(logprobs, expected) < TOLERANCE
    with ThreadPoolExecutor(1) as pool:
        pusher.post("/pause", keep_cache="true")
        try:
            held = pool.submit(complete)
            _exchange_weights(pusher, model_b, version + 1)
            assert not held.done()
        finally:
            pusher.post("/resume")
        for tokens, logprobs in (held.result(30), complete()):
            expected = model_b.logprobs(LONG_PROMPT, tokens, temperature=1.0)
            assert largest_difference(logprobs, expected) < TOLERANCE
