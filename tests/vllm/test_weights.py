"""Weight updates of the real vLLM: exact, staged, all or nothing, each token stamped with the version that sampled it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from grpo_async.inference.api import GenerateChunk
from tests.support.dying_trainer import killed_trainer
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


def test_an_update_is_received_while_the_server_generates_and_answers_heartbeats(
    vllm_server: VllmServer, model_a: Reference, model_b: Reference, version: int, pusher: WeightPusher
) -> None:
    half_sent, go_on = threading.Event(), threading.Event()

    def update() -> None:
        assert pusher.group is not None
        broadcast = pusher.group.broadcast

        def broadcast_slowly(buffer: object, *, timeout_s: float) -> None:
            broadcast(buffer, timeout_s=timeout_s)  # type: ignore[arg-type]
            half_sent.set()
            assert go_on.wait(30)

        pusher.group.broadcast = broadcast_slowly  # type: ignore[assignment]
        pusher.update(model_b.parameters(), bucket_bytes=100_000)

    pusher.post("/start_weight_update")
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(update)
        try:
            assert half_sent.wait(30)
            assert vllm_server.client.get("/is_paused", timeout=5.0).json() == {"is_paused": False}
            _assert_serves(vllm_server, model_a, version)
            assert not updating.done()
        finally:
            go_on.set()
        updating.result(30)
    _assert_serves(vllm_server, model_a, version)  # received is not applied
    pusher.post("/pause")
    pusher.post("/finish_weight_update", {"weight_version": str(version + 1)})
    pusher.post("/resume")
    _assert_serves(vllm_server, model_b, version + 1)


def test_an_update_that_does_not_fit_leaves_the_old_weights_serving(
    vllm_server: VllmServer, model_a: Reference, model_b: Reference, version: int, pusher: WeightPusher
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"  # near the end: what comes before would fit
    good = model_b.parameters()
    others = {other: tensor for other, tensor in good.items() if other != name}
    for parameters, words in [
        (others | {"model.layers.1.mlp.no_such.weight": good[name]}, "no_such"),
        (others | {name: good[name][:, :-1]}, "has the shape [64, 127], the server's [64, 128]"),
        (others | {name: good[name].T}, "has the shape [128, 64]"),
        (others, f"{name} is missing"),
    ]:
        with pytest.raises(httpx.HTTPStatusError) as failure:
            pusher.push(parameters, version + 1)
        assert failure.value.response.status_code == 400
        assert words in failure.value.response.json()["error"]
        assert "old weights stay" in failure.value.response.json()["error"]
        assert not vllm_server.client.get("/is_paused").json()["is_paused"]
        _assert_serves(vllm_server, model_a, version)
        refused = pusher.client.post("/finish_weight_update", json={"weight_version": str(version + 1)})
        assert refused.status_code == 409
    pusher.push(good, version + 2)  # the same trainer goes on
    _assert_serves(vllm_server, model_b, version + 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("pause", marks=pytest.mark.nightly),
        pytest.param("start", marks=pytest.mark.nightly),
        "broadcast",
        pytest.param("update", marks=pytest.mark.nightly),
    ],
)
def test_a_trainer_that_is_killed_before_finish_leaves_the_old_weights_serving_exactly(
    vllm_server: VllmServer, model_a: Reference, model_b: Reference, version: int, moment: str
) -> None:
    before = vllm_server.score(LONG_PROMPT)
    killed_trainer(vllm_server.url, vllm_server.token, model_a.folder, moment)
    # the next trainer finds the server paused, the update open, the group broken
    with WeightPusher(vllm_server.url, vllm_server.token, timeout_s=10.0) as restarted:
        assert vllm_server.client.get("/is_paused").json() == {"is_paused": True}
        restarted.post("/resume")
        after = vllm_server.score(LONG_PROMPT)
        assert after.policy_version == version
        assert after.logprobs == before.logprobs  # to the last bit
        _assert_serves(vllm_server, model_a, version)
        restarted.connect()
        restarted.post("/pause")
        restarted.post("/start_weight_update")
        refused = restarted.client.post("/finish_weight_update", json={"weight_version": str(version + 1)})
        assert refused.status_code == 409  # what the dead trainer staged is gone
        restarted.post("/resume")
        assert vllm_server.score(LONG_PROMPT).logprobs == before.logprobs
        restarted.push(model_b.parameters(), version + 1)
    _assert_serves(vllm_server, model_b, version + 1)


def test_the_next_start_does_not_wait_for_an_update_that_hangs(
    vllm_server: VllmServer, model_a: Reference, model_b: Reference, version: int
) -> None:
    with ThreadPoolExecutor(1) as pool, WeightPusher(vllm_server.url, vllm_server.token, timeout_s=60.0) as silent:
        silent.connect()
        silent.post("/start_weight_update")
        info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], "bucket_bytes": 1, "timeout_s": 60.0}
        hanging = vllm_server.begin_post(pool, "/update_weights", client=silent.client, json={"update_info": info})
        with WeightPusher(vllm_server.url, vllm_server.token, timeout_s=10.0) as newer:
            newer.connect()
            answer = hanging.result(10)
            assert answer.status_code == 409
            assert "another weight update began" in answer.json()["error"]
            newer.push(model_b.parameters(), version + 1)
    _assert_serves(vllm_server, model_b, version + 1)


def test_finishing_an_update_of_a_server_that_is_not_paused_is_refused(
    vllm_server: VllmServer, model_a: Reference, model_b: Reference, version: int, pusher: WeightPusher
) -> None:
    pusher.post("/start_weight_update")
    pusher.update(model_b.parameters())
    response = pusher.client.post("/finish_weight_update", json={"weight_version": str(version + 1)})
    assert response.status_code == 409
    assert "/pause" in response.json()["error"]
    _assert_serves(vllm_server, model_a, version)


def test_joining_a_group_that_nobody_hosts_ends_at_its_deadline_and_holds_nobody_up(
    vllm_server: VllmServer, model_a: Reference, version: int
) -> None:
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "key": "weights/0a"}
    body = {"init_info": info | {"timeout_s": 3.0}}
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(vllm_server.client.post, "/init_weight_transfer_engine", json=body)
        _assert_serves(vllm_server, model_a, version)  # while it waits
        response = joining.result(30)
    assert response.status_code == 500
    assert "worker 0" in response.json()["error"]
    store = {"master_port": 0, "store_file": "/tmp/grpo-async-weights-gone/store", "timeout_s": 60.0}
    response = vllm_server.client.post("/init_weight_transfer_engine", json={"init_info": info | store})
    assert (response.status_code, "cannot see the trainer's file" in response.json()["error"]) == (400, True)
    assert vllm_server.client.get("/health").status_code == 200
