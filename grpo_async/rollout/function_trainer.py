"""What a rollout function gets as `trainer`: the attributes that TRL's rollout functions use, over our client.

processing_class   the tokenizer, with the chat template of the run
args               num_generations, max_completion_length, temperature, chat_template_kwargs, ...
state              global_step (steps done), max_steps
generate(...)      completions of the served policy; `agenerate` for async functions
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_async.chat.renderer import ChatRenderer
from grpo_async.inference.surface import GenerateRequest
from grpo_async.records import Origin, TaggedMessage
from grpo_async.rollout.conversation import Generator, SamplingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionArguments:
    """`trainer.args`, under TRL's names."""

    num_generations: int
    max_completion_length: int
    temperature: float
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    chat_template_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionState:
    """`trainer.state` at one moment: optimizer steps that the served policy has behind it, and those of the run."""

    global_step: int
    max_steps: int


class FunctionTrainer:
    """See the module's docstring.

    Args:
        client: generates.
        renderer: renders prompts as the run does.
        settings: token limits of the run.
        arguments: `args`.
        max_steps: optimizer steps of the run.
        served_version: the policy version that the server serves now.
        timeout_s: deadline of one `generate` call.
    """

    def __init__(
        self,
        client: Generator,
        renderer: ChatRenderer,
        settings: SamplingSettings,
        *,
        arguments: FunctionArguments,
        max_steps: int,
        served_version: Callable[[], int],
        timeout_s: float,
    ) -> None:
        self._client = client
        self._renderer = renderer
        self._settings = settings
        self._served_version = served_version
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count()
        self._max_steps = max_steps
        self.args = arguments

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        return self._renderer.tokenizer

    @property
    def state(self) -> FunctionState:
        """Where the run is now."""
        return FunctionState(global_step=self._served_version(), max_steps=self._max_steps)

    def use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """The event loop on which requests run."""
        self._loop = loop

    def generate(
        self, prompts: Sequence[Any], *, generation_overrides: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """One completion for each prompt, all at the same time; for functions that run in a thread.

        Args:
            prompts: text, message lists (rendered by the chat template) or lists of token ids (used as they are).
            generation_overrides: `temperature`, `top_p`, `top_k`, `min_p`, `max_tokens`, `seed`.

        Returns:
            For each prompt {"prompt_ids", "completion_ids", "logprobs", "text", "finish_reason"}.

        Raises:
            RuntimeError: called on the event loop, which it would block; async functions await `agenerate`.
        """
        loop = self._loop
        if loop is None:
            raise RuntimeError("trainer.generate works while the rollout function runs, not outside of it")
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is loop:
            raise RuntimeError("trainer.generate would block the event loop; await trainer.agenerate instead")
        work = self.agenerate(prompts, generation_overrides=generation_overrides)
        return asyncio.run_coroutine_threadsafe(work, loop).result(self._timeout_s)

    async def agenerate(
        self, prompts: Sequence[Any], *, generation_overrides: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """As `generate`, for async rollout functions."""
        overrides = dict(generation_overrides or {})
        unknown = sorted(set(overrides) - {"temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"})
        if unknown:
            raise ValueError(f"generation_overrides: {unknown} are not known; there are temperature, top_p, top_k, min_p, "
                             "max_tokens and seed")  # fmt: skip
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._one(prompt, overrides)) for prompt in prompts]
        return [task.result() for task in running]

    async def _one(self, prompt: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        prompt_ids = self._prompt_ids(prompt)
        budget = self._settings.turn_budget(len(prompt_ids), 0)
        if budget < 1:
            raise ValueError(f"a prompt of {len(prompt_ids)} tokens leaves no room in inference.max_model_len = "
                             f"{self._settings.max_model_len}")  # fmt: skip
        args = self.args
        request = GenerateRequest(
            request_id=f"function-{number}",
            token_ids=prompt_ids,
            max_tokens=min(budget, int(overrides.get("max_tokens", budget))),
            temperature=float(overrides.get("temperature", args.temperature)),
            top_p=float(overrides.get("top_p", args.top_p)),
            top_k=int(overrides.get("top_k", args.top_k)),
            min_p=float(overrides.get("min_p", args.min_p)),
            seed=(int(overrides.get("seed", args.seed * 1_000_003)) + number) & 0x7FFFFFFF,
            stop_token_ids=list(self._settings.stop_token_ids),
            cache_salt=str(self._served_version()),
        )
        generation = await self._client.generate(request)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": generation.token_ids,
            "logprobs": generation.logprobs,
            "text": self._renderer.completion_text(generation.token_ids),
            "finish_reason": str(generation.finish_reason),
        }

    def _prompt_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            message = TaggedMessage(role="user", content=prompt, origin=Origin.PROMPT)
            return self._renderer.prompt_ids([message], is_conversational=False)
        if all(isinstance(token, int) for token in prompt):
            return list(prompt)
        messages = [TaggedMessage(role=m["role"], content=m["content"], origin=Origin.PROMPT) for m in prompt]
        return self._renderer.prompt_ids(messages, is_conversational=True)


def generate_rollout_completions(
    trainer: FunctionTrainer,
    prompts: Sequence[Any],
    *,
    generation_overrides: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """`trainer.generate`, under the name that rollout functions written for TRL's OpenEnv examples import."""
    return trainer.generate(prompts, generation_overrides=generation_overrides)
