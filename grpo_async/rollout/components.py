"""What makes rollouts, apart from the policy: tools and environments, or instead of them a rollout function or an agent."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_async.agents.agent import Agent
from grpo_async.agents.command import load_command_agent
from grpo_async.agents.environments import load_environment_agent
from grpo_async.agents.function import load_function_agent
from grpo_async.chat.renderer import ChatRenderer
from grpo_async.config import ExperimentConfig
from grpo_async.config.sections import SAMPLING, EvaluationSection, RolloutSection
from grpo_async.data import Rows
from grpo_async.envs import Environments, load_environments
from grpo_async.errors import ConfigError, Problems
from grpo_async.inference.client import InferenceClient
from grpo_async.inference.sampling import SamplingSettings
from grpo_async.records import AGENT_REWARD, Prompt
from grpo_async.rollout.agent_producer import AgentHost, AgentProducer
from grpo_async.rollout.conversation import ConversationProducer
from grpo_async.rollout.function_producer import FunctionProducer
from grpo_async.rollout.function_trainer import FunctionSetup
from grpo_async.rollout.group import ErrorLog, GroupProducer
from grpo_async.tools import Tool, load_tools, tools_of_row
from grpo_async.user_code.calls import partials_of, unwrap_partial
from grpo_async.user_code.references import resolve_and_check


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """The objects that the configuration names, imported and checked."""

    tools: Sequence[Tool]
    environments: Environments | None
    function: Callable[..., Any] | None
    agent: AgentHost | None = None

    def schemas_for(self, columns: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        schemas = [tool.schema for tool in tools_of_row(self.tools, columns)]
        if self.environments is not None:
            schemas += self.environments.for_row(columns).schemas[len(self.tools) :]  # its own
        return schemas

    def check_rows(self, rows: Rows, renderer: ChatRenderer | None = None) -> None:
        """Raise a ConfigError for the first row that names an unknown tool, or variables that `renderer` cannot take."""
        for row, location in zip(rows, rows.locations, strict=True):
            try:
                tools_of_row(self.tools, row)
                if renderer is not None and self.agent is None and self.function is None:
                    renderer.for_row(row)
            except ConfigError as error:
                raise ConfigError(f"{location}: {error}") from error

    @property
    def tool_sets(self) -> list[list[Mapping[str, Any]]]:
        if self.environments is not None:
            return [pool.schemas for pool in self.environments.pools.values() if pool.schemas]
        return [[tool.schema for tool in self.tools]] if self.tools else []

    @property
    def reward_weights(self) -> dict[str, float]:
        """Of the rewards that do not come from reward functions."""
        if self.agent is not None:
            return {AGENT_REWARD: self.agent.section.reward_weight}
        return self.environments.reward_weights if self.environments is not None else {}

    @property
    def notes(self) -> list[str]:
        """Notes for the user at startup, without duplicates."""
        found = [*self.environments.notes] if self.environments is not None else []
        for tool in self.tools:
            found += startup_notes(tool.function, tool.fixed)
        return list(dict.fromkeys(found))

    def producer(
        self,
        config: ExperimentConfig,
        sampling: RolloutSection | EvaluationSection,
        *,
        group_size: int,
        client: InferenceClient,
        renderer: ChatRenderer,
        errors: ErrorLog,
        slots: asyncio.Semaphore | None = None,
    ) -> GroupProducer:
        """The producer that samples `group_size` rollouts of a prompt, as the configuration says. `slots`: for the rollouts in
        flight; None: `rollout.max_in_flight`."""
        rollout = config.rollout
        settings = SamplingSettings(
            **{name: getattr(sampling, name) for name in SAMPLING},
            structured_outputs=None if sampling.structured_outputs is None else sampling.structured_outputs.as_vllm(),
            stop=rollout.stop if sampling.stop is None else sampling.stop,
            max_completion_tokens=rollout.max_completion_tokens,
            max_model_len=config.inference.max_model_len,
            max_turn_tokens=rollout.max_turn_tokens,
            max_turns=rollout.max_turns,
            stop_token_ids=renderer.end_of_turn_ids,
            top_logprobs=config.num_top_logprobs if isinstance(sampling, RolloutSection) else 0,
            corrects_sampling=config.corrects_sampling,
        )
        if self.function is not None:
            section = config.rollout_function
            assert section is not None
            setup = FunctionSetup(
                client=client,
                renderer=renderer,
                settings=settings,
                section=section,
                num_generations=group_size,
                groups_per_call=rollout.groups_per_step,
                max_steps=config.num_steps,
                seed=config.run.seed,
                chat_template_kwargs=config.model.chat_template_kwargs,
            )
            return FunctionProducer(self.function, setup)
        if self.agent is not None:
            return AgentProducer(self.agent, client, renderer, settings, needs_reward=not config.rewards, errors=errors)
        return ConversationProducer(
            client,
            renderer,
            settings,
            slots=slots or asyncio.Semaphore(rollout.most_in_flight),
            rollout_timeout_s=rollout.rollout_timeout_s,
            max_result_chars=config.tool_calling.max_result_chars,
            errors=errors,
            tools=self.tools,
            environments=self.environments,
        )

    async def aclose(self) -> None:
        """Close the tools, the environments' instances, and the agent's endpoint."""
        for tool in self.tools:
            tool.close()
        if self.environments is not None:
            await self.environments.aclose()
        if self.agent is not None:
            await self.agent.aclose()


def startup_notes(owner: Any, arguments: Mapping[str, Any] | None = None) -> list[str]:
    """The lines of an object's `startup_notes()`, if it has any, such as what the machine lacks; ConfigError if that is needed. The
    method gets those of the section's `arguments` that it names; of a partial, also those that are fixed in it."""
    notes = getattr(unwrap_partial(owner), "startup_notes", None)
    if not callable(notes):
        return []
    known = dict(arguments or {})
    for partial in partials_of(owner):
        known = {**partial.keywords, **known}
    wanted = inspect.signature(notes).parameters
    return [str(note) for note in notes(**{name: value for name, value in known.items() if name in wanted})]


def token_counter(renderer: ChatRenderer, components: Components) -> Callable[[Prompt], int]:
    """A function that counts a prompt's tokens as they will be sent, without what an environment adds."""

    def count(prompt: Prompt) -> int:
        tools = components.schemas_for(prompt.columns)
        own = renderer.for_row(prompt.columns)
        return len(own.prompt_ids(prompt.messages, is_conversational=prompt.is_conversational, tools=tools))

    return count


def load_components(config: ExperimentConfig) -> Components:
    """Import tools, environments, the rollout function and the agent; one instance of each environment is made. The ConfigError has
    a line for each that cannot be used."""
    problems = Problems()
    tools: Sequence[Tool] = []
    environments = function = agent = None
    with problems.collecting():
        tools = load_tools(config.tools)
    with problems.collecting():
        environments = load_environments(config.environments, tools) if config.environments else None
    with problems.collecting():
        if (section := config.rollout_function) is not None:
            given: dict[str, Any] = {"prompts": [], "trainer": None}
            function = resolve_and_check(section.function, "rollout_function.function", given=given)
    with problems.collecting():
        agent = _load_agent(config)
    if problems and environments is not None:
        asyncio.run(environments.aclose())
    problems.raise_if_any()
    return Components(tools=tools, environments=environments, function=function, agent=agent)


def _load_agent(config: ExperimentConfig) -> AgentHost | None:
    section = config.rollout.agent
    if section is None:
        return None
    max_concurrent = section.max_concurrent or config.rollout.most_in_flight
    agent: Agent
    if section.function is not None:
        agent = load_function_agent(section, max_concurrent=max_concurrent)
    elif section.command is not None:
        agent = load_command_agent(section)
    else:
        agent = load_environment_agent(section, max_concurrent=max_concurrent)
    return AgentHost(agent, section, max_concurrent=max_concurrent)
