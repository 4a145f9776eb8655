"""Forward passes without a gradient: the reference policy of a KL term, and the scores for comparison with a server.

A reference is one of two kinds. With LoRA and `loss.reference: initial` it is the policy itself without its adapters, which costs
no memory. Otherwise it is a second model, sharded over the same ranks, frozen or synced with the policy (`loss.sync_ref_model`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from grpo_async.batching.pack import MicroBatch, Segment
from grpo_async.training.logprobs import PolicyOutput
from grpo_async.training.lora import adapters_off
from grpo_async.training.model import Policy, reshard
from grpo_async.training.parameters import local_of
from grpo_async.training.verify import TrainerScores


class Reference:
    """The policy that the KL term compares with: a separate model, frozen here, or, `without_adapters`, the trained one."""

    def __init__(self, policy: Policy, *, without_adapters: bool = False) -> None:
        self.policy = policy
        self._without_adapters = without_adapters
        if not without_adapters:
            policy.requires_grad_(False)

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probabilities of the trained tokens of a micro-batch: (N,) float32, natural log, at the run's temperature, without
        gradient. A collective: every rank makes the same number of calls, including batches without trained tokens."""
        with torch.no_grad(), adapters_off(self.policy.model) if self._without_adapters else nullcontext():
            logprobs: torch.Tensor = self.policy(batch).logprobs
        reshard(self.policy)
        return logprobs

    @torch.no_grad()
    def sync(self, policy: Policy, *, alpha: float) -> None:
        """reference <- alpha policy + (1 - alpha) reference (TR-DPO, arXiv 2404.09656, equation 4). Both are sharded in the same
        way, so each rank updates its own rows and no rank waits."""
        pairs = zip(self.policy.named_parameters(), policy.named_parameters(), strict=True)
        for (name, reference), (same_name, trained) in pairs:
            assert name == same_name
            rows = local_of(reference)
            rows.lerp_(local_of(trained).to(rows), alpha)


def score_sequences(policy: Policy, sequences: Sequence[Sequence[int]], *, device: torch.device) -> list[list[float]]:
    """log softmax(logits) at temperature 1 of every token but the first, given those before it; one list per sequence, one entry
    shorter than it. A collective: every rank calls it with the same sequences, of at least two token ids each."""
    scores: list[list[float]] = []
    with torch.no_grad():
        for sequence in sequences:
            size = 1 if policy.context is None else policy.context.size
            batch = one_row(sequence, row_multiple=size)
            batch = batch if policy.context is None else batch.divided(size)
            output: PolicyOutput = policy(batch.to(device), temperature=1.0)
            scores.append(output.logprobs.tolist())
    reshard(policy)
    return scores


def score_twice(
    policy: Policy,
    sequences: Sequence[Sequence[int]],
    *,
    device: torch.device,
    compute: torch.dtype,
    rounding: torch.dtype,
) -> TrainerScores:
    """`score_sequences`, twice, the second time with the rounding of another dtype, not finer than `compute`: `training.verify`
    judges a server by both."""
    logprobs = score_sequences(policy, sequences, device=device)
    with _perturbed_rounding(policy, rounding, device=device, is_coarser=rounding != compute):
        return TrainerScores(logprobs=logprobs, perturbed_logprobs=score_sequences(policy, sequences, device=device))


@contextmanager
def _perturbed_rounding(
    policy: Policy, dtype: torch.dtype, *, device: torch.device, is_coarser: bool
) -> Iterator[None]:
    """Change embeddings by at most one unit in their last place, as another rounding would have. Everything computed from them then
    has different values, whose rounding errors are independent of those of the undisturbed pass. If `dtype` is coarser than the
    policy's compute dtype, autocast adds its rounding."""
    generator = torch.Generator(device).manual_seed(0)
    unit = torch.finfo(dtype).eps

    def perturb(_: torch.nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(output.shape, generator=generator, device=output.device)
        return (output * (1.0 + unit * (2.0 * noise - 1.0))).to(output.dtype)

    hook = policy.model.get_input_embeddings().register_forward_hook(perturb)
    try:
        # no cache: it would hold weights that FSDP frees
        with torch.autocast(device.type, dtype, enabled=is_coarser, cache_enabled=False):
            yield
    finally:
        hook.remove()


def one_row(sequence: Sequence[int], *, row_multiple: int = 1) -> MicroBatch:
    length, num_scored = len(sequence), len(sequence) - 1
    padding = -length % row_multiple
    ids = torch.tensor([*sequence, *[0] * padding], dtype=torch.int64)
    unused = torch.zeros(num_scored, dtype=torch.float32)
    return MicroBatch(
        input_ids=ids[None],
        position_ids=torch.arange(len(ids))[None],
        segments=[Segment(len(ids))],  # padding comes last: no token of the sequence sees it
        source_index=torch.arange(num_scored),
        target_ids=ids[1:length],
        sample_index=torch.zeros(num_scored, dtype=torch.int64),
        sampler_logprobs=unused,
        advantages=unused,
        weights=unused,
        staleness=torch.zeros(num_scored, dtype=torch.int64),
    )
