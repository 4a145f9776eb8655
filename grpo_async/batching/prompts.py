"""Finds the prompts that several samples of a minibatch begin with.

The hidden states of a causal model depend on the tokens before them only, so a prompt that is computed once gives every sample that
begins with it what its own copy would give.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from grpo_async.batching.plan import SamplePrompt
from grpo_async.records import RolloutSample


def find_prompts(samples: Sequence[RolloutSample]) -> list[SamplePrompt | None]:
    """What each sample has before its first trained token, where another sample has just the same before its own; else None. Of a
    sample with several turns that is what comes before the first one. [num_samples]

    Worked example, trained tokens in brackets: 1 2 [5 6], 1 2 [7], 1 [2 7], 3 [4] -> prompt 0 of 2 tokens for the first two, None
    for the others.
    """
    lengths = [num_prompt_tokens(sample) for sample in samples]
    beginnings = [sample.token_ids[:n].tobytes() for sample, n in zip(samples, lengths, strict=True)]
    shared = [beginning for beginning, count in Counter(beginnings).items() if count > 1 and beginning]
    numbers = {beginning: number for number, beginning in enumerate(shared)}
    return [
        SamplePrompt(number=numbers[beginning], num_tokens=n) if beginning in numbers else None
        for beginning, n in zip(beginnings, lengths, strict=True)
    ]


def num_prompt_tokens(sample: RolloutSample) -> int:
    """Tokens before its first trained one; 0 where none is trained."""
    return int(sample.loss_mask.argmax())
