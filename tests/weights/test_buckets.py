"""Parameters on the wire: buckets, buckets as bytes, and how an update differs from what a server wants."""

from __future__ import annotations

import pytest
import torch

from grpo_async.weights.buckets import (
    ParameterSpec,
    digests_of,
    samples_of,
    update_problems,
)

SERVED = {"a": [2, 3], "b": [4]}


def _named(**shapes: tuple[int, ...]) -> list[ParameterSpec]:
    return [ParameterSpec(name=name, dtype_name="float32", shape=shape) for name, shape in shapes.items()]


def test_a_tied_head_may_be_sent_or_not_whichever_side_knows_it() -> None:
    fits = _named(a=(2, 3), b=(4,))
    assert update_problems(fits, {**SERVED, "lm_head.weight": [2, 3]}, ["lm_head.weight"]) == []
    assert update_problems([*fits, *_named(**{"lm_head.weight": (2, 3)})], SERVED, ["lm_head.weight"]) == []
    wrong = [*fits, *_named(**{"lm_head.weight": (9, 3)})]
    assert len(update_problems(wrong, {**SERVED, "lm_head.weight": [2, 3]}, ["lm_head.weight"])) == 1


@pytest.mark.parametrize("size", [3, 1024, 100_000])
def test_a_digest_sees_every_eighth_of_a_tensor_and_where_it_is(size: int) -> None:
    tensor = torch.randn(size).bfloat16()
    others = [tensor]
    for eighth in range(8):
        spoiled = tensor.clone()
        spoiled[eighth * size // 8 : (eighth + 1) * size // 8 + 1] = 0.0
        others.append(spoiled)
    others.append(tensor.flip(0))
    assert len(set(digests_of([samples_of(others)]).tolist())) == len({tuple(other.tolist()) for other in others}) >= 4
