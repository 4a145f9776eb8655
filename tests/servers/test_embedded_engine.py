"""The slot engine: exact logprobs, seeds, stops and slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.errors import ConfigError
from grpo_async.inference.api import GenerateRequest
from grpo_async.servers.embedded.engine import RunningSequence, SlotEngine, check_against_model
from grpo_async.servers.requests import TokenStream
from tests.servers.embedded_support import Output, load, make_request, prompt, worst_error


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return load(tiny_model)


def _engine(model: Any, num_slots: int = 8) -> SlotEngine:
    return SlotEngine(model, num_slots=num_slots, max_model_len=256)


def _generate(engine: SlotEngine, *requests: GenerateRequest) -> list[Output]:
    """Step until every request is over."""
    sequences = [RunningSequence(request, eos_ids=engine.eos_ids, stream=TokenStream()) for request in requests]
    outputs = {id(sequence): Output() for sequence in sequences}
    for sequence in sequences:
        engine.add(sequence)
    while engine.num_active:
        engine.step()
        for sequence, output in engine.take_outputs():
            outputs[id(sequence)].add(output, engine.policy_version)
    return list(outputs.values())


def test_generation_ends_at_eos_at_a_stop_token_and_at_the_limit(model: Any) -> None:
    engine = _engine(model)

    def run(**fields: Any) -> tuple[list[int], str | None]:
        [output] = _generate(engine, make_request(prompt(5), seed=2, **{"max_tokens": 12, **fields}))
        return output.token_ids, output.finish_reason

    free, reason = run()
    third = free[2]
    assert (third in free[:2], reason) == (False, "length")
    assert run(stop_token_ids=[third]) == (free[:3], "stop")
    # a stop token as the very last allowed token is a stop, not a cut
    assert run(stop_token_ids=[third], max_tokens=3) == (free[:3], "stop")
    engine.eos_ids = (third,)
    assert run(ignore_eos=False) == (free[:3], "stop")
    assert run(ignore_eos=True) == (free, "length")


def test_the_self_check_accepts_a_served_architecture_and_refuses_one_that_differs(tiny_model: Path) -> None:
    model = load(tiny_model)
    engine = _engine(model)
    check_against_model(engine, model)
    assert engine.num_active == 0
    kind: Any = type(model)

    class ForgetsPositions(kind):
        def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            if position_ids is not None:
                position_ids = torch.zeros_like(position_ids)
            return super().forward(*args, position_ids=position_ids, **kwargs)

    model.__class__ = ForgetsPositions
    with pytest.raises(ConfigError, match="not served correctly"):
        check_against_model(_engine(model), model)


def test_tokens_and_logprobs_are_exact_and_the_same_to_the_last_bit_alone_and_among_others(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a synchronous run needs to be bit-exact: arrival, slots and neighbors change nothing."""
    monkeypatch.setattr("grpo_async.servers.embedded.engine._PREFILL_TOKENS", 100)  # prompts are filled in pieces
    lengths = [1 + (i * 11) % 40 for i in range(39)] + [150]
    requests = [
        make_request(
            prompt(length, start=i // 3), seed=i, max_tokens=1 + (i * 7) % 40, temperature=(1.0, 0.7, 1.3, 0.0)[i % 4]
        )
        for i, length in enumerate(lengths)
    ]
    together = _generate(_engine(model, num_slots=40), *requests)
    for request, output in zip(requests, together, strict=True):
        assert (output.finish_reason, len(output.token_ids)) == ("length", request.max_tokens)
        assert worst_error(model, request, output) < 1e-5
    again = _generate(_engine(model, num_slots=3), *requests[::-1])[::-1]
    alone = [_generate(_engine(model), request)[0] for request in requests[:10]]
    for other in (again, alone):
        for one, two in zip(together, other, strict=False):
            assert (one.token_ids, one.logprobs) == (two.token_ids, two.logprobs)
