"""One rollout of an agent: its calls go to the policy, and the sampled answers become its completion.

Trained answers are sampled with the run's settings; a call's own `temperature` and the like are ignored with one
warning, and its `seed` is combined with the rollout's. Calls that are not trained use their own settings. An answer
under a grammar (a format, a forced tool call) is trained only if the loss corrects for it. A call counts when its
answer is complete.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from grpo_async.agents.calls import BUDGET_EXHAUSTED, ApiError, Call, bad_request
from grpo_async.agents.history import Answer, History, HistoryRenderer, Request
from grpo_async.chat.turn import ChatError
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
from grpo_async.tracking.timeline import span
from grpo_async.utils.seeds import seed_of
from grpo_async.utils.validation import problems_of
from grpo_async.utils.warn_once import WarnOnce

logger = logging.getLogger(__name__)

_LONG_CHARS = 100_000
_IGNORED = (
    "an agent's call sets `%s`, which is ignored: its answer is sampled with the settings of the run (rollout.temperature, top_p "
    "and the others) and prompted with its chat template (model.chat_template_kwargs)"
)

_NOT_TRAINED = (
    "an agent's call constrains its answer (response_format or a forced tool_choice): such answers are context and not trained, "
    "because the loss does not correct for tokens that a grammar leaves out; set loss.proximal: recomputed and loss.correction: "
    "{level: token, action: truncate} to train them"
)


@dataclass(slots=True)
class Sessions:
    """The sessions of an endpoint, and what they share."""

    client: InferenceClient
    renderer: HistoryRenderer
    model: str = "policy"  # its name in answers
    base_url: str = ""  # of OpenAI's API; ends in /v1
    by_key: dict[str, AgentSession] = field(default_factory=dict)  # the open ones, by both of their keys
    warn_once: WarnOnce = field(default_factory=lambda: WarnOnce(logger))  # of settings that are ignored


class AgentSession:
    """See the module's docstring. Open from its construction until `close`. It belongs to the rollout loop."""

    def __init__(
        self,
        sessions: Sessions,
        rollout_id: str,
        *,
        settings: SamplingSettings,
        seed: int,
        affinity: str = "",
        on_tokens: OnTokens | None = None,
    ) -> None:
        self.key, self.untrained_key = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        """Calls with the second key are answered but not trained: those of a judge, or of a simulated user."""
        sessions.by_key |= {self.key: self, self.untrained_key: self}
        self.rollout_id = rollout_id
        self.base_url, self.model = sessions.base_url, sessions.model
        self.is_closed = False
        self.is_out_of_budget = False
        """Whether a call found no token or turn left in the rollout's budget."""
        self.is_truncated = False
        """Whether a limit of the run truncated an answer, or left no room for one."""
        self.last_error: str | None = None
        """Why the last call that failed because of the inference servers failed."""
        self.api_state: dict[Any, Any] = {}
        """The APIs' state of this rollout."""
        self._sessions = sessions
        self._settings = settings
        self._seed = seed
        self._affinity = affinity
        self._on_tokens = on_tokens
        self._history = History(sessions.renderer, settings.max_model_len)
        self._numbers = itertools.count()
        self._num_sampled = 0
        self._empty_ids: set[str] = set()  # of answers for which no token was left
        self._tool_names: dict[str, None] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._opened, self._opened_at = time.monotonic(), time.time()

    @property
    def max_messages(self) -> int:
        """More cannot be in a context: each has a token at least."""
        return self._settings.max_model_len

    @property
    def anthropic_base_url(self) -> str:
        """URL of Anthropic's API, whose clients append /v1 themselves."""
        return self.base_url.removesuffix("/v1")

    async def complete(self, call: Call, answer_id: str, *, is_trained: bool = True) -> Answer:
        """Have the policy answer a call; `is_trained` False keeps the answer out of the completion."""
        self._check(call, is_trained=is_trained)
        constraint = self._constraint(call)
        request = await self._prepare(call)
        self._tool_names |= dict.fromkeys(tool["function"]["name"] for tool in call.tools)
        context = request.context
        number = next(self._numbers)
        budget = self._budget(len(context), number, is_trained=is_trained)
        if budget < 1:
            if is_trained:
                self._empty_ids.add(answer_id)
            nothing = TaggedMessage(role="assistant", content="", origin=Origin.POLICY)
            return Answer(
                id=answer_id, request=request, generation=Generation(), sampled=nothing, finish_reason="length"
            )
        wanted = budget if call.max_tokens is None else min(budget, call.max_tokens)
        settings = replace(self._settings, stop=[*self._settings.stop, *call.stop])
        seed = seed_of(self._seed, number) if call.seed is None else seed_of(self._seed, number, call.seed)
        fields: dict[str, Any] = {"token_ids": context, "max_tokens": wanted, "seed": seed}
        if constraint is not None:
            fields["structured_outputs"] = constraint
            if is_trained and not settings.corrects_sampling:
                self._sessions.warn_once("constraint", _NOT_TRAINED)
        if not is_trained:
            fields |= {**call.sampling, "top_logprobs": 0}
            fields["seed"] = seed if call.seed is None else call.seed
        try:
            asked = settings.request(request_id=f"{self.rollout_id}-t{number}", **fields)
        except ValidationError as error:
            raise bad_request(problems_of(error), param=str(error.errors()[0]["loc"][0])) from error
        generation = await self._generate(asked, number)
        self._num_sampled += len(generation.token_ids)
        answer = self._read(call, request, generation, number=number, answer_id=answer_id, settings=settings)
        answer.is_trained = constraint is None or settings.corrects_sampling
        if is_trained:
            self.is_truncated |= answer.finish_reason == "length" and wanted == budget
            self._history.record(answer)
        return answer

    def set_reward(self, answer_id: str, reward: float) -> None:
        """Set the agent's reward of one answer, which becomes that of its branch; LookupError if there is no such answer. No effect
        for an answer without tokens."""
        bare_id = answer_id.rpartition("-")[2].rpartition("_")[2]  # without the prefix of an API: "chatcmpl-1f" -> "1f"
        if bare_id in self._empty_ids:
            return
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
        """Return the rollout's completion: its own turns are the path to the newest answer, all others are in branches. A finished
        rollout with an answer that a limit of the run cut counts as truncated; without `reward`, the one of that path counts."""
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
        """Cancel calls in progress; the key is unknown from now on."""
        if not self.is_closed:
            self.is_closed = True
            for key in (self.key, self.untrained_key):
                del self._sessions.by_key[key]
            for task in self._running:
                task.cancel()

    async def prompt_length(self, call: Call, *, is_trained: bool) -> int:
        """Number of tokens of a call's context, without generating anything."""
        self._check(call, is_trained=is_trained)
        return (await self._prepare(call)).num_tokens

    async def _prepare(self, call: Call) -> Request:
        """Find the tokens of a call: those of a long one in a thread, because 1 MB takes a second."""
        parts = (part for message in call.messages for part in message.values())  # arguments of tools, too
        if sum(len(str(part)) for part in parts) < _LONG_CHARS:
            return self._history.prepare(call)
        request = await asyncio.to_thread(self._history.prepare, call)
        if self.is_closed:
            raise unknown_key()
        return request

    def _check(self, call: Call, *, is_trained: bool) -> None:
        if self.is_closed:
            raise unknown_key()
        other = [name for name, value in call.sampling.items() if value != getattr(self._settings, name)]
        for name in (*(other if is_trained else ()), *call.ignored):
            self._sessions.warn_once(name, _IGNORED, name)
        unread = self._sessions.renderer.chat.unread_calls
        if unread is not None and call.tools and call.tool_choice != "none":
            raise bad_request(f"calls of tools cannot be read: {unread}", param="tools")

    def _constraint(self, call: Call) -> dict[str, Any] | None:
        """The `structured_outputs` that a call asks for. Beside a format, calls that are not forced may be made."""
        schema = _schema(call.response_format)
        if schema is None and not call.forced_tools:
            return None
        tools = call.forced_tools or (call.tools if call.tool_choice == "auto" else ())
        try:
            return self._sessions.renderer.chat.constraint(None if call.forced_tools else schema, tools)
        except ChatError as error:
            raise bad_request(str(error), param="tool_choice" if call.forced_tools else "response_format") from error

    def _budget(self, num_context: int, number: int, *, is_trained: bool) -> int:
        """Tokens that a call may sample. An untrained call without any left does not make the rollout truncated."""
        settings = self._settings
        if self._num_sampled >= settings.max_completion_tokens or number >= settings.max_turns:
            if self.is_out_of_budget or not is_trained:
                raise bad_request(
                    f"the rollout has used its {settings.max_completion_tokens} tokens or {settings.max_turns} calls "
                    "(rollout.max_completion_tokens, rollout.max_turns)",
                    code=BUDGET_EXHAUSTED,
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
            with span("generate", turn=number) as details:
                generation = await self._sessions.client.generate(
                    request, on_tokens=self._on_tokens, affinity=self._affinity
                )
                generation.note(details)
                return generation
        except asyncio.CancelledError as error:
            if self.is_closed and task.uncancel() == 0:
                raise unknown_key() from error
            raise
        except RequestRejectedError as error:
            raise bad_request(str(error)) from error  # for example response_format with an engine without grammars
        except GrpoAsyncError as error:
            self.last_error = str(error)
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
            turn = chat.parse(generation.token_ids, turn=number, tools=call.tools)
            text = turn.text
            problems = [each.error for each in turn.tool_calls if each.error is not None]
            parse_error = turn.parse_error or next(iter(problems), None)
            if not problems:  # otherwise the client gets the whole text, as half of the calls are no use
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
        )


def _schema(response_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The JSON schema of a format; None for text. Chat Completions nest the schema, Responses and Messages do not.

    {"type": "json_object"} -> {"type": "object"}; {"type": "json_schema", "json_schema": {"schema": S}} -> S
    """
    given = response_format if isinstance(response_format, Mapping) else {"type": response_format or "text"}
    kind = given.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    nested = given.get("json_schema")
    schema = (nested if isinstance(nested, Mapping) else given).get("schema")
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise bad_request(
            f"response_format {kind!r}: there are text, json_object, and json_schema with a schema",
            param="response_format",
        )
    return dict(schema)


def unknown_key() -> ApiError:
    """The error for a missing key, or one of a rollout that is over."""
    return ApiError(
        401,
        "authentication_error",
        "this key belongs to no rollout that is running: every rollout has a key of its own, until its agent ends",
        code="invalid_api_key",
    )
