"""One rollout of an agent: its calls go to the policy, and what they sampled becomes its completion.

    complete(call) -> history: context ids -> InferenceClient.generate -> read -> recorded -> Answer

Limits: `rollout.max_completion_tokens` bounds what the calls of the rollout sample together (calls that run at the same time may
each use what was left when they began), `inference.max_model_len` context and answer of each call, `rollout.max_turns` their
number, `rollout.max_turn_tokens` and the call's own `max_tokens` one answer. A call that is truncated, or that finds no token left,
ends with finish_reason "length". After the first one that found none, further calls are refused.

Sampling: what is trained is sampled as the run says, so its settings hold: `temperature`, `top_p`, `top_k`, `min_p` and
`repetition_penalty` of a call are ignored, with one warning in a run, a `response_format` other than text is refused, and a `seed`
is mixed with that of the rollout, else all rollouts of a group would be the same. In calls that are not trained all of these are
the call's. A `tool_choice` that forces a call is refused in any case.

A call counts when its answer is whole: what a cancelled call has sampled (the client hung up, the session was closed) is in no
completion. The answer to a call whose client hung up after it was whole does count. Stop strings are those of the run
(rollout.stop) and of the call; an answer that one of them ended is kept as it was sampled, and its text ends before the string.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from grpo_async.agents.calls import ApiError, Call, bad_request
from grpo_async.agents.history import Answer, History, HistoryRenderer, Request
from grpo_async.errors import GrpoAsyncError, RequestRejectedError
from grpo_async.inference.api import GenerateRequest
from grpo_async.inference.client import Generation, InferenceClient, OnTokens
from grpo_async.inference.sampling import SamplingSettings
from grpo_async.records import (
    AGENT_REWARD,
    FinishReason,
    Origin,
    RolloutCompletion,
    RolloutStatus,
    TaggedMessage,
    ToolCall,
    no_tokens,
)
from grpo_async.tracking.timeline import NO_TRACK, Track
from grpo_async.utils.seeds import seed_of
from grpo_async.utils.validation import problems_of
from grpo_async.utils.warn_once import WarnOnce

logger = logging.getLogger(__name__)

_IGNORED = (
    "an agent's call sets `%s`, which is ignored: its answer is sampled with the settings of the run (rollout.temperature, top_p "
    "and the others) and prompted with its chat template (model.chat_template_kwargs)"
)


@dataclass(slots=True)
class Sessions:
    """Those of an endpoint, and what they share.

    Attributes:
        renderer: of what agents send.
        model: the name that answers carry.
        base_url: of OpenAI's API, ends in /v1.
        by_key: both keys of every session that is open.
        serve: has the endpoint answer at a socket that listens already, for an agent that cannot reach its address.
        warn_once: of settings of sampling that have no effect.
    """

    client: InferenceClient
    renderer: HistoryRenderer
    model: str = "policy"
    base_url: str = ""
    by_key: dict[str, AgentSession] = field(default_factory=dict)
    serve: Callable[[socket.socket], Awaitable[asyncio.Server]] | None = None
    warn_once: WarnOnce = field(default_factory=lambda: WarnOnce(logger))


class AgentSession:
    """See the module's docstring; open from now until `close`. Belongs to the rollout loop.

    Args:
        sessions: of the endpoint, which has started.
        rollout_id: of the rollout that it is.
        settings: sampling and limits.
        seed: of the rollout; every call has one of its own.
        affinity: what its requests share with others, such as "group/rollout"; see inference.router.
        on_tokens: called as tokens arrive, those that are dropped later included.
        track: of the timeline.
    """

    def __init__(
        self,
        sessions: Sessions,
        rollout_id: str,
        *,
        settings: SamplingSettings,
        seed: int,
        affinity: str = "",
        on_tokens: OnTokens | None = None,
        track: Track = NO_TRACK,
    ) -> None:
        self.key, self.untrained_key = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        """With the second one calls are answered, too, and trained nowhere: those of a judge, or of a simulated user."""
        sessions.by_key |= {self.key: self, self.untrained_key: self}
        self.rollout_id = rollout_id
        self.base_url, self.model, self.serve = sessions.base_url, sessions.model, sessions.serve
        self.is_closed = False
        self.is_out_of_budget = False
        """A call found no token left of the rollout's budget, or of its number of turns."""
        self.is_truncated = False
        """A limit of the run truncated an answer, or left no room for one."""
        self.last_error: str | None = None
        """Why the newest call that got no answer got none, where the inference servers are to blame."""
        self.api_state: dict[Any, Any] = {}
        """What the APIs remember of this rollout."""
        self._sessions = sessions
        self._settings = settings
        self._seed = seed
        self._affinity = affinity
        self._on_tokens = on_tokens
        self._track = track
        self._history = History(sessions.renderer)
        self._numbers = itertools.count()
        self._num_sampled = 0
        self._tool_names: dict[str, None] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._opened, self._opened_at = time.monotonic(), time.time()

    @property
    def anthropic_base_url(self) -> str:
        """Of Anthropic's API, whose clients add /v1 themselves."""
        return self.base_url.removesuffix("/v1")

    async def complete(self, call: Call, answer_id: str, *, is_trained: bool = True) -> Answer:
        """Have the policy answer.

        Args:
            is_trained: false: the answer is in no completion.

        Raises:
            ApiError: the session is closed, the call cannot be made, or no inference server answers.
        """
        self._check(call, is_trained=is_trained)
        request = self._history.prepare(call)
        self._tool_names |= dict.fromkeys(tool["function"]["name"] for tool in call.tools)
        context = request.context
        number = next(self._numbers)
        budget = self._budget(len(context), number, is_trained=is_trained)
        if budget < 1:
            nothing = TaggedMessage(role="assistant", content="", origin=Origin.POLICY)
            return Answer(
                id=answer_id, request=request, generation=Generation(), sampled=nothing, finish_reason="length"
            )
        wanted = budget if call.max_tokens is None else min(budget, call.max_tokens)
        settings = replace(self._settings, stop=[*self._settings.stop, *call.stop])
        seed = seed_of(self._seed, number) if call.seed is None else seed_of(self._seed, number, call.seed)
        fields: dict[str, Any] = {"token_ids": context, "max_tokens": wanted, "seed": seed}
        if not is_trained:
            fields |= call.sampling
            fields["structured_outputs"] = _structured_outputs(call.response_format) or settings.structured_outputs
            fields["seed"] = seed if call.seed is None else call.seed
        try:
            asked = settings.request(request_id=f"{self.rollout_id}-t{number}", **fields)
        except ValidationError as error:
            raise bad_request(problems_of(error), param=str(error.errors()[0]["loc"][0])) from error
        generation = await self._generate(asked, number)
        self._num_sampled += len(generation.token_ids)
        answer = self._read(call, request, generation, number=number, answer_id=answer_id, settings=settings)
        if is_trained:
            self.is_truncated |= answer.finish_reason == "length" and wanted == budget
            self._history.record(answer)
        return answer

    def set_reward(self, answer_id: str, reward: float) -> None:
        """The agent's reward of one answer, which becomes that of the answer's branch.

        Raises:
            LookupError: there is no such answer.
        """
        bare_id = answer_id.rpartition("-")[2].rpartition("_")[2]  # without the prefix of an API: "chatcmpl-1f" -> "1f"
        answer = next((answer for answer in self._history.answers if answer.id == bare_id), None)
        if answer is None:
            raise LookupError(f"there is no answer {answer_id!r} in this rollout")
        answer.reward = reward

    def completion(
        self,
        status: RolloutStatus,
        *,
        error: str | None = None,
        reward: float | None = None,
        reward_columns: Mapping[str, Any] | None = None,
    ) -> RolloutCompletion:
        """What there is of the rollout: its own turns are the path to the newest answer, all else is in branches.

        Args:
            status: how the agent ended; a finished rollout in which a limit of the run cut an answer is truncated.
            reward: the agent's own; None: the one that it set on the path to the newest answer, if any.
            reward_columns: further columns for reward functions.
        """
        paths = self._history.paths()
        own = paths[0] if paths else None
        if status is RolloutStatus.FINISHED and self.is_truncated:
            status = RolloutStatus.TRUNCATED
        if reward is None and own is not None:
            reward = own.reward
        return RolloutCompletion(
            rollout_id=self.rollout_id,
            prompt_ids=no_tokens() if own is None else own.prompt_ids,
            turns=() if own is None else own.turns,
            status=status,
            error=error,
            total_duration_s=time.monotonic() - self._opened,
            prompt_messages=None if own is None else own.prompt_messages,
            tool_names=list(self._tool_names),
            environment_rewards={} if reward is None else {AGENT_REWARD: reward},
            reward_columns=reward_columns or {},
            started_at=self._opened_at,
            branches=paths[1:],
        )

    def close(self) -> None:
        """Cancel what is under way; the key is not known from now on."""
        if not self.is_closed:
            self.is_closed = True
            for key in (self.key, self.untrained_key):
                del self._sessions.by_key[key]
            for task in self._running:
                task.cancel()

    def prompt_length(self, call: Call, *, is_trained: bool) -> int:
        """Number of tokens of a call's context; nothing is generated.

        Raises:
            ApiError: as `complete`.
        """
        self._check(call, is_trained=is_trained)
        return len(self._history.prepare(call).context)

    def _check(self, call: Call, *, is_trained: bool) -> None:
        if self.is_closed:
            raise unknown_key()
        other = [name for name, value in call.sampling.items() if value != getattr(self._settings, name)]
        for name in (*(other if is_trained else ()), *call.ignored):
            self._sessions.warn_once(name, _IGNORED, name)
        if call.tool_choice not in ("auto", "none"):
            raise bad_request(
                f"tool_choice {call.tool_choice!r} is not supported: a call that is forced is not sampled from the policy; "
                'use "auto" or "none"',
                param="tool_choice",
            )
        if _structured_outputs(call.response_format) is not None and is_trained:
            raise bad_request(
                "response_format: a grammar's mask samples from another distribution than the policy's, and this call is trained; "
                "describe the format in the prompt, and reward it",
                param="response_format",
            )

    def _budget(self, num_context: int, number: int, *, is_trained: bool) -> int:
        """Tokens that a call may sample. Where a call that is not trained finds none, the rollout is none the less whole."""
        settings = self._settings
        if self._num_sampled >= settings.max_completion_tokens or number >= settings.max_turns:
            if self.is_out_of_budget or not is_trained:
                raise bad_request(
                    f"the rollout has used its {settings.max_completion_tokens} tokens or {settings.max_turns} calls "
                    "(rollout.max_completion_tokens, rollout.max_turns)",
                    code="rollout_budget_exhausted",
                )
            self.is_out_of_budget = self.is_truncated = True
            return 0
        budget = settings.turn_budget(num_context, num_used=self._num_sampled)
        self.is_truncated |= is_trained and budget < 1
        return budget

    async def _generate(self, request: GenerateRequest, number: int) -> Generation:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            with self._track.span("generate", turn=number) as span:
                generation = await self._sessions.client.generate(
                    request, on_tokens=self._on_tokens, affinity=self._affinity
                )
                generation.note(span, self._track)
                return generation
        except asyncio.CancelledError as error:
            if self.is_closed and task.uncancel() == 0:
                raise unknown_key() from error
            raise
        except RequestRejectedError as error:
            raise bad_request(str(error)) from error  # such as response_format, by an engine without grammars
        except GrpoAsyncError as error:
            self.last_error = f"{type(error).__name__}: {error}"
            raise ApiError(503, "server_error", self.last_error) from error
        finally:
            self._running.discard(task)

    def _read(
        self,
        call: Call,
        request: Request,
        generation: Generation,
        *,
        number: int,
        answer_id: str,
        settings: SamplingSettings,
    ) -> Answer:
        chat = self._sessions.renderer.chat
        calls: Sequence[ToolCall] = ()
        parse_error: str | None = None
        if not call.tools or call.tool_choice == "none":
            text = chat.completion_text(generation.token_ids)
        else:
            turn = chat.parse(generation.token_ids, turn=number)
            text = turn.text
            problems = [each.error for each in turn.tool_calls if each.error is not None]
            parse_error = turn.parse_error or next(iter(problems), None)
            if not problems:  # else the client gets the whole text: it cannot make half of the calls
                calls, text = turn.tool_calls, turn.content
        text = settings.shown(text)
        reasoning, content = chat.split_thinking(text)
        called = [each.as_dict() for each in calls]
        is_truncated = generation.finish_reason is FinishReason.LENGTH
        return Answer(
            id=answer_id,
            request=request,
            generation=generation,
            sampled=TaggedMessage(role="assistant", content=text, origin=Origin.POLICY, tool_calls=called),
            content=content,
            reasoning=reasoning,
            calls=calls,
            parse_error=parse_error,
            finish_reason="length" if is_truncated else "tool_calls" if calls else "stop",
            tokens=[chat.token_text(token) for token in generation.token_ids] if call.with_logprobs else (),
        )


def _structured_outputs(response_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Of GenerateRequest; None for text. Chat Completions nest the schema, Responses and Messages do not.

    {"type": "json_object"} -> {"json": {"type": "object"}}; {"type": "json_schema", "json_schema": {"schema": S}} -> {"json": S}

    Raises:
        ApiError: it is something else.
    """
    given = response_format if isinstance(response_format, Mapping) else {"type": response_format or "text"}
    kind = given.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json": {"type": "object"}}
    nested = given.get("json_schema")
    schema = (nested if isinstance(nested, Mapping) else given).get("schema")
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise bad_request(
            f"response_format {kind!r}: there are text, json_object, and json_schema with a schema",
            param="response_format",
        )
    return {"json": dict(schema)}


def unknown_key() -> ApiError:
    """The answer to whoever has no key, or one of a rollout that is over."""
    return ApiError(
        401,
        "authentication_error",
        "this key belongs to no rollout that is running: every rollout has a key of its own, until its agent ends",
        code="invalid_api_key",
    )
