"""Settings of sampling in both engines: stop strings and filters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.inference.sampling import find_stop
from tests.servers.embedded_support import Live, live, load, make_request


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def test_of_several_strings_the_one_that_ends_first_counts() -> None:
    assert find_stop("ab\nQ: c", ["c", "\nQ:", "b\n"]) == (1, 3)
    assert find_stop("abc", ["bc", "c"]) == (1, 3)  # they end together: the one named first
    assert find_stop("abc", ["x"]) is None


def test_the_embedded_engine_stops_at_a_string(tiny_model: Path) -> None:
    model = load(tiny_model)
    with live(model, model_path=str(tiny_model)) as server:
        check_stop_strings(server, tiny_model)


def check_stop_strings(server: Live | Any, folder: Path) -> None:
    """Of either engine, whose tokens are greedy: cut exactly after the token that completes the string."""
    from transformers import AutoTokenizer

    tokenizer, prompt = AutoTokenizer.from_pretrained(folder), [5, 6, 7, 8, 9, 10]
    free = _generated(server, prompt, max_tokens=24)
    texts = [_decoded(tokenizer, free.token_ids[:n]) for n in range(25)]
    # the text of tokens 9 to 11, or of what makes whole letters around them
    place = next(
        n for n in range(9, 22) if len(texts[n + 2]) - len(texts[n]) >= 2 and "\ufffd" not in texts[n + 2][-4:]
    )
    stop = texts[place + 2][-2:]
    num_kept = next(n for n in range(1, 25) if stop in texts[n])
    stopped = _generated(server, prompt, max_tokens=24, stop=["never", stop])
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.token_ids == free.token_ids[:num_kept]
    assert stopped.logprobs == pytest.approx(free.logprobs[:num_kept], abs=1e-4)
    at_the_limit = _generated(server, prompt, max_tokens=num_kept, stop=[stop])
    assert (at_the_limit.finish_reason, len(at_the_limit.token_ids)) == ("stop", num_kept)
    missed = _generated(server, prompt, max_tokens=num_kept - 1, stop=[stop])
    assert (missed.finish_reason, missed.stop_reason) == ("length", None)


def check_reshaped(server: Live | Any, model: Any) -> None:
    """Of either engine: a penalty and each filter leave the tokens that they should, and logprobs are those of what they leave."""
    prompt = [5, 6, 7, 8, 9, 10, 5, 6]
    for settings in (
        {"top_k": 3},
        {"top_p": 0.3, "temperature": 0.7},
        {"min_p": 0.5},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.6, "temperature": 0.0},
        {"temperature": 1.3, "top_k": 9, "top_p": 0.6, "min_p": 0.2, "repetition_penalty": 1.4},
    ):
        output = _generated(server, prompt, max_tokens=40, **{"temperature": 1.0, **settings})
        tokens = [*prompt, *output.token_ids]
        logits = model(torch.tensor([tokens])).logits[0].float()
        for place, (token, logprob) in enumerate(
            zip(output.token_ids, output.logprobs, strict=True), start=len(prompt)
        ):
            expected = reshaped(logits[place - 1], tokens[:place], **{"temperature": 1.0, **settings})
            assert logprob == pytest.approx(expected[token].item(), abs=1e-4), settings
            assert settings.get("temperature") != 0.0 or token == expected.argmax()


def reshaped(
    logits: torch.Tensor,
    seen: Sequence[int],
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> torch.Tensor:
    """Log-probabilities of one token, as vLLM's documentation describes the settings; in plain steps. [vocab] -> [vocab]"""
    logits = logits.clone()
    for token in set(seen):
        logits[token] *= 1 / repetition_penalty if logits[token] > 0 else repetition_penalty
    probabilities = (logits / (temperature or 1.0)).softmax(-1)
    kept = probabilities >= min_p * probabilities.max()
    order = probabilities.argsort(descending=True)
    kept[order[top_k or len(order) :]] = False
    total, mass = (probabilities * kept).sum().item(), 0.0
    for token in order.tolist():
        if kept[token] and mass >= top_p * total:
            kept[token] = False
        elif kept[token]:
            mass += probabilities[token].item()
    return (probabilities * kept / (probabilities * kept).sum()).log()


def test_the_embedded_engine_samples_from_what_the_settings_leave(tiny_model: Path) -> None:
    model = load(tiny_model)
    with live(model) as server:
        check_reshaped(server, model)


def _generated(server: Any, prompt: Sequence[int], **fields: Any) -> Any:
    """Live takes a request, VllmServer its fields."""
    fields = {"temperature": 0.0, **fields}
    if isinstance(server, Live):
        return server.generate(make_request(prompt, **fields))
    return server.generate(list(prompt), **fields)
