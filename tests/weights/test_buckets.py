"""Cutting parameters into buckets."""

from __future__ import annotations

from grpo_async.weights.buckets import ParameterSpec, cut_into_buckets


def _specs(*num_floats: int) -> list[ParameterSpec]:
    return [ParameterSpec(name=str(i), dtype_name="float32", shape=(n,)) for i, n in enumerate(num_floats)]


def test_consecutive_parameters_share_a_bucket_up_to_its_size() -> None:
    """100 + 200 bytes fit into 320, the next 300 do not."""
    buckets = list(cut_into_buckets(_specs(25, 50, 75), 320))
    assert [[spec.num_bytes for spec in bucket] for bucket in buckets] == [[100, 200], [300]]


def test_a_parameter_larger_than_a_bucket_is_a_bucket_of_its_own() -> None:
    buckets = list(cut_into_buckets(_specs(1, 1000, 1), 100))
    assert [len(bucket) for bucket in buckets] == [1, 1, 1]


def test_dtype_decides_the_bytes() -> None:
    assert ParameterSpec(name="a", dtype_name="bfloat16", shape=(3, 5)).num_bytes == 30
    assert ParameterSpec(name="scalar", dtype_name="float32", shape=()).num_bytes == 4
