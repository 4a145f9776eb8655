"""Adapters that vLLM keeps beside its weights (model.lora.push: adapter_swap): versions, logprobs, caches, slots."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.training.verify import score_sequences
from tests.servers.contract import LONG_PROMPT, PROMPT, start
from tests.servers.embedded_support import Output, make_request
from tests.support.adapter_push import adapted_policy, push
from tests.vllm.server import VllmServer, experiment, running_server

pytestmark = pytest.mark.vllm

MANY = 900  # tokens: the request lasts longer than the pushes


@pytest.fixture(scope="module")
def swapping(needs_vllm: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """With max_staleness 1, so four adapters at a time."""
    config = experiment(str(tiny_model))
    config["model"]["lora"] = {"rank": 4, "push": "adapter_swap"}
    with running_server(config, tmp_path_factory.mktemp("swapping")) as server:
        yield server


class Pushed:
    """Policies by their versions; `push` makes another one, and a scale of the adapter's product that is not 1."""

    def __init__(self, server: VllmServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.policies: dict[int, Any] = {}

    def push(self) -> dict[str, float]:
        version = self.server.info().policy_version + 1
        policy, section = adapted_policy(self.folder, seed=version, push="adapter_swap", alpha=6.0)
        self.policies[version] = policy
        return push(self.server.url, self.server.token, policy, section, version)

    def assert_of(self, version: int, tokens: list[int], logprobs: list[float]) -> None:
        """The last tokens have the logprobs that the trainer's policy of this version gives them."""
        (expected,) = score_sequences(self.policies[version], [tokens], device=torch.device("cpu"))
        assert logprobs == pytest.approx(expected[-len(logprobs) :], abs=self.server.tolerance)


@pytest.fixture
def pushed(swapping: VllmServer, tiny_model: Path) -> Pushed:
    return Pushed(swapping, tiny_model)


def _started(server: VllmServer, token: int) -> Future[Output]:
    """A long request that has begun; it ends with its own version on every token, or is aborted."""
    running = start(server, [token, *PROMPT], MANY)
    assert running.began.wait(30.0)
    return running.done


def test_a_request_ends_on_its_version_over_three_pushes_and_the_oldest_is_aborted_when_slots_are_taken(
    swapping: VllmServer, pushed: Pushed
) -> None:
    pushed.push()
    first = swapping.info().policy_version
    running = {first: _started(swapping, 30)}
    for version in range(first + 1, first + 4):
        metrics = pushed.push()
        assert metrics["sync/stopped_s"] < metrics["sync/push_s"]
        assert metrics["sync/phase/pause_s"] == 0.0
        running[version] = _started(swapping, 30 + version)
    assert not running[first].done(), "the pushes are to come while it is running"
    pushed.push()  # a fifth adapter
    oldest = running[first].result(60)
    assert oldest.finish_reason == "abort"
    for version, future in running.items():
        output = future.result(60)
        assert set(output.versions) == {version}
        assert len(output.token_ids) == MANY or version == first
        prompt = [30 if version == first else 30 + version, *PROMPT]
        pushed.assert_of(version, [*prompt, *output.token_ids][:512], output.logprobs[: 512 - len(prompt)])


def test_no_version_starts_from_the_cache_of_another_and_scores_and_vllms_own_routes_are_of_the_newest(
    swapping: VllmServer, pushed: Pushed
) -> None:
    model = swapping.info().model
    body = {"model": model, "prompt": LONG_PROMPT, "max_tokens": 4, "temperature": 0.0, "logprobs": 0}
    for _ in range(2):
        pushed.push()
        version = swapping.info().policy_version
        output = swapping.generate(make_request(LONG_PROMPT, max_tokens=8))
        assert set(output.versions) == {version}
        pushed.assert_of(version, [*LONG_PROMPT, *output.token_ids], output.logprobs)
        for score in swapping.pool.map(swapping.score, [LONG_PROMPT] * 4):  # in one batch
            assert score.policy_version == version
            pushed.assert_of(version, LONG_PROMPT, score.logprobs)
        answer = swapping.client.post("/v1/completions", json={**body, "return_token_ids": True}).raise_for_status()
        (choice,) = answer.json()["choices"]
        pushed.assert_of(version, [*LONG_PROMPT, *choice["token_ids"]], choice["logprobs"]["token_logprobs"])
