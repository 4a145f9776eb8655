"""What takes part in a rollout besides the policy, and what scores it: tools, environments, rollout functions, agents, rewards.

All of it is the user's code, named as `module:attribute`; an agent may also be a command, or an environment of a library.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from grpo_async.config.base import Count, FilePath, Host, ModelName, Processes, Reference, Seconds, StrictModel, Weight


class ToolSection(StrictModel):
    function: Reference
    """`module:attribute` of a typed function with a Google-style docstring, sync or async; the model sees name, types and texts."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that are fixed here and that the model does not see."""
    timeout_s: Seconds = 30.0
    """Time limit of one call; then the model gets a timeout error."""


class ToolCallingSection(StrictModel):
    parser: str = "auto"
    """How calls are read from the model's text: `hermes` (Qwen, Hermes: <tool_call>{json}</tool_call>), `llama3_json`, `mistral`,
    `harmony` (GPT-OSS), `response_template` (the tokenizer's own description), or `module:attribute` of your own:
    `parse(text) -> {"content", "tool_calls": [{"name", "arguments"}]}`, which must be fast, for it runs on the event loop.
    auto: by the chat template; the plan says which."""
    max_result_chars: int = Field(default=8192, ge=16)
    """Longer tool results are cut, with a mark that says so."""


class EnvironmentSection(StrictModel):
    factory: Reference
    """`module:attribute` of a class or zero-argument factory: `reset(**row)`, tool methods, and, if wanted, `is_done()`,
    `get_reward()`, `close()`. As in TRL's `environment_factory`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory."""
    reward_weight: Weight = 1.0
    """Factor on what `get_reward` returns, in the sum of the rewards."""
    timeout_s: Seconds = 60.0
    """Time limit of one call of an instance: reset, a tool, is_done, get_reward."""
    max_instances: Count | None = None
    """Most instances at once; null = as many as there are rollouts in flight."""


class RolloutFunctionSection(StrictModel):
    function: Reference
    """`module:attribute` of `rollout_func(prompts, trainer) -> {"prompt_ids", "completion_ids", "logprobs", ...}`, as in TRL."""
    repeat_prompts: bool = True
    """true: every prompt is given `group_size` times, and one completion is expected for each entry (what TRL does).
    false: every prompt once; `group_size` completions of each prompt are expected, one prompt's after the other's."""
    groups_per_call: Count | None = None
    """Most groups in one call; null = `rollout.groups_per_step`."""
    max_concurrent_calls: Processes = 1
    """Calls that may run at once, each in a thread of its own."""
    timeout_s: Seconds = 300.0
    """Time limit of one call; then its groups fail, and its `trainer` refuses further calls."""


class AgentSection(StrictModel):
    """Exactly one of `function`, `command` and `environment`. Whichever it is, it calls the model at an endpoint that speaks
    the APIs of OpenAI and Anthropic."""

    function: Reference | None = None
    """`module:attribute` of `run(row, client, **arguments) -> float | dict | None`, sync or async. `client` has `base_url`,
    `api_key`, `model` and `openai`, a ready client of that package (AsyncOpenAI for an async function). It returns its reward, or a
    dict with `reward` and what else reward functions are to get, or nothing where they judge alone."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """A process for each rollout, without a shell: [node, agent.js]. It gets OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL,
    ANTHROPIC_API_KEY, and the row as JSON on stdin; the last line of its stdout is its result, as JSON."""
    environment: Annotated[str, StringConstraints(pattern=r"^(verifiers|openenv|nemo_gym):.+")] | None = None
    """An environment of a library: `verifiers:NAME`, `openenv:URL` or `nemo_gym:URL`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the function, or of the environment."""
    timeout_s: Seconds = 300.0
    """Time limit of one rollout; then it fails, its key is refused, and its process is killed with all that it started."""
    max_concurrent: Count | None = None
    """Most agents that run at once; null = `rollout.max_in_flight`."""
    reward_weight: Weight = 1.0
    """Factor on the agent's own reward, in the sum of the rewards. It is the reward named `agent`."""
    host: Host = "127.0.0.1"
    """Where the endpoint listens and agents connect to. For agents in containers: an address of this machine that they reach."""
    port: int = Field(default=0, ge=0, le=65535)
    """Of the endpoint; 0 = a free one."""
    sandbox: bool = False
    """Run the command in the sandbox: it reaches the endpoint and no other address, reads the system's programs and libraries, the
    files that it names and `read_paths`, and works in an empty folder of its own; `python` in it is that of the run, with its
    packages. Requires Linux with user namespaces."""
    read_paths: list[FilePath] = Field(default_factory=list)
    """Further files and folders that a command in the sandbox may read, under the same paths."""
    memory_mb: int | None = Field(default=None, ge=16)
    """Most memory, in MiB, that each process of a command may allocate; null = no limit, in the sandbox 2048."""

    @property
    def kind(self) -> Literal["function", "command", "environment"]:
        """Which of the three it is."""
        return "function" if self.function is not None else "command" if self.command is not None else "environment"

    @model_validator(mode="after")
    def _is_one_kind_of_agent(self) -> Self:
        named = [name for name in ("function", "command", "environment") if getattr(self, name) is not None]
        if len(named) != 1:
            raise ValueError(
                f"an agent is one of function, command and environment; {' and '.join(named) or 'none of them'} is set"
            )
        if self.command is not None and self.arguments:
            raise ValueError("arguments: a command has none; write them into `command`")
        if self.command is None and (self.sandbox or self.read_paths or self.memory_mb is not None):
            raise ValueError(
                "sandbox, read_paths and memory_mb apply to the process of a `command` only; leave them out"
            )
        if self.host in ("0.0.0.0", "::"):  # noqa: S104 - it is refused
            raise ValueError(
                f"host: {self.host} is no address that an agent could connect to; write one of this machine"
            )
        if self.read_paths and not self.sandbox:
            raise ValueError("read_paths: without `sandbox: true` a command may read everything; leave it out")
        return self


class RewardSection(StrictModel):
    """One of `function` and `model`."""

    function: Reference | None = None
    """`module:attribute` of a function, partial or callable object with TRL's signature
    `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, sync or async.
    The working directory is importable."""
    model: ModelName | None = None
    """A reward model in its place: folder or hub name of a sequence classifier with one output, as TRL's `reward_funcs` takes it.
    It runs in a process of its own; `arguments` may have device (auto, cpu, cuda:N), batch_size, dtype, revision, max_tokens: see
    grpo_async.rewards.model."""
    name: str | None = None
    """Name in the metrics; null = the function's own name, or the last part of the model's."""
    weight: Weight = 1.0
    """Factor in the sum of the rewards."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments of every call."""
    run_in: Literal["thread", "process"] = "thread"
    """process: in a pool of worker processes that are killed on timeout. For CPU-heavy functions, patterns that may backtrack, and
    functions that use signals. thread, because it may share objects with environments, tools and its own earlier calls (as in TRL),
    and loads a model once; one that holds the interpreter there ends the run after launch.heartbeat_timeout_s."""
    timeout_s: Seconds = 60.0
    """Time limit of one call; then the group fails."""

    @model_validator(mode="after")
    def _is_a_function_or_a_model(self) -> Self:
        if (self.function is None) == (self.model is None):
            raise ValueError("a reward is either a `function` or a `model`; set one of them")
        if self.model is not None and self.run_in != "thread":
            raise ValueError("run_in: a reward model has a process of its own in any case; leave it out")
        return self

    @property
    def reference(self) -> str:
        """Of the function that scores."""
        return self.function or "grpo_async.rewards.model:model_reward"

    @property
    def keywords(self) -> dict[str, Any]:
        """What it is given in addition to what a run offers: `arguments`, those of a reward model together with its name."""
        return self.arguments if self.model is None else {"settings": {"model": self.model, **self.arguments}}

    @property
    def own_name(self) -> str:
        """ "my_rewards:length_reward" -> length_reward; my-org/judge -> judge."""
        return self.reference.rpartition(":")[2] if self.model is None else PurePath(self.model).name
