"""Rollout functions of the user: what they get, what they may return, and that no engine is needed for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from grpo_async.config.sections import RolloutFunctionSection
from grpo_async.errors import DeadlineError, FatalRolloutError, RequestRejectedError, RunError
from grpo_async.inference.sampling import SamplingSettings
from grpo_async.records import Prompt, RolloutCompletion
from grpo_async.rollout.function_producer import FunctionProducer, read_output, turn_boundaries
from grpo_async.rollout.function_trainer import FunctionSetup
from tests.rollout import trl_style_rollout_function as trl_style
from tests.rollout.fakes import EOS, FakeClient, FakeRenderer, ScriptedClient, open_group, stop
from tests.support.records import make_prompt


class _Tokenizer:
    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1] * len(text)}

    def __len__(self) -> int:
        return 100


class _Renderer(FakeRenderer):
    tokenizer = _Tokenizer()


class _Client(ScriptedClient):
    async def generate(self, request: Any, **_: Any) -> Any:
        return await super().generate(request.model_copy(update={"request_id": "f-t0"}))


SETTINGS = SamplingSettings(
    temperature=1.0, max_completion_tokens=8, max_model_len=50, stop_token_ids=[EOS], stop=["9 9"]
)


def _setup(client: Any = None, *, groups_per_call: int = 8, timeout_s: float = 5.0) -> FunctionSetup:
    renderer: Any = _Renderer()
    return FunctionSetup(
        client=client,
        renderer=renderer,
        settings=SETTINGS,
        section=RolloutFunctionSection(function="mine:rollout_func", timeout_s=timeout_s),
        num_generations=2,
        groups_per_call=groups_per_call,
        max_steps=9,
    )


def _producer(function: Callable[..., Any], client: Any = None, **settings: Any) -> FunctionProducer:
    return FunctionProducer(function, _setup(client, **settings))


async def _produce(producer: FunctionProducer, prompt: Prompt) -> Sequence[RolloutCompletion]:
    versions: set[int] = set()
    group = open_group(
        prompt, name=f"g{prompt.prompt_id}", version=7, on_tokens=lambda count, version: versions.add(version)
    )
    async with producer.produce(group):
        assert versions == {7}
        assert group.num_tokens == {index: each.num_sampled_tokens for index, each in enumerate(group.completions)}
        return group.completions


def _make(producer: FunctionProducer, *prompts: Prompt) -> list[Sequence[RolloutCompletion]]:
    async def main() -> list[Sequence[RolloutCompletion]]:
        return await asyncio.gather(*(_produce(producer, prompt) for prompt in prompts))

    return asyncio.run(main())


def _output(count: int, **columns: Any) -> dict[str, Any]:
    """What a function may return, of two tokens each."""
    ids = [[5 + index, EOS] for index in range(count)]
    return {"prompt_ids": [[1]] * count, "completion_ids": ids, "logprobs": [[-0.1, -0.2]] * count, **columns}


# ---- what it gets, and what becomes of what it returns ----


def test_groups_admitted_together_go_into_one_call_with_raw_prompts_of_their_own() -> None:
    """R4.1, R5.3: once per batch, raw untemplated deep-copied prompts; R5.1: no engine is involved.

    R4.3: extra keys reach the rewards, a list per sample, a scalar for all."""
    trl_style.calls.clear()
    first, second = make_prompt(0, "ab"), make_prompt(1, "abc")
    groups = _make(_producer(trl_style.rollout_func, groups_per_call=2), first, second, make_prompt(2))[:2]
    (others, _), (prompts, step) = sorted(trl_style.calls, key=lambda call: len(call[0]))
    assert len(others) == 2  # the third did not fit
    assert [prompt[0] for prompt in prompts] == [
        {"role": "user", "content": text} for text in ("ab", "ab", "abc", "abc")
    ]
    assert step == 7  # the weights of step 7 are served: pushed before the call
    assert prompts[0] is not prompts[1]
    assert first.as_given() == [{"role": "user", "content": "ab"}]
    assert [[c.completion_ids.tolist() for c in group] for group in groups] == [[[2, 2], [3, 2]], [[3, 2], [4, 2]]]
    assert [c.rollout_id for c in groups[1]] == ["g1-r0", "g1-r1"]
    first = groups[0][0]
    assert (first.logprobs.tolist(), first.policy_versions.tolist(), first.truncated) == ([-0.25, -0.5], [7, 7], False)
    columns = [completion.reward_columns for group in groups for completion in group]
    assert columns == [{"env_reward": float(index), "source": "games"} for index in range(4)]


def test_env_mask_becomes_the_loss_mask() -> None:
    """R4.3, R4.7: the tool loop is bypassed, tokens of the environment have mask 0 and logprob 0.0."""
    ((completion, _),) = _make(_producer(trl_style.masked_rollout_func), make_prompt())
    assert completion.completion_ids.tolist() == [5, 6, 90, 91, 2]
    assert completion.completion_mask.tolist() == [1, 1, 0, 0, 1]
    assert completion.logprobs.tolist() == pytest.approx([-0.1, -0.2, 0.0, 0.0, -0.3])
    assert [message.content for message in completion.completion_messages()] == ["5 6 90 91 2"]
    assert turn_boundaries([1, 1, 0, 1]) == [(0, 2, 3), (3, 4, 4)]
    assert turn_boundaries([0, 1]) == [(0, 0, 1), (1, 2, 2)]
    assert turn_boundaries([]) == []


def test_a_function_may_generate_with_the_served_policy() -> None:
    client = _Client(stop(5, EOS))
    ((completion, _),) = _make(_producer(trl_style.generating_rollout_func, client), make_prompt(text="abc"))
    assert (completion.prompt_ids.tolist(), completion.completion_ids.tolist()) == ([1, 1, 1], [5, EOS])
    assert completion.logprobs.tolist() == pytest.approx([-0.1, -0.1])
    assert len({request.seed for request in client.requests}) == 2


def test_a_stop_string_ends_the_text_of_the_last_sampled_turn_only() -> None:
    """`9 9` is a stop string: it ends each turn of a function that samples several."""

    def read(ids: list[int], mask: list[int]) -> tuple[str, bool]:
        output = {"prompt_ids": [[1]], "completion_ids": [ids], "logprobs": [[-0.1] * len(ids)], "env_mask": [mask]}
        (completion,) = _read(output, 1)
        [message] = completion.completion_messages()
        return message.content, completion.truncated

    assert read([5, 9, 9], [1, 1, 1]) == ("5 ", False)
    assert read([5, 9, 9, 70, 6], [1, 1, 1, 0, 1]) == ("5 9 9 70 6", True)
    assert read([5, 9, 9, 70, 6, 9, 9], [1, 1, 1, 0, 1, 1, 1]) == ("5 9 9 70 6 ", False)
    assert read([5, 9, 9, 70], [1, 1, 1, 0]) == ("5 9 9 70", False)
    assert read([5, 70, 9, 9, 6], [1, 0, 0, 0, 1]) == ("5 70 9 9 6", True)  # not sampled


def _read(output: Any, count: int) -> list[RolloutCompletion]:
    return read_output(output, [f"r{index}" for index in range(count)], _setup(), version=7, started_at=0.0)


# ---- what it must not return, and the forms that are taken ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"logprobs": None, "prompt_ids": None},
            r"rollout_func must return keys \['logprobs', 'prompt_ids'\] in its output dict\.",
        ),
        ({"logprobs": [[-0.1, None], [-0.1, -0.2]]}, r"rollout 0 of 2: logprobs\[1\] is None"),
        ({"env_mask": [[1], [1, 1]]}, "env_mask must be .* 2 completion_ids; it is 1 entries"),
        ({"prompt_ids": [[1], [100]]}, "rollout 1 of 2: prompt_ids has ids from 100 to 100"),
        ({"prompt_ids": [[1] * 49, [1]]}, r"have 49 \+ 2 tokens, inference.max_model_len is 50"),
    ],
)  # fmt: skip
def test_what_a_function_must_not_return(change: dict[str, Any], message: str) -> None:
    """R4.2, R5.4: wrong counts and missing keys raise a ValueError that names them."""
    output = {key: value for key, value in _output(2, **change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        _read(output, 2)


def test_optional_lists_may_be_none_numbers_numpys_and_logprobs_those_of_the_most_likely_tokens() -> None:
    """TRL's forms; the last is logprobs [position][k] with logprob_token_ids of the same shape."""
    numpys = {
        "prompt_ids": np.array([[1]]),
        "completion_ids": [[np.int64(5), np.int64(2)]],
        "logprobs": [list(np.array([-0.1, -0.2], np.float32))],
    }
    likely = {"logprobs": [[[-0.9, -0.1], [-0.2, -0.8]]], "logprob_token_ids": [[[7, 5], [2, 9]]]}
    for columns in ({"env_mask": None, "logprob_token_ids": None}, numpys, likely):
        (completion,) = _read(_output(1, **columns), 1)
        assert (completion.completion_ids.tolist(), completion.completion_mask.tolist()) == ([5, 2], [1, 1])
        assert completion.logprobs.tolist() == pytest.approx([-0.1, -0.2])
        assert completion.reward_columns == {}


# ---- calls that fail, hang, or go on after their end ----


def _returns_a_list(prompts: list[Any], trainer: Any) -> Any:
    return []


def _divides_by_zero(prompts: list[Any], trainer: Any) -> Any:
    return 1 / 0


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (_returns_a_list, FatalRolloutError, "must return a dict, got list"),
        (_divides_by_zero, ZeroDivisionError, "division"),
        (trl_style.generating_rollout_func, RequestRejectedError, "too long"),
    ],
)
def test_a_failure_reaches_whoever_waits_for_the_group_as_itself(
    function: Callable[..., Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _make(_producer(function, FakeClient(lambda request: RequestRejectedError(400, "too long"))), make_prompt())


def test_a_call_past_its_time_limit_fails_and_sends_nothing_more() -> None:
    given_up, finished = threading.Event(), threading.Event()

    def goes_on(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        given_up.wait(10.0)
        with pytest.raises(RunError, match="this call of the rollout function is over"):
            trainer.generate(prompts)
        finished.set()
        return {}

    client = _Client(stop(5, EOS))
    with pytest.raises(DeadlineError):
        _make(_producer(goes_on, client, timeout_s=0.1), make_prompt())
    given_up.set()
    assert finished.wait(10.0)
    assert client.requests == []
