"""Groups of conversations with tools and environments: who gets which instance, and that all of it comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grpo_async.buffer.group import OpenGroup
from grpo_async.config.sections import EnvironmentSection
from grpo_async.envs import Environments, load_environments
from grpo_async.inference.sampling import SamplingSettings
from grpo_async.records import Origin, Prompt, RolloutStatus, TaggedMessage
from grpo_async.rollout.conversation import ConversationProducer
from grpo_async.rollout.group import ErrorLog
from grpo_async.tools import Tool
from tests.chat.helpers import renderer_of, tokens, user
from tests.envs.helpers import taken_and_free
from tests.rollout.fakes import CALL, EOS, Answer, FakeRenderer, ScriptedClient, open_group, stop
from tests.support.records import make_completion, make_prompt

HERE = "tests.rollout.some_environments"


def add(a: int) -> int:
    """
    Add.

    Args:
        a: how much
    """
    return a + 40


class _Setup:
    def __init__(
        self,
        *turns: Answer,
        tools: Sequence[Tool] = (),
        timeout_s: float = 5.0,
        max_in_flight: int = 64,
        renderer: Any = None,
        **environments: str,
    ) -> None:
        self.client = ScriptedClient(*turns)
        self.renderer = FakeRenderer()
        self.errors = ErrorLog()
        self.environments: Environments | None = None
        if environments:
            sections = {name: EnvironmentSection(factory=f"{HERE}:{kind}") for name, kind in environments.items()}
            self.environments = load_environments(sections, tools)
        client: Any = self.client
        self.producer = ConversationProducer(
            client,
            renderer or self.renderer,
            SamplingSettings(temperature=1.0, max_completion_tokens=100, max_model_len=2000 if renderer else 200),
            slots=asyncio.Semaphore(max_in_flight),
            rollout_timeout_s=timeout_s,
            max_result_chars=100,
            errors=self.errors,
            tools=tools,
            environments=self.environments,
        )

    def make(self, *prompts: Prompt) -> list[OpenGroup]:
        async def one(prompt: Prompt) -> OpenGroup:
            group = open_group(prompt)
            async with self.producer.produce(group):
                return group

        async def main() -> list[OpenGroup]:
            try:
                return await asyncio.gather(*(one(prompt) for prompt in prompts))
            finally:
                if self.environments is not None:
                    assert all(taken_and_free(pool)[0] == 0 for pool in self.environments.pools.values())
                    await self.environments.aclose()

        return asyncio.run(main())


def test_prompts_of_a_source_with_a_temperature_are_sampled_at_it() -> None:
    setup = _Setup(stop(6, EOS))
    setup.make(make_prompt(), replace(make_prompt(1), temperature=0.5))
    assert sorted(request.temperature for request in setup.client.requests) == [0.5, 0.5, 1.0, 1.0]


def test_a_row_names_the_tools_that_it_may_use() -> None:
    """A call of another one fails."""

    def sub(a: int) -> int:
        """
        Subtract.

        Args:
            a: how much
        """
        return a

    setup = _Setup(stop(CALL, EOS), stop(6, EOS), tools=[Tool.from_function(add), Tool.from_function(sub)])
    every, some, none = setup.make(*(make_prompt(tools=names) for names in (None, ["sub"], [])))
    assert [each.completions[0].tool_names for each in (every, some, none)] == [["add", "sub"], ["sub"], []]
    seen = [[tool["function"]["name"] for tool in tools] for tools in setup.renderer.seen_tools]
    assert sorted(seen) == [[], ["add", "sub"], ["sub"]]
    assert every.completions[0].turns[0].tool_calls[0].result == "40"
    (call,) = some.completions[0].turns[0].tool_calls
    assert (call.name, call.failed) == ("add", True)
    assert len(none.completions[0].turns) == 1


def test_a_message_that_the_prompt_opens_is_continued_and_its_call_made() -> None:
    """The data begins the call, the policy ends it; the next turn still continues ids, and the completion is what was sampled."""
    texts = '"arguments": {"a": 2}}\n</tool_call><|im_end|>', "42<|im_end|>"
    sampled, renderer = [tokens("qwen2_5", text) for text in texts], renderer_of("qwen2_5")
    setup = _Setup(*(stop(*ids) for ids in sampled), tools=[Tool.from_function(add)], renderer=renderer)
    content = '<tool_call>\n{"name": "add", '
    opened = user("2 + 40?"), TaggedMessage(role="assistant", content=content, origin=Origin.PROMPT)
    (produced,) = setup.make(replace(make_prompt(), messages=opened))
    completion = produced.completions[0]
    assert completion.turns[0].tool_calls[0].result == "42"
    first, second = (request.token_ids for request in setup.client.requests[::2])
    assert renderer.tokenizer.decode(first).endswith(f"assistant\n{content}")
    assert second[: len(first) + len(sampled[0])] == [*first, *sampled[0]]
    assert [message.content for message in completion.completion_messages()] == ["", "42", "42"]


def test_the_text_of_reset_reaches_the_prompt_and_the_reward_the_record() -> None:
    """R1.13: FakeRenderer gives one token per character: 7 of the prompt, 12 of the environment."""
    setup = _Setup(stop(CALL, EOS), stop(CALL, CALL, EOS), counter="Counter")
    (produced,) = setup.make(make_prompt(text="1 + 1 =", goal=3))
    completion = produced.completions[0]
    assert len(completion.prompt_ids) == len("1 + 1 = Count to 3.")
    assert completion.prompt_messages is not None
    assert [message.content for message in completion.prompt_messages] == ["1 + 1 = Count to 3."]
    assert [call.result for turn in completion.turns for call in turn.tool_calls] == ["sum 1", "sum 2", "sum 4"]
    assert (completion.done, completion.truncated) == (True, False)
    assert completion.environment_rewards == {"Counter": 4.0}


def test_a_column_chooses_the_environment_and_one_that_fails_fails_its_rollouts_only() -> None:
    """R1.2, R3.5"""
    setup = _Setup(stop(6, EOS), counter="Counter", broken="Broken")
    first, second = setup.make(make_prompt(0, environment="counter"), make_prompt(1, environment="broken"))
    assert first.environments is not None
    assert [type(instance).__name__ for instance in first.environments] == ["Counter", "Counter"]
    assert first.completions[0].environment_rewards == {"Counter": 0.0}
    assert [completion.status for completion in second.completions] == [RolloutStatus.FAILED] * 2
    assert second.completions[0].error is not None
    assert "no board" in second.completions[0].error
    assert setup.errors.counts == {"rollout: EnvironmentCallError": 2}


def test_a_rollout_that_takes_too_long_fails_with_the_setting() -> None:
    setup = _Setup(stop(6, EOS), timeout_s=0.2)
    setup.client.gate = asyncio.Event()
    (produced,) = setup.make(make_prompt())
    assert {each.error for each in produced.completions} == {"no answer within rollout.rollout_timeout_s = 0.2 s"}


def test_a_rollout_that_was_over_is_not_generated_again_after_a_resume() -> None:
    setup, group, over = _Setup(stop(6, EOS)), open_group(make_prompt()), make_completion("g0-r1")
    group.restore({1: over}, keeps_open_turns=True)

    async def main() -> None:
        async with setup.producer.produce(group):
            assert group.completions[1] is over

    asyncio.run(main())
    assert [request.request_id for request in setup.client.requests] == ["g0-r0-t0"]


def test_a_rollout_that_fails_in_its_second_turn_keeps_the_first() -> None:
    """R2.8: what led to a failure is there to be looked at."""
    setup = _Setup(stop(CALL, EOS), tools=[Tool.from_function(add)])  # no answer for the second turn: IndexError
    (produced,) = setup.make(make_prompt())
    completion = produced.completions[0]
    assert (completion.status, len(completion.turns)) == (RolloutStatus.FAILED, 1)
    assert completion.turns[0].tool_calls[0].result == "40"
    assert completion.total_duration_s > 0.0
