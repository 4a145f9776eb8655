"""Compares the engine with a plain forward of its model before anything is served.

The engine hands the model its own cache, mask and positions. An architecture that uses them in an unusual way could answer
plausible nonsense; this shows it at start, and it warms the code paths up for the first request.
"""

from __future__ import annotations

from typing import Any

import torch

from grpo_async.errors import ConfigError
from grpo_async.inference.surface import GenerateChunk, GenerateRequest
from grpo_async.servers.embedded.engine import SlotEngine
from grpo_async.servers.embedded.sequence import RunningSequence

_PROMPT_LENGTHS = (2, 5)  # ragged, so that padding matters
_NUM_TOKENS = 2
_TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.5, torch.float16: 0.2}  # nats; rounding stays far below


@torch.inference_mode()
def check_against_model(engine: SlotEngine, model: Any) -> None:
    """Generate greedily and compare logprobs with teacher-forced ones. Leaves the engine as it was.

    Raises:
        ConfigError: the model does not work with this engine.
    """
    lengths = [length for length in _PROMPT_LENGTHS if length + _NUM_TOKENS <= engine.max_model_len]
    sequences = []
    for length in lengths:
        request = GenerateRequest(
            request_id="self-check",
            token_ids=[(7 * i + length) % engine.vocab_size for i in range(length)],
            max_tokens=_NUM_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            flush_interval_s=3600.0,  # one chunk per sequence
        )
        sequences.append(RunningSequence(request, eos_ids=(), sink=lambda _: None))
        engine.add(sequences[-1])
    try:
        while engine.num_active:
            engine.step()
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, IndexError) as error:
        raise ConfigError(
            f"model.path: {model.config.model_type} does not run on the embedded engine ({error}); "
            "use `inference.engine: vllm`"
        ) from error
    engine.num_generated_tokens = 0
    errors = [_error_of(chunk, sequence, model) for sequence, chunk in engine.drain()]
    if not all(error <= _TOLERANCE[model.dtype] for error in errors):  # NaN fails this too
        raise ConfigError(
            f"model.path: logprobs of the embedded engine and of a plain forward of {model.config.model_type} differ by "
            f"{errors} nats, so this architecture is not served right; use `inference.engine: vllm`"
        )


def _error_of(chunk: GenerateChunk, sequence: RunningSequence, model: Any) -> float:
    if chunk.error is not None:
        return float("nan")
    tokens = torch.tensor([sequence.tokens], device=model.device)
    logprobs = model(tokens[:, :-1]).logits[0].float().log_softmax(-1)  # [length - 1, vocab]
    expected = logprobs.gather(1, tokens[0, 1:, None])[-len(chunk.logprobs) :, 0]
    return float((expected.cpu() - torch.tensor(chunk.logprobs)).abs().max())
