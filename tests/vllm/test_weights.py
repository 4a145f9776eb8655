"""Weight updates of the real vLLM: exact, all or nothing, each token stamped with the version that sampled it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from grpo_async.inference.surface import GenerateChunk
from tests.support.weight_push import WeightPusher, push_state_dict
from tests.vllm.reference import TOLERANCE, Reference, largest_difference
from tests.vllm.server import VllmServer, join

pytestmark = pytest.mark.vllm

PROMPT = [5, 6, 7, 8, 9, 10]
NUM_STREAMS = 4


@pytest.fixture
def version(vllm_server: VllmServer, model_a: Reference) -> int:
    """Model A is served, under the version that is returned."""
    version = vllm_server.info().policy_version + 1
    push_state_dict(vllm_server.url, vllm_server.token, model_a.parameters(), version)
    return version


@pytest.fixture
def pusher(vllm_server: VllmServer) -> Iterator[WeightPusher]:
    with WeightPusher(vllm_server.url, vllm_server.token, timeout_s=10.0) as pusher:
        pusher.connect()
        yield pusher


def _assert_serves(server: VllmServer, model: Reference, version: int) -> None:
    """Long enough a prompt that stale prefix cache would show (block size 128)."""
    prompt = [20 + position % 200 for position in range(300)]
    completion = server.generate(prompt, max_tokens=24)
    assert set(completion.versions) == {version}
    expected = model.logprobs(prompt, completion.token_ids, temperature=1.0)
    assert largest_difference(completion.logprobs, expected) < TOLERANCE


@pytest.mark.parametrize("bucket_bytes", [8 << 20, 100_000, 1])
def test_a_push_serves_the_new_model_under_the_new_version(
    vllm_server: VllmServer,
    model_a: Reference,
    model_b: Reference,
    version: int,
    pusher: WeightPusher,
    bucket_bytes: int,
) -> None:
    _assert_serves(vllm_server, model_a, version)
    pusher.push(model_b.parameters(), version + 1, bucket_bytes=bucket_bytes)
    _assert_serves(vllm_server, model_b, version + 1)
    assert vllm_server.info().policy_version == version + 1


def test_the_versions_of_a_push_may_jump(vllm_server: VllmServer, model_b: Reference, pusher: WeightPusher) -> None:
    version = vllm_server.info().policy_version + 40
    pusher.push(model_b.parameters(), version)
    _assert_serves(vllm_server, model_b, version)


def test_during_a_push_every_token_has_the_logprob_of_the_version_it_is_stamped_with(
    vllm_server: VllmServer, model_a: Reference, model_b: Reference, version: int, pusher: WeightPusher
) -> None:
    models = {version: model_a, version + 1: model_b, version + 2: model_a}
    prompts = [[5 + number, 6, 7, *range(20, 120 + 40 * number)] for number in range(NUM_STREAMS)]
    progress = [threading.Event() for _ in range(2 * NUM_STREAMS)]

    def watched(number: int) -> Iterator[GenerateChunk]:
        for chunk in vllm_server.chunks(prompts[number], max_tokens=700, flush_interval_s=0.01):
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
        assert len(completion.token_ids) == 700
        assert set(completion.versions) == set(models), "the pushes did not fall into this request"
        assert completion.versions == sorted(completion.versions)
        expected = {
            stamp: model.logprobs(prompt, completion.token_ids, temperature=1.0) for stamp, model in models.items()
        }
        right = [expected[stamp][position] for position, stamp in enumerate(completion.versions)]
        assert largest_difference(completion.logprobs, right) < TOLERANCE
        # the check can fail: under the other model these tokens have clearly other logprobs
        assert largest_difference(completion.logprobs, expected[version + 1]) > 100 * TOLERANCE


@pytest.mark.parametrize("fault", ["bad name", "bad shape", "missing parameter", "transposed parameter"])
def test_an_update_that_does_not_fit_leaves_the_old_weights_serving(
    vllm_server: VllmServer, model_a: Reference, model_b: Reference, version: int, pusher: WeightPusher, fault: str
) -> None:
    parameters = model_b.parameters()
    name = "model.layers.1.mlp.down_proj.weight"  # near the end: what comes before would fit
    words = "old weights stay"
    if fault == "bad name":
        parameters["model.layers.1.mlp.no_such.weight"] = parameters.pop(name)
        words = "no_such"
    elif fault == "bad shape":
        parameters[name] = parameters[name][:, :-1]
        words = "has shape [64, 127], the model [64, 128]"
    elif fault == "missing parameter":
        del parameters[name]
        words = f"{name} is missing"
    else:
        parameters[name] = parameters[name].T
    with pytest.raises(httpx.HTTPStatusError) as failure:
        pusher.push(parameters, version + 1)
    assert words in failure.value.response.json()["error"]
    assert not vllm_server.client.get("/is_paused").json()["is_paused"]
    _assert_serves(vllm_server, model_a, version)

    pusher.push(model_b.parameters(), version + 2)  # the same trainer goes on
    _assert_serves(vllm_server, model_b, version + 2)


def test_an_unknown_dtype_or_missing_shape_is_refused_at_once(vllm_server: VllmServer, version: int) -> None:
    good = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], "bucket_bytes": 1, "timeout_s": 1.0}
    faults: list[dict[str, list[str]]] = [{"dtype_names": ["float64"]}, {"shapes": []}]
    for bad in faults:
        response = vllm_server.client.post("/update_weights", json={"update_info": good | bad})
        assert response.status_code == 400
        assert "an update needs" in response.json()["error"]


def test_a_trainer_that_dies_while_sending_leaves_the_old_weights_serving(
    vllm_server: VllmServer, model_a: Reference, model_b: Reference, version: int
) -> None:
    with WeightPusher(vllm_server.url, vllm_server.token, timeout_s=10.0) as dying:
        dying.connect()
        dying.post("/pause", mode="keep")
        dying.post("/start_weight_update")
        with pytest.raises(httpx.HTTPStatusError):
            dying.update(model_b.parameters(), bucket_bytes=20_000, stop_after=3)
    # a restarted trainer: it finds the server paused and the update open
    with WeightPusher(vllm_server.url, vllm_server.token, timeout_s=10.0) as restarted:
        restarted.post("/resume")
        _assert_serves(vllm_server, model_a, version)
        restarted.connect()
        restarted.push(model_b.parameters(), version + 1)
    _assert_serves(vllm_server, model_b, version + 1)


def test_a_trainer_that_dies_between_start_and_update_does_not_block_the_next(
    vllm_server: VllmServer, model_b: Reference, version: int
) -> None:
    with WeightPusher(vllm_server.url, vllm_server.token) as dying:
        dying.connect()
        dying.post("/pause", mode="keep")
        dying.post("/start_weight_update")
    push_state_dict(vllm_server.url, vllm_server.token, model_b.parameters(), version + 1)
    _assert_serves(vllm_server, model_b, version + 1)


def test_an_update_of_a_server_that_is_not_paused_is_refused(
    vllm_server: VllmServer, model_a: Reference, version: int, pusher: WeightPusher
) -> None:
    pusher.post("/start_weight_update")
    response = pusher.client.post("/finish_weight_update", json={"weight_version": str(version + 1)})
    assert response.status_code == 409
    assert "/pause" in response.json()["error"]
    _assert_serves(vllm_server, model_a, version)


def test_finishing_twice_is_the_same_as_once(vllm_server: VllmServer, version: int, pusher: WeightPusher) -> None:
    pusher.post("/finish_weight_update", {"weight_version": str(version)})  # a client that lost the first answer
    assert vllm_server.info().policy_version == version
    response = pusher.client.post("/finish_weight_update", json={"weight_version": "latest"})
    assert response.status_code == 400


def test_joining_a_group_that_nobody_hosts_ends_at_its_deadline(vllm_server: VllmServer, version: int) -> None:
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "key": "k"}
    response = vllm_server.client.post("/init_weight_transfer_engine", json={"init_info": info | {"timeout_s": 1.0}})
    assert response.status_code == 500
    assert response.json()["error"]
    assert vllm_server.client.get("/health").status_code == 200


def test_requests_wait_while_paused_and_go_on_after_resume(vllm_server: VllmServer, version: int) -> None:
    """R6.3: a pause stops dispatch."""
    control = vllm_server.client
    assert control.post("/resume").status_code == 200  # allowed also when not paused
    assert control.post("/pause", params={"mode": "keep"}).status_code == 200
    assert control.get("/is_paused").json() == {"is_paused": True}
    with ThreadPoolExecutor(1) as pool:
        try:
            waiting = pool.submit(vllm_server.generate, PROMPT, max_tokens=4)
            while vllm_server.info().active_requests == 0:
                assert not waiting.done()
            busy_s = vllm_server.info().busy_s
            assert vllm_server.info().busy_s == busy_s  # paused time is not busy time
            assert not waiting.done()
        finally:
            control.post("/resume")
        assert waiting.result(30).finish_reason == "length"
    assert control.get("/is_paused").json() == {"is_paused": False}


def test_pause_abort_ends_requests_with_what_they_have(vllm_server: VllmServer, version: int) -> None:
    first = threading.Event()

    def watched() -> Iterator[GenerateChunk]:
        for chunk in vllm_server.chunks(PROMPT, max_tokens=900, flush_interval_s=0.0):
            first.set()
            yield chunk

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(join, watched())
        assert first.wait(30)
        vllm_server.client.post("/pause", params={"mode": "abort"})
        vllm_server.client.post("/resume")
        completion = running.result(30)
    assert completion.finish_reason == "abort"
    assert 0 < len(completion.token_ids) < 900
    assert len(completion.logprobs) == len(completion.token_ids)
