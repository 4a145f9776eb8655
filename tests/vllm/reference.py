"""What the served logprobs must be: Hugging Face, float32, the whole sequence recomputed in one forward."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.vllm.server import Completion

# Largest |server - reference| seen: 4e-6 in float32 on CPU; a wrong model is off by 0.1 to 7.
TOLERANCE = 1e-4


class Reference:
    """A model in this process."""

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen3ForCausalLM

        self.folder = folder
        self.module = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def parameters(self) -> dict[str, torch.Tensor]:
        """Name -> tensor, as a trainer sends them: tied weights once."""
        return dict(self.module.named_parameters())

    @torch.no_grad()
    def logprobs(self, prompt: list[int], output: list[int], *, temperature: float) -> list[float]:
        """log_softmax(logits / temperature) of each output token, natural log: [num_output_tokens]."""
        logits = self.module(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        table = torch.log_softmax(logits / temperature, dim=-1)
        return table[torch.arange(len(output)), torch.tensor(output)].tolist()

    @torch.no_grad()
    def logprobs_over_cache_of(
        self, older: Reference, prompt: list[int], output: list[int], *, num_older: int, temperature: float
    ) -> list[float]:
        """Of output[num_older:], when keys and values of all before output[num_older - 1] are those of `older`, and this model
        goes on from there without recomputing them: [num_output_tokens - num_older]."""
        from transformers import DynamicCache

        cache = DynamicCache()
        sequence = prompt + output
        num_cached = len(prompt) + num_older - 1  # the newest token is fed to the model that goes on
        older.module(torch.tensor([sequence[:num_cached]]), past_key_values=cache, use_cache=True)
        logits = self.module(torch.tensor([sequence[num_cached:]]), past_key_values=cache).logits[0, :-1]
        table = torch.log_softmax(logits / temperature, dim=-1)
        return table[torch.arange(len(output) - num_older), torch.tensor(output[num_older:])].tolist()

    @torch.no_grad()
    def greedy(self, prompt: list[int], output: list[int]) -> list[int]:
        """The most probable token at each position of `output`."""
        logits = self.module(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        return [int(token) for token in logits.argmax(-1)]


def largest_difference(first: list[float], second: list[float]) -> float:
    assert len(first) == len(second), f"{len(first)} and {len(second)} logprobs"
    assert first, "nothing to compare"
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def assert_exact(model: Reference, prompt: list[int], completion: Completion, version: int) -> None:
    """Every token is of `version`, with the logprob that `model` has for it."""
    assert set(completion.versions) == {version}
    expected = model.logprobs(prompt, completion.token_ids, temperature=1.0)
    assert largest_difference(completion.logprobs, expected) < TOLERANCE
