"""Weight updates of the embedded engine: exact versions under load, refusals, and a trainer that dies on the way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.inference.api import PARAMETERS_PATH, SCORE_PATH, ServedParameters, WeightInitInfo
from grpo_async.weights.buckets import cut_into_buckets, pack
from grpo_async.weights.receiver import parameter_specs
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
from tests.support.dying_trainer import MOMENTS, killed_trainer
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


def test_an_update_that_does_not_fit_is_refused_with_names_before_anything_is_sent(
    server: Live, tiny_model: Path
) -> None:
    old = load(tiny_model)
    served = ServedParameters.model_validate_json(server.client.get(PARAMETERS_PATH).content)
    assert served.shapes == {name: list(p.shape) for name, p in old.named_parameters()}
    good = perturbed(old, seed=1)
    norm, head = "model.norm.weight", "lm_head.weight"
    cases = [
        ({**good, "model.tail.weight": good[norm]}, "model.tail.weight is not a parameter"),
        ({name: tensor for name, tensor in good.items() if name != norm}, f"{norm} is missing"),
        ({**good, norm: good[norm][:-1]}, f"{norm} has the shape [63], the server's [64]"),
        ({**good, head: good["model.embed_tokens.weight"]}, f"{head} is not a parameter"),  # it is tied
    ]
    with WeightPusher(server.url, None) as pusher:
        pusher.connect()
        for weights, words in cases:
            response = server.post("/start_weight_update", {"update_info": _announcement(weights)})
            assert response.status_code == 400
            assert words in response.json()["error"]
            assert server.post("/update_weights").status_code == 409
            # nothing to finish: the new version must not name the old weights
            assert server.post("/finish_weight_update", {"weight_version": "9"}).status_code == 409
            assert serves(server, old, version=0)
        pusher.push(good, 9)  # the group is as good as before
    assert serves(server, with_weights(tiny_model, good), version=9)


def _announcement(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    return announcement(weights).model_dump()


def test_a_group_that_cannot_be_is_refused_at_once(server: Live) -> None:
    began = time.monotonic()
    cases = [
        ({"rank_offset": 2}, 400, "rank_offset 2"),
        ({"rank_offset": 0}, 400, "rank_offset 0"),
        ({"timeout_s": -1.0}, 400, "timeout_s"),
        ({"transport": "nccl"}, 500, "nccl"),
        ({"transport": "pigeon"}, 400, "transport"),
        ({"key": "AAAA me@home"}, 400, "key"),
        ({"master_port": 0}, 400, "master_port"),
    ]
    for change, status, words in cases:
        info = _membership(timeout_s=60.0) | change
        response = server.client.post("/init_weight_transfer_engine", json={"init_info": info})
        assert (response.status_code, words in response.json()["error"]) == (status, True)
    assert time.monotonic() - began < 15.0


def test_a_server_with_a_part_of_an_update_answers_nothing_until_it_has_a_whole_one(
    server: Live, tiny_model: Path
) -> None:
    """The trainer goes on living, but sends no more: the server's own deadline ends it, and another trainer mends it."""
    weights = perturbed(load(tiny_model), seed=1)
    with WeightPusher(server.url, None, timeout_s=3.0) as stuck, WeightPusher(server.url, None) as pusher:
        stuck.connect()
        group = stuck.group
        assert group is not None
        [frozen] = server.ask(make_request(prompt(10), seed=2, max_tokens=400))
        server.wait_until(lambda info: info.generated_tokens > 0)
        stuck.post("/pause")
        stuck.start(weights, bucket_bytes=20_000)
        unsent = server.pool.submit(server.post, "/update_weights")
        first = next(cut_into_buckets(parameter_specs(announcement(weights)), 20_000))
        into = group.buffer(sum(spec.num_bytes for spec in first))
        group.send(pack([weights[spec.name] for spec in first], into=into), timeout_s=10.0)()
        answer = unsent.result(30.0)
        assert (answer.status_code, "did not arrive (bucket 1)" in answer.json()["error"]) == (500, True)
        refused = server.post("/resume")
        assert (refused.status_code, "part of a weight update" in refused.json()["error"]) == (409, True)
        assert server.is_paused()
        [held] = server.ask(make_request(prompt(12), seed=3, max_tokens=10))
        scored = server.pool.submit(server.post, SCORE_PATH, {"token_ids": prompt(9)})
        server.wait_until(lambda info: info.active_requests == 3)
        assert server.post("/start_weight_update", {"update_info": _announcement(weights)}).status_code == 400
        assert server.post("/finish_weight_update", {"weight_version": "0"}).status_code == 409
        assert not held.done()
        assert not scored.done()
        pusher.connect()
        pusher.push(weights, 5, mode="drain")  # what waits can never drain, and what is frozen must not go on before
        output = held.result(30.0)
        assert set(output.versions) == {5}
        going_on = frozen.result(30.0).versions
        num_old = going_on.count(0)
        assert 0 < num_old < 400
        assert going_on == [0] * num_old + [5] * (400 - num_old)
        assert scored.result(30.0).json()["policy_version"] == 5
    assert serves(server, with_weights(tiny_model, weights), version=5)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_trainer_that_is_killed_leaves_the_old_weights_or_none_and_the_next_one_goes_on(
    server: Live, tiny_model: Path, moment: str
) -> None:
    """None: a server with a part of the new ones waits for the next trainer's."""
    old = load(tiny_model)
    request = make_request(prompt(20), seed=1, max_tokens=400)
    killed_trainer(server.url, None, tiny_model, moment)
    assert eventually(server.is_paused)  # once the engine has seen the connection break
    [answer] = server.ask(request)
    weights = perturbed(old, seed=2)
    if moment in ("pause", "start"):
        assert server.post("/resume").status_code == 200
        output = answer.result(60.0)
        assert set(output.versions) == {0}
        assert worst_error(old, request, output) < 1e-5
    else:
        assert server.post("/resume").status_code == 409
        assert not answer.done()
    push_state_dict(server.url, None, weights, 3)
    assert set(answer.result(60.0).versions) <= {0, 3}
    assert serves(server, with_weights(tiny_model, weights), version=3)


def test_an_update_needs_a_pause_and_serves_only_once_it_is_finished(server: Live, tiny_model: Path) -> None:
    old = load(tiny_model)
    weights = perturbed(old, seed=1)
    with WeightPusher(server.url, None) as pusher:
        pusher.connect()
        pusher.start(weights)
        refused = server.post("/update_weights")
        assert (refused.status_code, "POST /pause first" in refused.json()["error"]) == (409, True)
        assert serves(server, old, version=0)
        pusher.post("/pause")
        pusher.start(weights)
        pusher.update(weights)
        assert server.post("/resume").status_code == 409  # no token of new weights under the old version
        for _ in range(2):  # a retry after a lost answer
            pusher.post("/finish_weight_update", {"weight_version": "4"})
        pusher.post("/resume")
    assert serves(server, with_weights(tiny_model, weights), version=4)


def _membership(*, port: int = 1, timeout_s: float) -> dict[str, Any]:
    return WeightInitInfo(
        master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2, timeout_s=timeout_s, key="weights/0a"
    ).model_dump()
