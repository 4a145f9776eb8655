"""Weight updates of the real vLLM: exact, in place, nothing served of half of one, each token stamped with the version that sampled
it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_async.inference.api import GenerateChunk
from tests.support.dying_trainer import MOMENTS, killed_trainer
from tests.support.weight_push import WeightPusher
from tests.vllm.reference import TOLERANCE, Reference, assert_exact, largest_difference
from tests.vllm.server import VllmServer, join

pytestmark = pytest.mark.vllm

NUM_STREAMS = 4
LONG_PROMPT = [20 + position % 200 for position in range(300)]  # more than two cache blocks of 128


def _assert_serves(server: VllmServer, model: Reference, version: int) -> None:
    """Long enough a prompt that stale prefix cache would show."""
    assert_exact(model, LONG_PROMPT, server.generate(LONG_PROMPT, max_tokens=24), version)


def test_pushes_serve_the_new_model_under_versions_that_may_jump_and_come_again(
    vllm_server: VllmServer, model_a: Reference, model_b: Reference, version: int, pusher: WeightPusher
) -> None:
    _assert_serves(vllm_server, model_a, version)
    pusher.push(model_b.parameters(), version + 40, bucket_bytes=100_000)
    _assert_serves(vllm_server, model_b, version + 40)
    assert vllm_server.info().policy_version == version + 40
    # a trainer that went back to a checkpoint counts its versions again; keep_cache leaves all old blocks where they are
    for model, again in ((model_a, version), (model_b, version + 40), (model_a, version + 40)):
        pusher.push(model.parameters(), again, keep_cache=True)
        _assert_serves(vllm_server, model, again)


def test_during_a_push_every_token_has_the_logprob_of_the_version_it_is_stamped_with(
    vllm_server: VllmServer, model_a: Reference, model_b: Reference, version: int, pusher: WeightPusher
) -> None:
    models = {version: model_a, version + 1: model_b, version + 2: model_a}
    prompts = [[5 + number, 6, 7, *range(20, 120 + 40 * number)] for number in range(NUM_STREAMS)]
    progress = [threading.Event() for _ in range(2 * NUM_STREAMS)]

    def watched(number: int) -> Iterator[GenerateChunk]:
        for chunk in vllm_server.chunks(prompts[number], max_tokens=400, flush_interval_s=0.01):
            progress[number].set()
            if chunk.policy_version == version + 1:
                progress[NUM_STREAMS + number].set()
            yield chunk

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [pool.submit(join, watched(number)) for number in range(NUM_STREAMS)]
        assert all(event.wait(30) for event in progress[:NUM_STREAMS])
        pusher.push(model_b.parameters(), version + 1)
        assert all(event.wait(30) for event in progress[NUM_STREAMS:])
        pusher.push(model_a.parameters(), version + 2)
        completions = [future.result() for future in running]

    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == 400
        assert set(completion.versions) == set(models), "the pushes did not fall into this request"
        assert completion.versions == sorted(completion.versions)
        expected = {
            stamp: model.logprobs(prompt, completion.token_ids, temperature=1.0) for stamp, model in models.items()
        }
        right = [expected[stamp][position] for position, stamp in enumerate(completion.versions)]
        assert largest_difference(completion.logprobs, right) < TOLERANCE
        # the check can fail: under the other model these tokens have clearly other logprobs
        assert largest_difference(completion.logprobs, expected[version + 1]) > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_trainer_that_is_killed_leaves_the_old_weights_exactly_or_none_and_the_next_one_goes_on(
    vllm_server: VllmServer, model_a: Reference, model_b: Reference, version: int, moment: str
) -> None:
    before = vllm_server.score(LONG_PROMPT)
    killed_trainer(vllm_server.url, vllm_server.token, model_a.folder, moment)
    with WeightPusher(vllm_server.url, vllm_server.token, timeout_s=10.0) as restarted, ThreadPoolExecutor(1) as pool:
        assert restarted.client.get("/is_paused").json() == {"is_paused": True}
        resumed = restarted.client.post("/resume")
        if moment in ("pause", "start"):
            assert resumed.status_code == 200
            after = vllm_server.score(LONG_PROMPT)
            assert after.policy_version == version
            assert after.logprobs == before.logprobs  # to the last bit
            _assert_serves(vllm_server, model_a, version)
            restarted.connect()
            restarted.push(model_b.parameters(), version + 1)
        else:
            assert (resumed.status_code, "part of a weight update" in resumed.json()["error"]) == (409, True)
            if moment == "broadcast":
                refused = restarted.client.post("/finish_weight_update", json={"weight_version": str(version)})
                assert refused.status_code == 409
            held = pool.submit(vllm_server.generate, LONG_PROMPT, max_tokens=24)
            restarted.connect()
            restarted.push(model_b.parameters(), version + 1)
            assert_exact(model_b, LONG_PROMPT, held.result(60), version + 1)
    _assert_serves(vllm_server, model_b, version + 1)
