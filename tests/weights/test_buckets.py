"""Parameters on the wire: buckets, buckets as bytes, and how an update differs from what a server wants."""

from __future__ import annotations

import pytest
import torch

from grpo_async.config.sections import WeightsSection
from grpo_async.weights.buckets import (
    ParameterSpec,
    choose_bucket_bytes,
    cut_into_buckets,
    digests_of,
    samples_of,
    update_problems,
)


def _specs(*num_floats: int) -> list[ParameterSpec]:
    return [ParameterSpec(name=str(i), dtype_name="float32", shape=(n,)) for i, n in enumerate(num_floats)]


def test_a_large_parameter_is_a_bucket_of_its_own_whatever_fits() -> None:
    """Half a bucket: 40 floats of 80."""
    buckets = list(cut_into_buckets(_specs(5, 40, 5, 5, 39, 40), 320))
    assert [[spec.name for spec in bucket] for bucket in buckets] == [["0"], ["1"], ["2", "3", "4"], ["5"]]


@pytest.mark.parametrize(
    ("num_bytes", "free", "expected"),
    [
        (400 * 10**6, None, 8 << 20),
        (16 * 10**9, 70 << 30, 250 * 10**6),  # 8B in bfloat16: a 64th
        (140 * 10**9, 1 << 30, 128 << 20),  # an eighth of what is free
    ],
)
def test_buckets_grow_with_the_model_as_far_as_there_is_room(
    num_bytes: int, free: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 << 30))
    device = torch.device("cpu" if free is None else "cuda")
    assert choose_bucket_bytes(WeightsSection(), num_bytes, device=device) == expected
    assert choose_bucket_bytes(WeightsSection(bucket_mb=3), num_bytes, device=device) == 3 << 20


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
