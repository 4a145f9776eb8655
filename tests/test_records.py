"""Derived views of the records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from grpo_async.records import TOP, FinishReason, TurnRecord
from tests.support.records import make_completion, make_sample, make_turn


def test_a_turn_with_a_missing_logprob_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ids/logprobs/versions = \(2, 1, 2\)"):
        TurnRecord(output_ids=[1, 2], output_logprobs=[0.0], policy_versions=[0, 0], finish_reason=FinishReason.STOP)


def test_only_tokens_that_are_trained_bring_the_likeliest_of_their_positions_into_a_sample() -> None:
    """Neither a tool's tokens nor a turn that is not trained."""

    def turn(*ids: int, **more: Any) -> TurnRecord:
        top = np.array([[(n, -1.0), (n + 1, -2.0)] for n in ids], TOP)
        return replace(make_turn(ids), output_top=top, tool_response_ids=[90, 91], **more)

    path = replace(make_completion(), turns=[turn(5, 6), turn(20, is_trained=False), turn(7)])
    assert path.top is not None
    assert path.top["id"].tolist() == [[5, 6], [6, 7], [7, 8]]
    assert path.completion_ids[path.completion_mask].tolist() == [5, 6, 7]
    assert replace(path, turns=[*path.turns, make_turn([8])]).top is None  # nothing is known of the last
    with pytest.raises(ValueError, match="2 trained tokens, and 3 rows"):
        replace(make_sample(), top=path.top)
