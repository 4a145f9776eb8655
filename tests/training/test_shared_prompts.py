"""A prompt that is computed once gives what every sample's own copy gives: log-probabilities, entropies and all gradients."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import nn

from grpo_async.batching.pack import MicroBatch, split_by_rank
from grpo_async.batching.plan import plan_batch
from grpo_async.batching.prompts import find_prompts
from grpo_async.config.loss_sections import ClippedLoss
from grpo_async.config.model_sections import LoraSection
from grpo_async.records import RolloutSample
from grpo_async.training import attention
from grpo_async.training.attention import CausalMask, SampleLayout
from grpo_async.training.model import Policy, recompute_activations
from grpo_async.training.ranks import TrainerContext
from grpo_async.training.reference import Reference
from tests.support import rank_jobs
from tests.support.dense_mask import dense_mask
from tests.support.ranks import run_on_ranks
from tests.support.records import make_sample
from tests.training.tiny_families import FAMILIES, build_family
from tests.training.tiny_models import load_tiny, save_model

GROUPS = [(9, [5, 12, 11, 10, 1, 7]), (20, [3, 8]), (1, [4, 4, 4]), (6, [10]), (13, [1, 1, 1])]
"""Tokens of a prompt and of its completions. Some are as long as others, some much shorter; one group is of one."""


def make_groups(groups: Sequence[tuple[int, Sequence[int]]] = GROUPS, *, seed: int = 0) -> list[RolloutSample]:
    """Samples with random tokens. Of the second completion of every group every third token is a tool's."""
    draw = random.Random(seed)
    samples = []
    for group_id, (num_tokens, completions) in enumerate(groups):
        prompt = [draw.randrange(3, 300) for _ in range(num_tokens)]
        for number, length in enumerate(completions):
            ids = [draw.randrange(3, 300) for _ in range(length)]
            logprobs = [-6.0 + draw.gauss(0, 0.1) for _ in ids]
            sample = make_sample(
                group_id=group_id, prompt=prompt, completion=ids, logprobs=logprobs, advantage=draw.gauss(0, 1)
            )
            samples.append(_with_tool_tokens(sample, num_tokens) if number == 1 else sample)
    return samples


def _with_tool_tokens(sample: RolloutSample, prompt: int) -> RolloutSample:
    mask = [int(bool(m) and (index - prompt) % 3 != 1) for index, m in enumerate(sample.loss_mask)]
    logprobs = [p if m else 0.0 for p, m in zip(sample.sampler_logprobs, mask, strict=True)]
    versions = [v if m else -1 for v, m in zip(sample.policy_versions, mask, strict=True)]
    return replace(sample, loss_mask=mask, sampler_logprobs=logprobs, policy_versions=versions)


def _batches(samples: Sequence[RolloutSample], *, shared: bool, limit: int) -> list[tuple[list[int], MicroBatch]]:
    """Micro-batches of one rank, each with the numbers of its samples."""
    plan = plan_batch(
        [len(sample.token_ids) for sample in samples],
        num_ranks=1,
        micro_batch_tokens=limit,
        pack=True,
        prompts=find_prompts(samples) if shared else None,
    )
    assert (plan.num_shared_tokens > 0) == shared
    packed = split_by_rank(samples, [1.0] * len(samples), plan, trainer_version=0)[0].pack()
    return [(part.indices, batch) for part, batch in zip(plan.ranks[0], packed, strict=True)]


def _compute(policy: Policy, *, shared: bool, limit: int = 999) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies in the order of the samples; leaves gradients behind."""
    samples = make_groups()
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for indices, batch in _batches(samples, shared=shared, limit=limit):
        output = policy(batch, entropy_gradient=True)
        counts = [samples[index].num_trained_tokens for index in indices]
        parts = zip(output.logprobs.split(counts), output.entropy.split(counts), strict=True)
        found |= dict(zip(indices, parts, strict=True))
    logprobs, entropies = (torch.cat([found[index][part] for index in range(len(samples))]) for part in (0, 1))
    loss = (logprobs * torch.linspace(-1.0, 1.0, len(logprobs))).sum() + 0.3 * entropies.sum()
    torch.autograd.backward(loss)
    return logprobs.detach(), entropies.detach()


def _assert_same(model: Any, *, limit: int = 999, recompute: Literal["none", "full", "selective"] = "none") -> None:
    own = Policy(copy.deepcopy(model), temperature=0.7, chunk_tokens=16)
    one_copy = Policy(model, temperature=0.7, chunk_tokens=16)
    recompute_activations(model, recompute)
    wanted, found = _compute(own, shared=False), _compute(one_copy, shared=True, limit=limit)
    for ours, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, right, atol=2e-5, rtol=1e-5)
    num_trained = 0
    for (name, ours), other in zip(one_copy.named_parameters(), own.parameters(), strict=True):
        if other.grad is None:
            assert ours.grad is None
            continue
        num_trained += 1
        torch.testing.assert_close(ours.grad, other.grad, atol=1e-4, rtol=1e-4, msg=name)
    assert num_trained > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_same(family: str) -> None:
    _assert_same(build_family(family))


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_micro_batches_may_divide_the_groups(family: str) -> None:
    _assert_same(build_family(family), limit=40)


@pytest.mark.parametrize(("family", "mode"), [("qwen3", "selective"), ("gemma2", "full")])
def test_recomputed_activations_give_the_same(family: str, mode: Literal["full", "selective"]) -> None:
    _assert_same(build_family(family), recompute=mode)


def test_adapters_get_the_same_gradients(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "qwen3", vocab_size=320)
    model = load_tiny(folder, lora=LoraSection(rank=4, alpha=8.0)).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    _assert_same(model)


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["plain", "softcap"])
@pytest.mark.parametrize("window", [None, 3, 20], ids=["all", "w3", "w20"])
@pytest.mark.parametrize("groups", [GROUPS, [(50, [290, 280, 270, 40])]], ids=["short", "several blocks of queries"])
def test_attention_is_what_the_dense_mask_gives(
    groups: Sequence[tuple[int, Sequence[int]]], window: int | None, softcap: float | None
) -> None:
    """Values and gradients, in double precision. A window goes by the position in the sample, not by that in the row."""
    ((_, batch),) = _batches(make_groups(groups), shared=True, limit=9999)
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, heads, batch.input_ids.shape[1], 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    ]
    layout = SampleLayout(batch.segment_ids, continuations=batch.continuations)
    ours, _ = attention._mask_attention(
        nn.Module(), *inputs, CausalMask(window), sample_layout=layout, scaling=0.3, softcap=softcap
    )
    query, key, value = inputs
    key, value = key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)
    distance = batch.position_ids[:, :, None] - batch.position_ids[:, None, :]
    visible = dense_mask(batch) & (distance < (window or 9999))[:, None]
    scores = query @ key.transpose(-2, -1) * 0.3
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    wanted = (torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1) @ value).transpose(1, 2)
    torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-6)  # soft-capped scores are rounded to 32 bits
    upstream = torch.randn_like(wanted)
    found = torch.autograd.grad(ours, inputs, upstream)
    for gradient, right in zip(found, torch.autograd.grad(wanted, inputs, upstream), strict=True):
        torch.testing.assert_close(gradient, right, atol=1e-6, rtol=1e-6)


class _Held:
    """What autograd holds of a tensor; counts the elements that all of them have at a time."""

    now = most = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        _Held.now += tensor.numel()
        _Held.most = max(_Held.most, _Held.now)

    def __del__(self) -> None:
        _Held.now -= self.tensor.numel()


def _most_held_in_the_backward_pass(completion: int) -> int:
    ((_, batch),) = _batches(make_groups([(100, [completion] * 2)]), shared=True, limit=9999)
    layout = SampleLayout(batch.segment_ids, continuations=batch.continuations)
    inputs = [torch.randn(1, 4, batch.input_ids.shape[1], 8, requires_grad=True) for _ in range(3)]
    output, _ = attention._mask_attention(nn.Module(), *inputs, CausalMask(None), sample_layout=layout)
    _Held.now = _Held.most = 0
    with torch.autograd.graph.saved_tensors_hooks(_Held, lambda held: held.tensor):
        torch.autograd.grad(output.sum(), inputs)
    return _Held.most


def test_what_the_backward_pass_holds_grows_with_the_completion_not_with_its_square() -> None:
    """A block of 256 queries at a time, with the keys that it sees and its mask; the masks of all would be four times as much."""
    short, long = (_most_held_in_the_backward_pass(completion) for completion in (768, 1536))
    assert 0 < long < 2.2 * short


def _obstacle(policy: Policy, reference: Any = None, **training: Any) -> Any:
    settings = SimpleNamespace(**{"share_prompts": True, "pack": True, **training})
    unused: Any = None
    config: Any = SimpleNamespace(training=settings)
    return TrainerContext(
        config=config,
        run_dir=unused,
        policy=policy,
        optimizer=unused,
        objective=unused,
        reference=reference,
        parameters=unused,
        channel=unused,
        checkpoints=unused,
        tokenizer=unused,
        device=torch.device("cpu"),
        num_ranks=1,
    ).obstacle_to_shared_prompts


def test_prompts_are_shared_only_where_that_changes_nothing() -> None:
    def policy(name: Literal["mask", "varlen"] = "mask", family: str = "qwen3", **settings: Any) -> Policy:
        return Policy(build_family(family), temperature=1.0, chunk_tokens=16, attention=name, **settings)

    plain = policy()
    assert _obstacle(plain) is None
    assert _obstacle(plain, reference=Reference(plain, without_adapters=True)) is None
    assert _obstacle(policy(family="qwen3-moe")) is None
    assert "training.share_prompts is false" in _obstacle(plain, share_prompts=False)
    assert "not packed" in _obstacle(plain, pack=False)
    assert "the attention is varlen" in _obstacle(policy("varlen"))
    assert "the attention is varlen" in _obstacle(plain, reference=Reference(policy("varlen")))
    assert "router" in _obstacle(policy(family="qwen3-moe", with_router_loss=True))


def train_groups(model: str, *, share_prompts: bool, **settings: Any) -> dict[str, Any]:
    """A step of two updates, run by `run_on_ranks`. `computed`: this rank's tokens of all its forward passes with a gradient. The
    reference is not the policy: it has been moved."""
    moved, moved_optimizer = rank_jobs.build(model)
    rank_jobs.one_step(moved, moved_optimizer, rank_jobs.random_samples(seed=5))
    policy, optimizer = rank_jobs.build(model)
    computed: list[int] = []
    policy.register_forward_pre_hook(lambda _, inputs: computed.append(inputs[0].input_ids.numel()))
    result = rank_jobs.one_step(
        policy,
        optimizer,
        make_groups(),
        loss=ClippedLoss(type="grpo", beta=0.1, proximal="recomputed", entropy_bonus=0.01),
        num_minibatches=2,
        reference=Reference(moved),
        share_prompts=share_prompts,
        **settings,
    )
    weights = rank_jobs.fingerprint(policy)
    return {"computed": sum(computed), "updates": result.updates, "metrics": result.metrics, "weights": weights}


@pytest.mark.slow
def test_a_step_of_two_updates_with_a_reference_is_the_same(tiny_model: Path, tmp_path: Path) -> None:
    """Several micro-batches of parts of groups on each rank; metrics and weights, after two updates each with a KL."""
    own = run_on_ranks("train_groups", 1, tmp_path / "own", module=__name__, model=tiny_model, share_prompts=False)
    arguments = {"model": tiny_model, "share_prompts": True, "micro_batch_tokens": 48}
    shared = run_on_ranks("train_groups", 2, tmp_path / "shared", module=__name__, **arguments)
    assert shared["computed"] < own["computed"]
    assert shared["updates"] == own["updates"] == [True, True]
    assert shared["metrics"] == pytest.approx(own["metrics"], rel=1e-3, abs=1e-6)
    assert shared["weights"] == pytest.approx(own["weights"], rel=1e-4, abs=2e-3)
