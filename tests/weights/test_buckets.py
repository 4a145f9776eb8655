"""Cutting parameters into buckets, and buckets as bytes."""

from __future__ import annotations

import torch

from grpo_async.weights.buckets import (
    ITEM_SIZES,
    LARGE_BYTES,
    ParameterSpec,
    TurnBuffers,
    cut_into_buckets,
    pack,
    unpack,
)


def _specs(*num_floats: int) -> list[ParameterSpec]:
    return [ParameterSpec(name=str(i), dtype_name="float32", shape=(n,)) for i, n in enumerate(num_floats)]


def test_consecutive_parameters_share_a_bucket_up_to_its_size() -> None:
    """100 + 200 bytes fit into 320, the next 300 do not."""
    buckets = list(cut_into_buckets(_specs(25, 50, 75), 320))
    assert [[spec.num_bytes for spec in bucket] for bucket in buckets] == [[100, 200], [300]]


def test_a_parameter_larger_than_a_bucket_is_a_bucket_of_its_own() -> None:
    buckets = list(cut_into_buckets(_specs(1, 1000, 1), 100))
    assert [len(bucket) for bucket in buckets] == [1, 1, 1]


def test_a_large_parameter_is_a_bucket_of_its_own_whatever_fits() -> None:
    large = LARGE_BYTES // 4
    buckets = list(cut_into_buckets(_specs(5, large, 5, 5, large - 1, large), 64 << 20))
    assert [[spec.name for spec in bucket] for bucket in buckets] == [["0"], ["1"], ["2", "3", "4"], ["5"]]


def test_dtype_decides_the_bytes() -> None:
    assert ParameterSpec(name="a", dtype_name="bfloat16", shape=(3, 5)).num_bytes == 30
    assert ParameterSpec(name="scalar", dtype_name="float32", shape=()).num_bytes == 4


def test_what_was_packed_is_unpacked_also_where_tensors_start_unaligned() -> None:
    """3 bytes of bool, then float32 at byte 3, then bfloat16 at byte 11, then an int64 scalar at byte 13."""
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "weights": torch.tensor([1.5, -2.0]),
        "half": torch.tensor([0.5]).bfloat16(),
        "count": torch.tensor(7),
    }
    specs = [
        ParameterSpec(name=name, dtype_name=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    total = sum(spec.num_bytes for spec in specs)
    assert total == 3 + 8 + 2 + 8
    for buffer in (
        pack(list(tensors.values())),
        pack(list(tensors.values()), into=torch.empty(total, dtype=torch.uint8)),
    ):
        for name, tensor in unpack(buffer, specs):
            assert tensor.dtype == tensors[name].dtype
            assert torch.equal(tensor, tensors[name]), name


def test_two_buffers_take_turns_and_grow() -> None:
    buffers = TurnBuffers(torch.device("cpu"))
    first, second = buffers.take(10), buffers.take(10)
    assert first.data_ptr() != second.data_ptr()
    assert buffers.take(4).data_ptr() == first.data_ptr()
    assert (buffers.take(100).numel(), buffers.take(10).data_ptr()) == (100, first.data_ptr())


def test_item_sizes_are_those_of_torch() -> None:
    for name, size in ITEM_SIZES.items():
        assert getattr(torch, name).itemsize == size
