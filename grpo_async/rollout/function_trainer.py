"""The `trainer` argument of a rollout function: the attributes that TRL's rollout functions use (processing_class, args,
state), and `generate` with the served policy. After its call it sends no more requests.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from types import SimpleNamespace
from typing import Any

from grpo_async.chat.renderer import ChatRenderer
from grpo_async.config.sections import SAMPLING, RolloutFunctionSection
from grpo_async.errors import RunError
from grpo_async.inference.client import InferenceClient
from grpo_async.inference.sampling import SamplingSettings, listed_stop
from grpo_async.records import Origin, TaggedMessage, origin_of
from grpo_async.rewards import TrainerState
from grpo_async.user_code.calls import own_copy
from grpo_async.utils.concurrency import all_of
from grpo_async.utils.loop_thread import result_within
from grpo_async.utils.seeds import seed_of
from grpo_async.utils.text import count

_OVERRIDES = (*SAMPLING, "stop", "max_tokens", "seed")
_OVER = (
    "this call of the rollout function is over (its time limit passed, its prompts became too stale, or the run stops), "
    "so its trainer sends no more requests"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSetup:
    """What all calls of a rollout function share."""

    client: InferenceClient
    renderer: ChatRenderer
    settings: SamplingSettings
    section: RolloutFunctionSection
    num_generations: int
    groups_per_call: int
    max_steps: int
    seed: int = 0
    chat_template_kwargs: Mapping[str, Any] | None = None


class FunctionTrainer:
    """See the module's docstring. It must be made on the loop on which its requests run."""

    def __init__(self, setup: FunctionSetup, *, seed: int, served_version: Callable[[], int]) -> None:
        self._client, self._renderer, self._settings = setup.client, setup.renderer, setup.settings
        self._setup = setup
        self._served_version = served_version
        self._seed = seed
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._is_over = threading.Event()
        self._asked: list[concurrent.futures.Future[Any]] = []
        settings = setup.settings
        self.args = SimpleNamespace(  # named as in TRL
            num_generations=setup.num_generations,
            max_completion_length=settings.max_completion_tokens,
            seed=setup.seed,
            chat_template_kwargs=own_copy(setup.chat_template_kwargs),
            **{name: getattr(settings, name) for name in SAMPLING},
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`trainer` has no `{name}`; it has processing_class, args, state and generate. Instead of TRL's "
            "`trainer.vllm_generation`, use `trainer.generate(prompts)`"
        )

    @cached_property
    def processing_class(self) -> Any:
        """A copy for this call: truncation set on it must not cut the run's own prompts."""
        return copy.deepcopy(self._renderer.tokenizer)

    @property
    def state(self) -> TrainerState:
        return TrainerState(global_step=self._served_version(), max_steps=self._setup.max_steps)

    def close(self) -> None:
        self._is_over.set()
        for future in self._asked:
            future.cancel()

    def generate(
        self, prompts: Sequence[Any], *, generation_overrides: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Generate one completion for each prompt, all concurrently; each is {"prompt_ids", "completion_ids", "logprobs", "text",
        "finish_reason"}. A prompt is a text, a list of messages or a list of token ids."""
        overrides = dict(generation_overrides or {})
        if unknown := sorted(set(overrides) - set(_OVERRIDES)):
            raise ValueError(f"generation_overrides: unknown settings {unknown}; there are {', '.join(_OVERRIDES)}")
        if "stop" in overrides:
            overrides["stop"] = listed_stop(overrides["stop"])
        if self._is_over.is_set():
            raise RunError(_OVER)
        future = asyncio.run_coroutine_threadsafe(self._generate(prompts, overrides), self._loop)
        self._asked.append(future)
        if self._is_over.is_set():  # meanwhile
            future.cancel()
        try:
            return result_within(
                future,
                timeout_s=self._setup.section.timeout_s,
                what=f"{count(len(prompts), 'completion')} that the rollout function asked for",
                setting="rollout_function.timeout_s",
            )
        except concurrent.futures.CancelledError as error:
            raise RunError(_OVER) from error

    async def _generate(self, prompts: Sequence[Any], overrides: Mapping[str, Any]) -> list[dict[str, Any]]:
        if self._is_over.is_set():  # since this was asked for
            raise RunError(_OVER)
        return await all_of(self._one(prompt, place, overrides) for place, prompt in enumerate(prompts))

    async def _one(self, prompt: Any, place: int, overrides: Mapping[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        prompt_ids = self._prompt_ids(prompt)
        budget = self._settings.turn_budget(len(prompt_ids), num_used=0)
        if budget < 1:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room in inference.max_model_len = "
                f"{self._settings.max_model_len}"
            )
        changes = {
            **overrides,
            "max_tokens": min(budget, int(overrides.get("max_tokens", budget))),
            "seed": seed_of(overrides["seed"], place) if "seed" in overrides else seed_of(self._seed, number),
        }
        settings = replace(self._settings, stop=overrides.get("stop", self._settings.stop))
        request = settings.request(request_id=f"function-{self._seed}-{number}", token_ids=prompt_ids, **changes)
        generation = await self._client.generate(request, affinity=f"function-{self._seed}")
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": list(generation.token_ids),
            "logprobs": list(generation.logprobs),
            "text": settings.shown(self._renderer.completion_text(generation.token_ids)),
            "finish_reason": str(generation.finish_reason),
        }

    def _prompt_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            message = TaggedMessage(role="user", content=prompt, origin=Origin.PROMPT)
            return self._renderer.prompt_ids([message], is_conversational=False)
        if hasattr(prompt, "tolist"):  # an array or a tensor
            prompt = prompt.tolist()
        if all(isinstance(token, Integral) for token in prompt):
            return [int(token) for token in prompt]
        # the user's own: control tokens in it are control tokens, and an open message is continued
        messages = [TaggedMessage.from_dict(each, origin_of(each["role"], Origin.PROMPT)) for each in prompt]
        if messages and messages[-1].role == "assistant":
            messages[-1] = replace(messages[-1], origin=Origin.PROMPT)
        return self._renderer.prompt_ids(messages, is_conversational=True)
