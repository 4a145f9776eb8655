"""Checks whether trainer and server have the same weights, by comparing the log-probabilities that both give to the same tokens.

With the same weights they differ only by rounding, which is measured: the trainer computes the same tokens twice, t and t',
where t' is rounded differently (`score_twice`). With rounding errors of size r for the trainer's and k r for the server's,

    E|t - t'| ~ sqrt(2) r        E|t - s| ~ sqrt(1 + k^2) r        ratio = sqrt((1 + k^2) / 2)

The limit of the ratio is 2 (k = 2.6). Wrong weights that move log-probabilities by D are found if D exceeds about 1.7 E|t - t'|.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch

from grpo_async.batching.pack import MicroBatch, Segment
from grpo_async.config import ExperimentConfig
from grpo_async.inference.control import ServerControl
from grpo_async.training.logprobs import PolicyOutput
from grpo_async.training.model import Policy, reshard

_LENGTHS = (16, 64, 300)
"""Lengths within a block of the server's cache, and across the border of two blocks (vLLM: 16 tokens, on CPU 128)."""
_PROMPT_FRACTION = 0.5
MAX_RATIO = 2.0
_MIN_LIMIT = 1e-3  # of mean |d|: float32 kernels may differ, for example in the order of sums
MAX_ROUNDING = 0.5  # nats of mean |d|: no dtype usable for training rounds as coarsely
_DTYPES = ("float32", "float16", "bfloat16")  # from the finest to the coarsest


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobDifference:
    """How far two sets of log-probabilities of the same tokens differ, in nats. d = trainer - server, per token."""

    mean: float
    """Mean of |d|."""
    max: float
    """Largest |d|."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerScores:
    """The trainer's log-probabilities of the probes, one list per sequence, and those of a second pass with different rounding."""

    logprobs: list[list[float]]
    perturbed_logprobs: list[list[float]]

    @property
    def rounding(self) -> LogprobDifference:
        return compare_logprobs(self.logprobs, self.perturbed_logprobs)


Score = Callable[[Sequence[Sequence[int]], str], TrainerScores]
"""Scores whole sequences under the trainer's weights, at the rounding of a dtype ("bfloat16")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerComparison:
    is_same: bool
    """Whether it serves the trainer's weights, as the version that was pushed."""
    versions: list[int]
    """Versions that its answers report, in ascending order."""
    difference: LogprobDifference
    text: str
    """The difference and its limit."""


def compare_server(
    server: ServerControl,
    probes: Sequence[Sequence[int]],
    trainer: TrainerScores,
    *,
    config: ExperimentConfig,
    version: int,
) -> ServerComparison:
    """Have `server` score the probes, and compare with the scores of the trainer, whose weights are `version`. Raises
    InferenceError."""
    answers = [server.score(probe) for probe in probes]
    versions = sorted({answer.policy_version for answer in answers})
    scores = [answer.logprobs for answer in answers]
    difference, limit = compare_logprobs(trainer.logprobs, scores), verify_limit(config, trainer)
    text = (
        f"mean |d| {difference.mean:.2g}, max {difference.max:.2g} over {difference.num_tokens} tokens (limit of the mean "
        f"{limit:.2g}; rounding alone moves the trainer's own by {trainer.rounding.mean:.2g})"
    )
    is_same = versions == [version] and difference.mean <= limit  # False where a number is NaN
    return ServerComparison(is_same=is_same, versions=versions, difference=difference, text=text)


def compare_logprobs(trainer: Sequence[Sequence[float]], server: Sequence[Sequence[float]]) -> LogprobDifference:
    """Compare token by token; NaN on either side makes mean and max NaN, which passes no limit. One list per sequence each.

    Trainer [[-1.0, -2.0]], server [[-1.0, -2.5]] -> d = [0, 0.5]: mean 0.25, max 0.5."""
    if [len(scores) for scores in trainer] != [len(scores) for scores in server]:
        raise ValueError(
            f"log-probabilities of different numbers of tokens: trainer {[len(scores) for scores in trainer]}, "
            f"server {[len(scores) for scores in server]}"
        )
    ours, theirs = (
        torch.tensor(list(chain.from_iterable(scores)), dtype=torch.float64) for scores in (trainer, server)
    )
    if not len(ours):
        raise ValueError("there are no log-probabilities to compare")
    sizes = (ours - theirs).abs()
    return LogprobDifference(mean=sizes.mean().item(), max=sizes.max().item(), num_tokens=len(ours))


def verify_limit(config: ExperimentConfig, trainer: TrainerScores) -> float:
    """Largest mean |d| that passes, in nats: `weights.verify_tolerance`, or else twice the rounding difference of the trainer's own
    scores, at least 1e-3 and at most 0.5. See the module's docstring."""
    if config.weights.verify_tolerance is not None:
        return config.weights.verify_tolerance
    return min(max(MAX_RATIO * trainer.rounding.mean, _MIN_LIMIT), MAX_ROUNDING)


def coarsest_dtype(config: ExperimentConfig, served: Iterable[str]) -> str:
    """The dtype whose rounding limits how closely trainer and servers, which report the dtypes `served`, can agree."""
    return max((config.model.resolved_compute_dtype, config.inference.resolved_dtype, *served), key=_DTYPES.index)


def probe_sequences(prompt_ids: Sequence[Sequence[int]], *, vocab_size: int, max_model_len: int) -> list[list[int]]:
    """Token sequences for the comparison: 16, 64 and 300 tokens, each at most `max_model_len` - 1 (the server samples one more).

    The first half (or less) of sequence i is from the start of prompt i of `prompt_ids`, the rest pseudo-random, below
    `vocab_size`. Prompts [[5, 6, 7]], vocab_size 10, max_model_len 17 -> one sequence of 16: 5, 6, 7 and 13 random ids."""
    generator = random.Random(0)
    lengths = sorted({min(length, max_model_len - 1) for length in _LENGTHS})
    sequences = []
    for number, length in enumerate(lengths):
        prompt = prompt_ids[number % len(prompt_ids)] if prompt_ids else ()
        head = list(prompt[: int(length * _PROMPT_FRACTION)])
        sequences.append([*head, *(generator.randrange(vocab_size) for _ in range(length - len(head)))])
    return sequences


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
    """`score_sequences`, twice, the second time with the rounding of another dtype, not finer than `compute`: a server is
    judged by both."""
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
