"""Weight updates of the embedded engine: exact versions under load, refusals, and a trainer that dies on the way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from grpo_async.inference.api import PARAMETERS_PATH, ServedParameters, WeightInitInfo, WeightUpdateInfo
from grpo_async.weights.rendezvous import Rendezvous
from tests.servers.embedded_support import (
    Live,
    by_version,
    live,
    load,
    make_request,
    perturbed,
    prompt,
    serves,
    with_weights,
    worst_error,
)
from tests.support.dying_trainer import killed_trainer
from tests.support.tiny_model import build_tiny_model
from tests.support.waiting import eventually
from tests.support.weight_push import WeightPusher, announcement, push_state_dict


@pytest.fixture
def server(tiny_model: Path) -> Iterator[Live]:
    with live(load(tiny_model), num_slots=16) as served:
        yield served


def test_tokens_around_pushes_in_flight_are_of_the_version_they_carry(server: Live, tiny_model: Path) -> None:
    old = load(tiny_model)
    weights = {version: perturbed(old, seed=version) for version in (5, 6)}
    models = {0: old} | {version: with_weights(tiny_model, tensors) for version, tensors in weights.items()}
    requests = [make_request(prompt(3 + i, start=i), seed=i, max_tokens=300) for i in range(24)]
    with WeightPusher(server.url, None) as pusher:
        answers = server.ask(*requests)
        pusher.connect()
        server.wait_until(lambda info: info.generated_tokens > 50)
        for version, tensors in weights.items():
            pusher.push(tensors, version, bucket_bytes=50_000)  # several buckets
        outputs = [answer.result(60.0) for answer in answers]
    num_mixed = 0
    for request, output in zip(requests, outputs, strict=True):
        expected = by_version(models, request.token_ids, output.token_ids, output.versions)
        assert torch.allclose(expected, torch.tensor(output.logprobs), atol=1e-5)
        assert output.versions == sorted(output.versions)
        num_mixed += len(set(output.versions)) > 1
    assert num_mixed >= 4
    assert server.info().policy_version == 6


def test_a_model_with_its_own_lm_head_is_updated_too(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path, tie_word_embeddings=False)
    with live(load(folder)) as server:
        weights = perturbed(load(folder), seed=1)
        assert "lm_head.weight" in weights
        push_state_dict(server.url, None, weights, 1)
        assert serves(server, with_weights(folder, weights), version=1)


def test_a_tied_head_may_be_sent_if_it_is_the_embedding(server: Live, tiny_model: Path) -> None:
    old, head = load(tiny_model), "lm_head.weight"
    served = ServedParameters.model_validate_json(server.client.get(PARAMETERS_PATH).content)
    assert served.shapes == {name: list(p.shape) for name, p in old.named_parameters()}
    assert served.optional == [head]
    weights = perturbed(old, seed=1)
    embedding = weights["model.embed_tokens.weight"]
    with WeightPusher(server.url, None, timeout_s=10.0) as pusher:
        pusher.connect()
        pusher.push({**weights, head: embedding}, 1)
        assert serves(server, with_weights(tiny_model, weights), version=1)
        pusher.connect()
        with pytest.raises(httpx.HTTPStatusError, match=f"{head} is model.embed_tokens.weight"):
            pusher.push({**perturbed(old, seed=2), head: embedding}, 2)
    assert serves(server, with_weights(tiny_model, weights), version=1)


def test_an_update_that_does_not_fit_is_refused_with_names_and_the_old_weights_stay(
    server: Live, tiny_model: Path
) -> None:
    old = load(tiny_model)
    good = perturbed(old, seed=1)
    norm, head = "model.norm.weight", "lm_head.weight"
    cases = [
        ({**good, "model.tail.weight": good[norm]}, "model.tail.weight is not a parameter"),
        ({name: tensor for name, tensor in good.items() if name != norm}, f"{norm} is missing"),
        ({**good, norm: good[norm][:-1]}, f"{norm} has the shape [63], the server's [64]"),
        ({**good, norm: good[norm].bfloat16()}, f"{norm} has the dtype bfloat16, the server's float32"),
        ({**good, head: good[norm]}, f"{head} has the shape [64]"),
    ]
    with WeightPusher(server.url, None) as pusher:
        for weights, words in cases:
            pusher.connect()
            pusher.post("/start_weight_update")
            response = pusher.client.post("/update_weights", json={"update_info": _announcement(weights)})
            assert response.status_code == 400
            assert words in response.json()["error"]
            # nothing to finish: the new version must not name the old weights
            assert pusher.client.post("/finish_weight_update", json={"weight_version": "9"}).status_code == 409
            assert serves(server, old, version=0)
        assert pusher.client.post("/start_weight_update", json={}).status_code == 400  # the group is gone
        pusher.connect()
        pusher.push(good, 9)
    assert serves(server, with_weights(tiny_model, good), version=9)


def _announcement(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    return announcement(weights).model_dump()


def test_a_refused_update_ends_the_trainers_wait_at_once(server: Live, tiny_model: Path) -> None:
    """It is already sending; the server leaves the group, which breaks the broadcast."""
    wide = {
        **perturbed(load(tiny_model), seed=1),
        "model.more": torch.zeros(64 << 20, dtype=torch.uint8).view(torch.float32),
    }
    with WeightPusher(server.url, None, timeout_s=60.0) as pusher:
        pusher.connect()
        pusher.post("/start_weight_update")
        began = time.monotonic()
        with pytest.raises((RuntimeError, httpx.HTTPStatusError)):
            pusher.update(wide)
        assert time.monotonic() - began < 15.0


def test_a_group_that_cannot_be_is_refused_at_once(server: Live) -> None:
    began = time.monotonic()
    cases = [
        ({"rank_offset": 2}, 400, "rank_offset 2"),
        ({"rank_offset": 0}, 400, "rank_offset 0"),
        ({"timeout_s": -1.0}, 400, "timeout_s"),
        ({"transport": "nccl"}, 500, "nccl"),
        ({"transport": "pigeon"}, 400, "transport"),
        ({"key": "AAAA me@home"}, 400, "key"),
        ({"master_port": 0, "store_file": str(Path.home() / ".ssh/authorized_keys")}, 400, "not the name of a store"),
    ]
    for change, status, words in cases:
        info = _membership(timeout_s=60.0) | change
        response = server.client.post("/init_weight_transfer_engine", json={"init_info": info})
        assert (response.status_code, words in response.json()["error"]) == (status, True)
    assert time.monotonic() - began < 15.0


@pytest.mark.slow
def test_a_new_trainer_does_not_wait_for_what_an_earlier_one_left(server: Live, tiny_model: Path) -> None:
    """Its end may hang until its own deadline: its machine vanished, so no connection ever breaks."""
    old = load(tiny_model)
    weights = perturbed(old, seed=1)
    with ThreadPoolExecutor(2) as pool:
        silent = Rendezvous("127.0.0.1", world_size=2, timeout_s=20.0)
        store = {"master_port": 0, "store_file": silent.store_file, "key": silent.key}
        init = {"init_info": _membership(timeout_s=20.0) | store}
        gone = pool.submit(server.client.post, "/init_weight_transfer_engine", json=init, timeout=60.0)
        silent.wait("cpu")
        with WeightPusher(server.url, None, timeout_s=15.0) as stuck, WeightPusher(server.url, None) as pusher:
            began = time.monotonic()
            stuck.connect()
            stuck.post("/start_weight_update")
            unsent = pool.submit(stuck.post, "/update_weights", {"update_info": _announcement(weights)})
            # for the first bucket, and for the group that is gone
            assert eventually(lambda: _num_waiting() == 2)
            pusher.connect()
            pusher.push(weights, 5)
            assert time.monotonic() - began < 10.0
            assert not gone.done()
            with pytest.raises(httpx.HTTPStatusError, match="409"):
                unsent.result(30.0)
        assert serves(server, with_weights(tiny_model, weights), version=5)
        silent.abort("it came back too late")
        assert gone.result(40.0).status_code in (409, 500)
        with WeightPusher(server.url, None) as pusher:
            assert pusher.post("/finish_weight_update", {"weight_version": "5"})
    assert serves(server, with_weights(tiny_model, weights), version=5)


def test_the_engine_answers_and_generates_while_an_update_is_received(server: Live, tiny_model: Path) -> None:
    old = load(tiny_model)
    with WeightPusher(server.url, None, timeout_s=20.0) as pusher, ThreadPoolExecutor(1) as pool:
        pusher.connect()
        pusher.post("/start_weight_update")
        update = {"update_info": _announcement(perturbed(old, seed=1)) | {"timeout_s": 20.0}}
        answer = pool.submit(pusher.post, "/update_weights", update)
        assert eventually(lambda: _num_waiting() >= 1), "the server does not wait for the first bucket"
        for _ in range(5):
            assert server.client.get("/is_paused", timeout=5.0).json() == {"is_paused": False}
            assert serves(server, old, version=0)
        assert not answer.done()
        pusher.group = None  # the trainer dies
        with pytest.raises(httpx.HTTPStatusError, match="did not arrive"):
            answer.result(15.0)
    assert serves(server, old, version=0)


def _num_waiting() -> int:
    """Threads of servers that wait for a group or for weights."""
    return sum(thread.name == "weight-update" for thread in threading.enumerate())


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
def test_a_trainer_that_is_killed_leaves_the_old_weights_and_the_next_one_goes_on(
    server: Live, tiny_model: Path, moment: str
) -> None:
    old = load(tiny_model)
    request = make_request(prompt(20), seed=1, max_tokens=400)
    killed_trainer(server.url, None, tiny_model, moment)
    assert server.is_paused()
    [answer] = server.ask(request)
    server.post("/resume")
    output = answer.result(60.0)
    assert set(output.versions) == {0}
    assert worst_error(old, request, output) < 1e-5
    weights = perturbed(old, seed=2)
    push_state_dict(server.url, None, weights, 3)
    assert serves(server, with_weights(tiny_model, weights), version=3)


def test_received_weights_serve_only_once_the_update_is_finished(server: Live, tiny_model: Path) -> None:
    old = load(tiny_model)
    weights = perturbed(old, seed=1)
    with WeightPusher(server.url, None) as pusher:
        pusher.connect()
        pusher.post("/start_weight_update")
        pusher.update(weights)
        assert serves(server, old, version=0)  # nobody paused: no token of new weights under the old version
        pusher.post("/finish_weight_update", {"weight_version": "4"})
        assert serves(server, with_weights(tiny_model, weights), version=4)
        pusher.post("/finish_weight_update", {"weight_version": "4"})  # a retry after a lost answer


def test_an_update_out_of_order_is_refused_and_a_start_counts_for_the_group_that_it_was_made_in(server: Live) -> None:
    """A trainer that joins anew begins anew, also when its group does not form."""
    update = {"update_info": _announcement({})}

    def is_not_started() -> bool:
        response = server.post("/update_weights", update)
        return (response.status_code, "start_weight_update" in response.json()["error"]) == (409, True)

    assert "init_weight_transfer_engine" in server.post("/start_weight_update", {}).json()["error"]
    assert is_not_started()
    with WeightPusher(server.url, None) as pusher:
        pusher.connect()
        for fails in (False, True):
            pusher.post("/start_weight_update")
            if fails:  # nobody listens there
                gone = {"init_info": _membership(timeout_s=0.5)}
                assert server.post("/init_weight_transfer_engine", gone).status_code == 500
            else:
                pusher.connect()
            assert is_not_started()
        # an update that ends as another one has begun is of no use, though it was received well
        received, may_end = threading.Event(), threading.Event()

        async def receive(_: WeightUpdateInfo) -> None:
            received.set()
            assert await asyncio.to_thread(may_end.wait, 30.0)

        server.server.receive = receive  # type: ignore[method-assign]
        pusher.connect()
        pusher.post("/start_weight_update")
        late = server.pool.submit(server.post, "/update_weights", update)
        assert received.wait(30.0)
        pusher.post("/start_weight_update")
        may_end.set()
        assert late.result(30.0).status_code == 409
        assert server.post("/finish_weight_update", {"weight_version": "9"}).status_code == 409


def _membership(*, port: int = 1, timeout_s: float) -> dict[str, Any]:
    return WeightInitInfo(
        master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2, timeout_s=timeout_s, key="weights/0a"
    ).model_dump()
