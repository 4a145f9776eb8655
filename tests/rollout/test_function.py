"""Rollout functions of the user: what they get, what they may return, and that no engine is needed for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from grpo_async.errors import DeadlineError, RolloutContractError
from grpo_async.records import Prompt, RolloutCompletion
from grpo_async.rollout.conversation import SamplingSettings
from grpo_async.rollout.function import FunctionLimits, FunctionProducer, checked_output, turn_borders
from grpo_async.rollout.function_trainer import FunctionArguments, FunctionTrainer
from grpo_async.rollout.producer import GroupRequest
from tests.rollout import trl_style_rollout_function
from tests.rollout.fakes import EOS, FakeRenderer, ScriptedClient, stop
from tests.support.records import make_prompt


class _Tokenizer:
    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1] * len(text)}


class _Renderer(FakeRenderer):
    tokenizer = _Tokenizer()


class _Client(ScriptedClient):
    async def generate(self, request: Any, **_: Any) -> Any:
        return await super().generate(request.model_copy(update={"request_id": "f-t0"}))


def _producer(function: Callable[..., Any], client: Any = None, **limits: Any) -> FunctionProducer:
    renderer: Any = _Renderer()
    trainer = FunctionTrainer(
        client,
        renderer,
        SamplingSettings(temperature=1.0, max_completion_tokens=8, max_model_len=50, stop_token_ids=[EOS]),
        arguments=FunctionArguments(num_generations=2, max_completion_length=8, temperature=1.0),
        max_steps=9,
        served_version=lambda: 7,
        timeout_s=5.0,
    )
    settings = {"repeat_prompts": True, "groups_per_call": 8, "max_concurrent_calls": 1, "timeout_s": 5.0}
    return FunctionProducer(
        function,
        trainer,
        limits=FunctionLimits(**{**settings, **limits}),  # type: ignore[arg-type]
        decode=renderer.completion_text,
        end_of_turn_ids=[EOS],
    )


def _make(producer: FunctionProducer, *prompts: Prompt, size: int = 2) -> list[Sequence[RolloutCompletion]]:
    async def one(prompt: Prompt) -> Sequence[RolloutCompletion]:
        request = GroupRequest(
            name=f"g{prompt.prompt_id}", prompt=prompt, size=size, seed=0, served_version=lambda: 7,
            on_tokens=lambda index, count, version: received.append((prompt.prompt_id, index, count, version)),
        )  # fmt: skip
        async with producer.produce(request) as produced:
            return produced.completions

    async def main() -> list[Sequence[RolloutCompletion]]:
        return await asyncio.gather(*(one(prompt) for prompt in prompts))

    received: list[tuple[int, int, int, int]] = []
    groups = asyncio.run(main())
    expected = [
        (prompt.prompt_id, index, completion.num_sampled_tokens, 7)
        for prompt, group in zip(prompts, groups, strict=True)
        for index, completion in enumerate(group)
    ]
    assert sorted(received) == sorted(expected)
    return groups


def test_groups_admitted_together_go_into_one_call_with_raw_prompts_of_their_own() -> None:
    """R4.1, R5.3: once per batch, raw untemplated deep-copied prompts; R5.1: no engine is involved."""
    trl_style_rollout_function.calls.clear()
    first, second = make_prompt(0, "ab"), make_prompt(1, "abc")
    groups = _make(_producer(trl_style_rollout_function.rollout_func), first, second)
    ((prompts, step),) = trl_style_rollout_function.calls
    assert [prompt[0] for prompt in prompts] == [
        {"role": "user", "content": text} for text in ("ab", "ab", "abc", "abc")
    ]
    assert step == 7  # the weights of step 7 are served: pushed before the call
    assert prompts[0] is not prompts[1]
    assert first.as_given() == [{"role": "user", "content": "ab"}]
    assert [[c.completion_ids for c in group] for group in groups] == [[[2, 2], [3, 2]], [[3, 2], [4, 2]]]
    assert [c.rollout_id for c in groups[1]] == ["g1-r0", "g1-r1"]
    assert groups[0][0].logprobs == [-0.25, -0.5]
    assert groups[0][0].versions == [7, 7]
    assert not groups[0][0].truncated


def test_extra_keys_reach_rewards_per_sample_and_scalars_are_for_all() -> None:
    """R4.3: list per item, scalar broadcast."""
    groups = _make(_producer(trl_style_rollout_function.rollout_func), make_prompt(0), make_prompt(1))
    columns = [completion.reward_columns for group in groups for completion in group]
    assert columns == [{"env_reward": float(index), "source": "games"} for index in range(4)]


def test_env_mask_becomes_the_loss_mask() -> None:
    """R4.3, R4.7: the tool loop is bypassed, tokens of the environment have mask 0 and logprob 0.0."""
    ((completion, _),) = _make(_producer(trl_style_rollout_function.masked_rollout_func), make_prompt())
    assert completion.completion_ids == [5, 6, 90, 91, 2]
    assert completion.completion_mask == [1, 1, 0, 0, 1]
    assert completion.logprobs == [-0.1, -0.2, 0.0, 0.0, -0.3]
    assert [message.content for message in completion.completion_messages()] == ["5 6 90 91 2"]


@pytest.mark.parametrize(
    "function",
    [trl_style_rollout_function.generating_rollout_func, trl_style_rollout_function.async_rollout_func],
    ids=["sync", "async"],
)
def test_a_function_may_generate_with_the_served_policy(function: Callable[..., Any]) -> None:
    client = _Client(stop(5, EOS))
    ((completion, _),) = _make(_producer(function, client), make_prompt(text="abc"))
    assert (completion.prompt_ids, completion.completion_ids) == ([1, 1, 1], [5, EOS])
    assert completion.logprobs == [-0.1, -0.1]
    assert len({request.seed for request in client.requests}) == 2


def test_a_completion_that_does_not_end_its_turn_is_truncated() -> None:
    def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        count = len(prompts)
        return {"prompt_ids": [[1]] * count, "completion_ids": [[5]] * count, "logprobs": [[-0.1]] * count}

    ((completion, _),) = _make(_producer(function), make_prompt())
    assert completion.truncated


def test_without_repetition_every_prompt_is_given_once() -> None:
    seen: list[int] = []

    def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        seen.append(len(prompts))
        count = len(prompts) * trainer.args.num_generations
        ids = [[index, 2] for index in range(count)]
        return {"prompt_ids": [[1]] * count, "completion_ids": ids, "logprobs": [[-0.1] * 2] * count}

    groups = _make(_producer(function, repeat_prompts=False), make_prompt(0), make_prompt(1))
    assert seen == [2]
    assert [[c.completion_ids[0] for c in group] for group in groups] == [[0, 1], [2, 3]]


def test_more_groups_than_fit_into_a_call_make_several() -> None:
    trl_style_rollout_function.calls.clear()
    producer = _producer(trl_style_rollout_function.rollout_func, groups_per_call=2)
    _make(producer, *(make_prompt(number) for number in range(5)))
    assert [len(prompts) for prompts, _ in trl_style_rollout_function.calls] == [4, 4, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"logprobs": None, "prompt_ids": None},
            r"rollout_func must return keys \['logprobs', 'prompt_ids'\] in its output dict\.",
        ),
        ({"completion_ids": [[5]]}, "completion_ids has 1 entries, expected 2"),
        ({"logprobs": [[-0.1], [-0.1, -0.2]]}, r"logprobs\[0\] has 1 entries for 2 completion_ids"),
        ({"logprobs": [[-0.1, None], [-0.1, -0.2]]}, r"logprobs\[0\]\[1\] is None"),
        ({"logprobs": [[-0.1, float("nan")], [-0.1, -0.2]]}, r"logprobs\[0\]\[1\] is nan"),
        ({"env_mask": [[1], [1, 1]]}, r"env_mask\[0\] has 1 entries for 2"),
        ({"prompt_ids": ["ab", [1]]}, r"prompt_ids\[0\] must be a list of token ids"),
    ],
)  # fmt: skip
def test_what_a_function_must_not_return(change: dict[str, Any], message: str) -> None:
    """R4.2, R5.4: wrong counts and missing keys raise a ValueError that names them."""
    good = {"prompt_ids": [[1], [1]], "completion_ids": [[5, 2], [6, 2]], "logprobs": [[-0.1, -0.2]] * 2}
    output = {key: value for key, value in {**good, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        checked_output(output, 2)


def test_a_broken_contract_reaches_whoever_waits_for_the_group() -> None:
    with pytest.raises(RolloutContractError, match="must return a dict, got list"):
        _make(_producer(lambda prompts, trainer: []), make_prompt())


def test_an_exception_of_the_function_is_that_calls() -> None:
    def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        raise ZeroDivisionError("in the function")

    with pytest.raises(ZeroDivisionError):
        _make(_producer(function), make_prompt())


def test_a_function_that_hangs_is_given_up_and_the_setting_named() -> None:
    import threading

    release = threading.Event()

    def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        release.wait(30.0)
        return {}

    try:
        with pytest.raises(DeadlineError, match=r"rollout_function\.timeout_s"):
            _make(_producer(function, timeout_s=0.1), make_prompt())
    finally:
        release.set()


def test_logprobs_may_come_as_lists_of_the_most_likely_tokens() -> None:
    """TRL's form: logprobs [position][k] with logprob_token_ids of the same shape."""
    output = {
        "prompt_ids": [[1]], "completion_ids": [[5, 2]],
        "logprobs": [[[-0.9, -0.1], [-0.2, -0.8]]], "logprob_token_ids": [[[7, 5], [2, 9]]],
    }  # fmt: skip
    (row,) = checked_output(output, 1)
    assert row["logprobs"] == [-0.1, -0.2]
    assert row["extra"] == {}


def test_turns_are_cut_where_the_mask_changes() -> None:
    assert turn_borders([1, 1, 0, 1]) == [(0, 2, 3), (3, 4, 4)]
    assert turn_borders([0, 1]) == [(0, 0, 1), (1, 2, 2)]
    assert turn_borders([]) == []


def test_generating_on_the_event_loop_is_refused_in_words() -> None:
    async def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return trainer.generate(prompts)  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match=r"await trainer\.agenerate"):
        _make(_producer(function, _Client(stop(5, EOS))), make_prompt())
