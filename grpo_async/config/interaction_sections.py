"""What takes part in a rollout beside the policy, and what judges it: tools, environments, rollout functions, rewards.

All of it is the user's code, named as `module:attribute`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from grpo_async.config.base import Count, Processes, Reference, Seconds, StrictModel, Weight


class ToolSection(StrictModel):
    function: Reference
    """`module:attribute` of a typed function with a Google-style docstring, sync or async; the model sees name, types and texts."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that are fixed here and that the model does not see."""
    timeout_s: Seconds = 30.0
    """Time limit of one call; then the model is told so."""


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
    """Time limit of one call; then its groups fail, and its `trainer` answers no more."""


class RewardSection(StrictModel):
    function: Reference
    """`module:attribute` of a function, partial or callable object with TRL's signature
    `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, sync or async.
    The working directory is importable."""
    name: str | None = None
    """Name in the metrics; null = the function's own name."""
    weight: Weight = 1.0
    """Factor in the sum of the rewards."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments of every call."""
    run_in: Literal["thread", "process"] = "thread"
    """process: in a pool of worker processes that are killed on time-out. For CPU-heavy functions, patterns that may backtrack, and
    functions that use signals. thread, because it may share objects with environments, tools and its own earlier calls (as in TRL),
    and loads a model once; one that holds the interpreter there ends the run after launch.heartbeat_timeout_s."""
    timeout_s: Seconds = 60.0
    """Time limit of one call; then the group fails."""
