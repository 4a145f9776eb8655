"""Derived views of the records."""

from __future__ import annotations

import pytest

from grpo_async.records import FinishReason, TurnRecord
from tests.support.records import make_sample


def test_a_turn_with_a_missing_logprob_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ids/logprobs/versions = \(2, 1, 2\)"):
        TurnRecord(output_ids=[1, 2], output_logprobs=[0.0], policy_versions=[0, 0], finish_reason=FinishReason.STOP)


def test_a_sample_knows_its_oldest_trained_version() -> None:
    sample = make_sample(version=4)
    assert sample.oldest_version == 4  # not the -1 of the prompt
    assert sample.num_trained_tokens == 2
