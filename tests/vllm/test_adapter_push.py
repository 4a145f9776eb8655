"""A push of adapters alone to the real vLLM: it serves what the trainer computes, and what a merged push serves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_async.inference.control import ServerControl
from grpo_async.training.reference import score_sequences
from tests.support.adapter_push import adapted_policy, merged, push
from tests.vllm.server import VllmServer

pytestmark = pytest.mark.vllm

SEQUENCES = [[5, 9, 200, 31, 7, 7, 8, 100, 3], list(range(40, 80))]


def test_vllm_adds_adapters_to_the_base_that_it_has_loaded(
    vllm_server: VllmServer, tiny_model: Path, version: int
) -> None:
    policy, section = adapted_policy(tiny_model)
    expected = score_sequences(policy, SEQUENCES, device=torch.device("cpu"))
    control = ServerControl(vllm_server.url, token=vllm_server.token, timeout_s=60.0)
    try:
        found = []
        for number, kind in enumerate((section, merged(section), section), start=1):
            report = push(vllm_server.url, vllm_server.token, policy, kind, version + number)
            answers = [control.score(sequence) for sequence in SEQUENCES]
            assert {answer.policy_version for answer in answers} == {version + number}
            found.append((report["sync/bytes"], [answer.logprobs for answer in answers]))
        for _, logprobs in found:
            for ours, theirs in zip(expected, logprobs, strict=True):
                assert theirs == pytest.approx(ours, abs=1e-4)
        (few, by_adapters), (many, by_merged), _ = found
        assert by_adapters == by_merged
        assert many > 5 * few
    finally:
        control.close()
