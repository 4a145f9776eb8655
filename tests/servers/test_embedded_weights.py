"""Weight updates of the embedded engine: exact versions under load, refusals, and a trainer that dies on the way."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from grpo_async.inference.surface import GlooUpdateInfo
from tests.servers.embedded_support import (
    Live,
    live,
    load,
    make_request,
    perturbed,
    prompt,
    teacher_forced,
    wait_until,
    worst_error,
)
from tests.support.tiny_model import build_tiny_model
from tests.support.weight_push import WeightPusher, push_state_dict


@pytest.fixture
def server(tiny_model: Path) -> Iterator[Live]:
    with live(load(tiny_model), num_slots=16) as served:
        yield served


def _with_weights(folder: Path, weights: dict[str, torch.Tensor]) -> Any:
    model = load(folder)
    model.load_state_dict(weights, strict=False)
    return model


def _serves(server: Live, model: Any, version: int) -> bool:
    request = make_request(prompt(12), seed=3, max_tokens=10)
    output = server.generate(request)
    return set(output.versions) == {version} and worst_error(model, request, output) < 1e-5


def test_tokens_around_pushes_in_flight_are_of_the_version_they_carry(server: Live, tiny_model: Path) -> None:
    old = load(tiny_model)
    weights = {version: perturbed(old, seed=version) for version in (5, 6)}
    models = {0: old} | {version: _with_weights(tiny_model, tensors) for version, tensors in weights.items()}
    requests = [make_request(prompt(3 + i, start=i), seed=i, max_tokens=300) for i in range(24)]
    with ThreadPoolExecutor(24) as pool, WeightPusher(server.url, None) as pusher:
        answers = [pool.submit(server.generate, request) for request in requests]
        pusher.connect()
        wait_until(lambda: server.info().generated_tokens > 50, "the first tokens")
        for version, tensors in weights.items():
            pusher.push(tensors, version, bucket_bytes=50_000)  # several buckets
        outputs = [answer.result(60.0) for answer in answers]
    num_mixed = 0
    for request, output in zip(requests, outputs, strict=True):
        by_version = {v: teacher_forced(m, request.token_ids, output.token_ids) for v, m in models.items()}
        expected = torch.stack([by_version[version][i] for i, version in enumerate(output.versions)])
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
        assert _serves(server, _with_weights(folder, weights), version=1)


def test_an_update_that_does_not_fit_is_refused_with_names_and_the_old_weights_stay(
    server: Live, tiny_model: Path
) -> None:
    old = load(tiny_model)
    good = perturbed(old, seed=1)
    norm, head = "model.norm.weight", "lm_head.weight"
    cases = [
        ({**good, head: good["model.embed_tokens.weight"]}, f"unknown parameters: {head}"),
        ({name: tensor for name, tensor in good.items() if name != norm}, f"missing parameters: {norm}"),
        ({**good, norm: good[norm][:-1]}, f"{norm} is float32 [64], got float32 [63]"),
        ({**good, norm: good[norm].bfloat16()}, f"{norm} is float32 [64], got bfloat16 [64]"),
    ]
    with WeightPusher(server.url, None) as pusher:
        for weights, words in cases:
            pusher.connect()
            pusher.post("/start_weight_update")
            response = pusher.client.post("/update_weights", json={"update_info": _announcement(weights)})
            assert response.status_code == 400
            assert words in response.json()["error"]
            # nothing to finish: the new version must not name the old weights
            assert pusher.client.post("/finish_weight_update", json={"weight_version": "9"}).status_code == 400
            assert _serves(server, old, version=0)
        assert pusher.client.post("/start_weight_update", json={}).status_code == 400  # the group is gone
        pusher.connect()
        pusher.push(good, 9)
    assert _serves(server, _with_weights(tiny_model, good), version=9)


def _announcement(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    return GlooUpdateInfo(
        names=list(weights),
        dtype_names=[str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
        shapes=[list(tensor.shape) for tensor in weights.values()],
        bucket_bytes=1 << 20,
        timeout_s=5.0,
    ).model_dump()


def test_a_trainer_that_dies_in_an_update_leaves_the_old_weights_serving(server: Live, tiny_model: Path) -> None:
    old = load(tiny_model)
    weights = perturbed(old, seed=1)
    with WeightPusher(server.url, None, timeout_s=5.0) as pusher:
        pusher.connect()
        pusher.post("/start_weight_update")
        with pytest.raises(httpx.HTTPStatusError, match="500"):
            pusher.update(weights, bucket_bytes=50_000, stop_after=2)
        assert _serves(server, old, version=0)
    # the trainer comes back with a new group
    push_state_dict(server.url, None, weights, 3)
    assert _serves(server, _with_weights(tiny_model, weights), version=3)


def test_received_weights_serve_only_once_the_update_is_finished(server: Live, tiny_model: Path) -> None:
    old = load(tiny_model)
    weights = perturbed(old, seed=1)
    with WeightPusher(server.url, None) as pusher:
        pusher.connect()
        pusher.post("/start_weight_update")
        pusher.update(weights)
        assert _serves(server, old, version=0)  # nobody paused: no token of new weights under the old version
        pusher.post("/finish_weight_update", {"weight_version": "4"})
        assert _serves(server, _with_weights(tiny_model, weights), version=4)
        pusher.post("/finish_weight_update", {"weight_version": "4"})  # a retry after a lost answer


def test_an_update_out_of_order_is_refused(server: Live) -> None:
    client = server.client
    assert "init_weight_transfer_engine" in client.post("/start_weight_update", json={}).json()["error"]
    empty = _announcement({})
    response = client.post("/update_weights", json={"update_info": empty})
    assert (response.status_code, "start_weight_update" in response.json()["error"]) == (400, True)


def test_joining_a_group_that_nobody_hosts_fails_within_its_deadline(server: Live) -> None:
    info = {
        "master_address": "127.0.0.1",
        "master_port": 1,
        "rank_offset": 1,
        "world_size": 2,
        "timeout_s": 2.0,
        "key": "k",
    }
    response = server.client.post("/init_weight_transfer_engine", json={"init_info": info})
    assert (response.status_code, "127.0.0.1:1" in response.json()["error"]) == (500, True)
