"""What the served logprobs must be: Hugging Face, float32, the whole sequence recomputed in one forward."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.servers.embedded_support import Output, load, teacher_forced

# Largest |server - reference| seen: 4e-6 in float32 on CPU; a wrong model is off by 0.1 to 7.
TOLERANCE = 1e-4


class Reference:
    """A model in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.module = folder, load(folder)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Name -> tensor, as a trainer sends them: tied weights once."""
        return dict(self.module.named_parameters())

    def logprobs(self, prompt: list[int], output: list[int], *, temperature: float) -> list[float]:
        """log_softmax(logits / temperature) of each output token, natural log: [num_output_tokens]."""
        return teacher_forced(self.module, prompt, output, temperature).tolist()


def largest_difference(first: list[float], second: list[float]) -> float:
    assert len(first) == len(second), f"{len(first)} and {len(second)} logprobs"
    assert first, "nothing to compare"
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def assert_exact(model: Reference, prompt: list[int], completion: Output, version: int) -> None:
    """Every token is of `version`, with the logprob that `model` has for it."""
    assert set(completion.versions) == {version}
    expected = model.logprobs(prompt, completion.token_ids, temperature=1.0)
    assert largest_difference(completion.logprobs, expected) < TOLERANCE
