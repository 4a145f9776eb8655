"""Keeping packed samples apart, against one dense mask; and which attention is chosen where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from grpo_async.batching.pack import Segment
from grpo_async.errors import ConfigError
from grpo_async.training import attention
from grpo_async.training.attention import CausalMask, SampleLayout

HEADS, KV_HEADS, WIDTH = 4, 2, 8

ONE = [Segment(12)]
LONG = [Segment(600), Segment(300), Segment(20)]  # more than a block of queries
TREE = [
    Segment(330),
    Segment(64, 300),
    Segment(7, 340),
    Segment(64, 300),
    Segment(1, 2),
    Segment(5),
    Segment(9, 4),
    Segment(9, 4),
]


def _layout(segments: Sequence[Segment], device: str = "cpu") -> SampleLayout:
    return SampleLayout(segments, (1, sum(segment.length for segment in segments)), torch.device(device))


def _dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Sequence[Segment],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """The definition: every pair of tokens of a row, one mask. A token sees the last of the tokens that its sample begins with."""
    total = sum(segment.length for segment in segments)
    visible = torch.zeros(total, total, dtype=torch.bool)
    sample: list[int] = []
    place = 0
    for segment in segments:
        sample = sample[: segment.shared]
        for _ in range(segment.length):
            sample.append(place)
            visible[place, sample[-window:] if window else sample] = True
            place += 1
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = query @ key.transpose(-2, -1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1)
    return (weights @ value).transpose(1, 2)


def _inputs(segments: Sequence[Segment], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tokens = sum(segment.length for segment in segments)
    return [
        torch.randn(1, heads, tokens, WIDTH, dtype=dtype, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def _attend(inputs: list[torch.Tensor], layout: SampleLayout, *, window: int | None = None, **settings: Any) -> Any:
    return attention._mask_attention(nn.Module(), *inputs, CausalMask(window), sample_layout=layout, **settings)[0]


@pytest.mark.parametrize("segments", [LONG, TREE], ids=["long", "tree"])
@pytest.mark.parametrize("softcap", [None, 1.5], ids=["plain", "softcap"])
@pytest.mark.parametrize("window", [None, 3, 270])
def test_long_samples_and_shared_prefixes_are_what_the_dense_mask_gives(
    window: int | None, softcap: float | None, segments: Sequence[Segment]
) -> None:
    """Values and gradients, in double precision. Short samples, of every family: test_policy."""
    inputs = _inputs(segments)
    ours = _attend(inputs, _layout(segments), window=window, scaling=0.3, softcap=softcap)
    wanted = _dense(*inputs, segments, scale=0.3, window=window, softcap=softcap)
    torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-6)  # soft-capped scores are rounded to 32 bits
    upstream = torch.randn_like(wanted)
    found = torch.autograd.grad(ours, inputs, upstream)
    for gradient, right in zip(found, torch.autograd.grad(wanted, inputs, upstream), strict=True):
        torch.testing.assert_close(gradient, right, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sinks": torch.zeros(HEADS)}, "sinks"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "attention to later tokens"),
    ],
)
def test_what_would_be_left_out_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _attend(_inputs(ONE), _layout(ONE), **arguments)
    foreign = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    with pytest.raises(ConfigError, match="does not apply the mask of"):
        attention._mask_attention(nn.Module(), *_inputs(ONE), foreign, sample_layout=_layout(ONE))
    for change in ("use_vmap", "allow_is_bidirectional_skip"):
        with pytest.raises(ConfigError, match="not causal everywhere"):
            attention._make_mask(**{change: True})


@pytest.mark.parametrize("has_groups", [True, False], ids=["grouped heads", "torch 2.11"])
def test_what_varlen_hands_to_the_kernel(has_groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no such kernel for the CPU: a stand-in computes a sample at a time what it was asked for. torch 2.11 takes as many
    heads of keys as of queries."""
    import torch.nn.attention.varlen as library

    def stand_in(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ends_q: torch.Tensor,
        ends_k: torch.Tensor,
        longest_q: int,
        longest_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        lengths, key_lengths = ends_q.diff().tolist(), ends_k.diff().tolist()
        assert (longest_q, longest_k) == (max(lengths), max(key_lengths))
        assert enable_gqa == has_groups == (q.shape[1] != k.shape[1])
        left, right = window_size
        assert right == 0
        pieces = []
        for a, b, c in zip(q.split(lengths), k.split(key_lengths), v.split(key_lengths), strict=True):
            before = b.new_zeros(
                len(b) - len(a), *a.shape[1:]
            )  # queries that nobody asks for: the last key is the last query's
            part = [states.transpose(0, 1)[None] for states in (torch.cat([before, a]), b, c)]
            window = None if left < 0 else left + 1
            whole = _dense(*part, [Segment(len(b))], scale=scale, window=window, softcap=None)[0]
            pieces.append(whole[len(before) :])
        return torch.cat(pieces)

    def of_torch_2_11(*tensors: Any, scale: float, window_size: tuple[int, int]) -> torch.Tensor:
        return stand_in(*tensors, scale=scale, window_size=window_size)

    monkeypatch.setattr(library, "varlen_attn", stand_in if has_groups else of_torch_2_11)
    for segments, window in ((LONG, None), (LONG, 3), (TREE, 3), (TREE, 270)):
        inputs = _inputs(segments)
        ours = attention._varlen_attention(
            nn.Module(), *inputs, CausalMask(window), sample_layout=_layout(segments), scaling=0.3
        )[0]
        torch.testing.assert_close(ours, _dense(*inputs, segments, scale=0.3, window=window, softcap=None))


@pytest.mark.gpu
@pytest.mark.parametrize("segments", [LONG, TREE], ids=["long", "tree"])
@pytest.mark.parametrize("window", [None, 3])
def test_varlen_is_what_the_dense_mask_gives_on_a_gpu(window: int | None, segments: Sequence[Segment]) -> None:
    inputs = [states.detach().cuda().bfloat16().requires_grad_() for states in _inputs(segments)]
    ours = attention._varlen_attention(
        nn.Module(), *inputs, CausalMask(window), sample_layout=_layout(segments, "cuda"), scaling=0.3
    )[0]
    exact = [states.detach().cpu().double().requires_grad_() for states in inputs]
    wanted = _dense(*exact, segments, scale=0.3, window=window, softcap=None)
    torch.testing.assert_close(ours.cpu().double(), wanted, atol=2e-2, rtol=2e-2)
    upstream = torch.randn_like(wanted)
    found = torch.autograd.grad(ours, inputs, upstream.cuda().bfloat16())
    for gradient, right in zip(found, torch.autograd.grad(wanted, exact, upstream), strict=True):
        torch.testing.assert_close(gradient.cpu().double(), right, atol=5e-2, rtol=5e-2)
