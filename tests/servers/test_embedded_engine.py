"""The slot engine: exact logprobs, seeds, stops, slots, and new weights between two tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.errors import ConfigError
from grpo_async.servers.embedded.engine import SlotEngine, check_against_model
from tests.servers.embedded_support import (
    finish,
    generate,
    load,
    make_request,
    prompt,
    step,
    submit,
    worst_error,
)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    """Read only: tests that change weights load their own."""
    return load(tiny_model)


def _engine(model: Any, num_slots: int = 8) -> SlotEngine:
    return SlotEngine(model, num_slots=num_slots, max_model_len=256)


def test_a_group_shares_its_prompt_and_each_completion_is_exact(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(model, num_slots=16)
    prefills: list[tuple[int, int]] = []
    forward = model.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[1] > 1:
            prefills.append(tuple(kwargs["input_ids"].shape))
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", counting)
    requests = [make_request(prompt(30), seed=i, max_tokens=5 + i) for i in range(11)]
    outputs = generate(engine, *requests[:8])
    late = [submit(engine, request) for request in requests[8:10]]
    step(engine, 3)
    late.append(submit(engine, requests[10]))  # while the others run
    finish(engine)
    monkeypatch.undo()
    # 29, rounded up: one for the group, then one for both late ones and none for the third
    assert prefills == [(1, 32), (1, 32)]
    for request, output in zip(requests, [*outputs, *(sequence.output for sequence in late)], strict=True):
        assert worst_error(model, request, output) < 1e-5


def test_generation_ends_at_eos_at_a_stop_token_and_at_the_limit(model: Any) -> None:
    engine = _engine(model)

    def run(**fields: Any) -> tuple[list[int], str | None]:
        [output] = generate(engine, make_request(prompt(5), seed=2, **{"max_tokens": 12, **fields}))
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


def test_weights_that_are_not_finite_fail_the_requests_and_good_ones_repair_the_engine(tiny_model: Path) -> None:
    model = load(tiny_model)
    engine = _engine(model)
    good = {name: tensor.clone() for name, tensor in engine.parameters().items()}
    running = submit(engine, make_request(prompt(6), max_tokens=50)).output
    step(engine, 3)
    engine.load_weights((name, torch.full_like(tensor, torch.nan)) for name, tensor in good.items())
    engine.finish_update(policy_version=1)
    step(engine)
    assert "not finite" in str(running.error)
    assert (len(running.token_ids), engine.num_active) == (3, 0)
    engine.load_weights(good.items())
    engine.finish_update(policy_version=2, keep_cache=True)
    # The one-token prompt gets the poisoned slot without a prefill that would overwrite it; the long one makes the step
    # look at positions beyond the short one's end.
    requests = [make_request(prompt(1), max_tokens=3), make_request(prompt(14), max_tokens=3)]
    for request, output in zip(requests, generate(engine, *requests), strict=True):
        assert worst_error(model, request, output) < 1e-5


def test_the_self_check_accepts_a_served_architecture_and_refuses_one_that_differs_or_raises(tiny_model: Path) -> None:
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

    class Raises(kind):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyError("no such cache")

    for broken, words in (
        (ForgetsPositions, "not served correctly"),
        (Raises, "no such cache.*inference.engine: vllm"),
    ):
        model.__class__ = broken
        with pytest.raises(ConfigError, match=words):
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
    together = generate(_engine(model, num_slots=40), *requests)
    for request, output in zip(requests, together, strict=True):
        assert (output.finish_reason, len(output.token_ids)) == ("length", request.max_tokens)
        assert worst_error(model, request, output) < 1e-5
    again = generate(_engine(model, num_slots=3), *requests[::-1])[::-1]
    alone = [generate(_engine(model), request)[0] for request in requests[:10]]
    for other in (again, alone):
        for one, two in zip(together, other, strict=False):
            assert (one.token_ids, one.logprobs) == (two.token_ids, two.logprobs)
