"""Checks whether trainer and server have the same weights, by comparing the log-probabilities that both give to the same tokens.

With the same weights they differ only by rounding, which is measured: the trainer computes the same tokens twice, t and t',
where t' is rounded differently (training.reference). With rounding errors of size r for the trainer's and k r for the server's,

    E|t - t'| ~ sqrt(2) r        E|t - s| ~ sqrt(1 + k^2) r        ratio = sqrt((1 + k^2) / 2)

The limit of the ratio is 2 (k = 2.6). Wrong weights that move log-probabilities by D are found if D exceeds about 1.7 E|t - t'|.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from grpo_async.config import ExperimentConfig
from grpo_async.inference.control import ServerControl
from grpo_async.training.loss import kl_k3

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
    p99: float
    """The 99th percentile of |d|, by nearest rank."""
    max: float
    """Largest |d|."""
    k3: float
    """Mean of exp(d) - d - 1 >= 0: the k3 estimate of the KL divergence, with d of at most 80 (training.loss.kl_k3)."""
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
    """The difference and its limit; also by probe length if the weights are not the same."""


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
    if not is_same:
        parts = (
            f"{compare_logprobs([one], [other]).mean:.2g} in the probe of {len(one) + 1}"
            for one, other in zip(trainer.logprobs, scores, strict=True)
        )
        text += f"; mean by length: {', '.join(parts)}"
    return ServerComparison(is_same=is_same, versions=versions, difference=difference, text=text)


def compare_logprobs(trainer: Sequence[Sequence[float]], server: Sequence[Sequence[float]]) -> LogprobDifference:
    """Compare token by token; NaN on either side makes mean, max and k3 NaN, which passes no limit. One list per sequence each.

    Trainer [[-1.0, -2.0]], server [[-1.0, -2.5]] -> d = [0, 0.5]: mean 0.25, p99 and max 0.5, k3 = 0.0744."""
    if [len(scores) for scores in trainer] != [len(scores) for scores in server]:
        raise ValueError(
            f"log-probabilities of different numbers of tokens: trainer {[len(scores) for scores in trainer]}, "
            f"server {[len(scores) for scores in server]}"
        )
    ours, theirs = (
        torch.tensor(list(chain.from_iterable(scores)), dtype=torch.float64) for scores in (trainer, server)
    )
    count = len(ours)
    if not count:
        raise ValueError("there are no log-probabilities to compare")
    sizes = (ours - theirs).abs().sort().values  # NaN comes last
    return LogprobDifference(
        mean=sizes.mean().item(),
        p99=sizes[math.ceil(0.99 * count) - 1].item(),
        max=sizes[-1].item(),
        k3=kl_k3(theirs, ours).mean().item(),
        num_tokens=count,
    )


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
