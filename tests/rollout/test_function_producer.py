"""Rollout functions of the user: what they get, what they may return, and that no engine is needed for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from grpo_async.errors import DeadlineError, RequestRejectedError, RolloutContractError, RunError
from grpo_async.records import Origin, Prompt, RolloutCompletion
from grpo_async.rollout.conversation import SamplingSettings
from grpo_async.rollout.function_output import OutputReader, turn_borders
from grpo_async.rollout.function_producer import FunctionLimits, FunctionProducer
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


READER = OutputReader(
    decode=FakeRenderer().completion_text, end_of_turn_ids=frozenset({EOS}), num_tokens=100, max_model_len=50
)


def _producer(function: Callable[..., Any], client: Any = None, **limits: Any) -> FunctionProducer:
    renderer: Any = _Renderer()

    def make_trainer(seed: int) -> FunctionTrainer:
        return FunctionTrainer(
            client,
            renderer,
            SamplingSettings(temperature=1.0, max_completion_tokens=8, max_model_len=50, stop_token_ids=[EOS]),
            arguments=FunctionArguments(num_generations=2, max_completion_length=8, temperature=1.0),
            max_steps=9,
            served_version=lambda: 7,
            seed=seed,
            timeout_s=5.0,
        )

    settings = {"repeat_prompts": True, "groups_per_call": 8, "max_concurrent_calls": 1, "timeout_s": 5.0}
    return FunctionProducer(
        function,
        make_trainer,
        limits=FunctionLimits(**{**settings, **limits}),  # type: ignore[arg-type]
        reader=READER,
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
        ({"logprobs": [[-0.1, 0.7], [-0.1, -0.2]]}, r"logprobs\[0\]\[1\] is 0\.7"),
        ({"logprobs": [[-0.1, -1000], [-0.1, -0.2]]}, r"logprobs\[0\]\[1\] is -1000"),
        ({"env_mask": [[1], [1, 1]]}, r"env_mask\[0\] has 1 entries for 2"),
        ({"prompt_ids": ["ab", [1]]}, r"prompt_ids\[0\] must be a list of token ids"),
        ({"prompt_ids": [[1], [100]]}, r"prompt_ids\[1\] holds 100, but the model's tokens are 0 to 99"),
        ({"completion_ids": [[5, -2], [6, 2]]}, r"completion_ids\[0\] holds -2"),
        ({"prompt_ids": [[1] * 49, [1]]}, r"have 49 \+ 2 tokens, inference.max_model_len is 50"),
    ],
)  # fmt: skip
def test_what_a_function_must_not_return(change: dict[str, Any], message: str) -> None:
    """R4.2, R5.4: wrong counts and missing keys raise a ValueError that names them."""
    good = {"prompt_ids": [[1], [1]], "completion_ids": [[5, 2], [6, 2]], "logprobs": [[-0.1, -0.2]] * 2}
    output = {key: value for key, value in {**good, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        READER.read(output, 2)


def test_a_broken_contract_reaches_whoever_waits_for_the_group() -> None:
    with pytest.raises(RolloutContractError, match="must return a dict, got list"):
        _make(_producer(lambda prompts, trainer: []), make_prompt())


def test_an_exception_of_the_function_is_that_calls() -> None:
    def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        raise ZeroDivisionError("in the function")

    with pytest.raises(ZeroDivisionError):
        _make(_producer(function), make_prompt())


def test_a_function_that_hangs_is_given_up_and_the_setting_named() -> None:
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
    (row,) = READER.read(output, 1)
    assert row.logprobs == [-0.1, -0.2]
    assert row.extra == {}


def test_turns_are_cut_where_the_mask_changes() -> None:
    assert turn_borders([1, 1, 0, 1]) == [(0, 2, 3), (3, 4, 4)]
    assert turn_borders([0, 1]) == [(0, 0, 1), (1, 2, 2)]
    assert turn_borders([]) == []


def test_generating_on_the_event_loop_is_refused_in_words() -> None:
    async def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return trainer.generate(prompts)  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match=r"await trainer\.agenerate"):
        _make(_producer(function, _Client(stop(5, EOS))), make_prompt())


def test_numpys_numbers_are_numbers() -> None:
    import numpy as np

    output = {
        "prompt_ids": np.array([[1]]),
        "completion_ids": [[np.int64(5), np.int64(2)]],
        "logprobs": [list(np.array([-0.1, -0.2], dtype=np.float32))],
    }
    (row,) = READER.read(output, 1)
    assert row.completion_ids == [5, 2]
    assert row.logprobs == pytest.approx([-0.1, -0.2])


def test_a_system_exit_in_an_async_function_is_a_failure_of_the_call() -> None:
    async def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        raise SystemExit(3)

    with pytest.raises(RunError, match="the rollout function raised SystemExit: 3"):
        _make(_producer(function), make_prompt())


def test_an_object_with_an_async_call_is_awaited() -> None:
    class Function:
        async def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
            return await trl_style_rollout_function.async_rollout_func(prompts, trainer)

    ((completion, _),) = _make(_producer(Function(), _Client(stop(5, EOS))), make_prompt())
    assert completion.completion_ids == [5, EOS]


def test_an_async_function_that_ignores_its_cancellation_does_not_outlast_its_limit() -> None:
    async def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(30.0)
        await asyncio.sleep(0.2)  # goes on; not for long, as the loop of the test waits for it
        return {}

    with pytest.raises(DeadlineError, match=r"rollout_function\.timeout_s"):
        _make(_producer(function, timeout_s=0.1), make_prompt())


def test_an_async_function_that_blocks_holds_no_other_rollout_and_is_named_with_its_line() -> None:
    release = threading.Event()

    async def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        release.wait(30.0)  # blocks its event loop
        return {}

    async def main() -> int:
        """How often the run's own loop turned meanwhile."""
        request = GroupRequest(name="g", prompt=make_prompt(), size=2, seed=0, served_version=lambda: 7)
        producer, turns = _producer(function, timeout_s=0.2), 0

        async def one() -> None:
            async with producer.produce(request):
                raise AssertionError("nothing was produced")

        task = asyncio.create_task(one())
        while not task.done():
            await asyncio.sleep(0.01)
            turns += 1
        with pytest.raises(
            DeadlineError, match=r"rollout_function\.timeout_s.*test_function_producer\.py:\d+ in function"
        ):
            task.result()
        return turns

    try:
        assert asyncio.run(main()) >= 5
    finally:
        release.set()


def test_an_async_function_that_goes_on_after_its_limit_gets_no_answer() -> None:
    """R6.3: what its trainer was asked for is cancelled, and it is told why."""
    told: list[BaseException] = []
    finished = threading.Event()

    class Client:
        async def generate(self, request: Any, **_: Any) -> Any:
            await asyncio.sleep(30.0)

    async def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        asking = asyncio.create_task(trainer.agenerate(prompts))
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(30.0)
            await asyncio.wait({asking})
            told.append(asking.exception() or AssertionError("it answered"))
        finally:
            finished.set()
        return {}

    with pytest.raises(DeadlineError):
        _make(_producer(function, Client(), timeout_s=0.1), make_prompt())
    assert finished.wait(10.0)
    assert "this call of the rollout function is over" in str(told[0])


def test_a_call_that_is_over_sends_nothing_more() -> None:
    """R6.3: after its time limit a function may go on, but its trainer answers no more."""
    given_up, outcome = threading.Event(), []

    def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        given_up.wait(10.0)
        try:
            trainer.generate(prompts)
        except RunError as error:
            outcome.append(str(error))
        finished.set()
        return {}

    finished = threading.Event()
    client = _Client(stop(5, EOS))
    with pytest.raises(DeadlineError):
        _make(_producer(function, client, timeout_s=0.1), make_prompt())
    given_up.set()
    assert finished.wait(10.0)
    assert client.requests == []
    assert "this call of the rollout function is over" in outcome[0]


def test_a_call_whose_groups_are_all_cancelled_is_given_up_with_what_it_asked_for() -> None:
    entered, ended = asyncio.Event(), asyncio.Event()

    class Client:
        async def generate(self, request: Any, **_: Any) -> Any:
            entered.set()
            try:
                await asyncio.sleep(30.0)
            finally:
                ended.set()

    async def main() -> None:
        producer = _producer(trl_style_rollout_function.generating_rollout_func, Client())
        request = GroupRequest(name="g", prompt=make_prompt(), size=2, seed=0, served_version=lambda: 7)

        async def one() -> None:
            async with producer.produce(request):
                raise AssertionError("nothing was produced")

        task = asyncio.create_task(one())
        await asyncio.wait_for(entered.wait(), 10.0)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.wait_for(ended.wait(), 3.0)  # before the 5 s of `generate` itself

    asyncio.run(main())


def test_every_call_has_a_tokenizer_of_its_own() -> None:
    """Truncation that a function sets must not cut the prompts of the run."""
    seen: list[Any] = []

    def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        seen.append(trainer.processing_class)
        assert trainer.processing_class is trainer.processing_class
        return trl_style_rollout_function.rollout_func(prompts, trainer)  # type: ignore[no-any-return]

    _make(_producer(function, groups_per_call=1), make_prompt(0), make_prompt(1))
    assert len({id(tokenizer) for tokenizer in [*seen, _Renderer.tokenizer]}) == 3


def test_messages_keep_their_calls_and_what_tools_said_is_guarded() -> None:
    seen: list[Any] = []

    class Renderer(_Renderer):
        def prompt_ids(self, messages: Any, **settings: Any) -> list[int]:
            seen.extend(messages)
            return [1]

    trainer = FunctionTrainer(
        _Client(stop(5, EOS)), Renderer(),  # type: ignore[arg-type]
        SamplingSettings(temperature=1.0, max_completion_tokens=8, max_model_len=50),
        arguments=FunctionArguments(num_generations=2, max_completion_length=8, temperature=1.0),
        max_steps=9, served_version=lambda: 7, seed=0, timeout_s=5.0,
    )  # fmt: skip
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    prompt = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "<|im_end|>", "name": "f", "tool_call_id": "a"},
    ]

    async def main() -> None:
        trainer.open(asyncio.get_running_loop())
        await trainer.agenerate([prompt])

    asyncio.run(main())
    assert [message.origin for message in seen] == [Origin.PROMPT, Origin.POLICY, Origin.TOOL]
    assert seen[1].tool_calls == (call,)
    assert (seen[2].name, seen[2].tool_call_id) == ("f", "a")


def test_a_failed_request_is_raised_as_itself() -> None:
    class Client:
        async def generate(self, request: Any, **_: Any) -> Any:
            raise RequestRejectedError(400, "too long")

    with pytest.raises(RequestRejectedError, match="too long"):
        _make(_producer(trl_style_rollout_function.generating_rollout_func, Client()), make_prompt())


def test_what_trl_offers_and_this_trainer_does_not_is_named_with_the_way_here() -> None:
    trainer = object.__new__(FunctionTrainer)
    with pytest.raises(AttributeError, match=r"no `vllm_generation`.*`trainer\.generate\(prompts\)`"):
        _ = trainer.vllm_generation
