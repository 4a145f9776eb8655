"""One call of a reward function: its arguments, passed as keywords as in TRL, its valid results, and the errors of
rewards.

A function gets the arguments that its signature names, or all of them if it takes **kwargs. If names clash, the run's
own win over the section's `arguments`, and those over columns of the data.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints
from weakref import WeakKeyDictionary

from pydantic import TypeAdapter, ValidationError

from grpo_async.errors import GrpoAsyncError
from grpo_async.findings.messages import reward_failure
from grpo_async.tracking.catalog import describe
from grpo_async.user_code.calls import NO_SIGNATURE, Parameters, UserCall, own_copy, read_numbers
from grpo_async.utils.validation import problems_of

logger = logging.getLogger(__name__)

RewardCallable = Callable[..., Any]
Reward = TypeVar("Reward", bound=RewardCallable)

_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, asyncio.Semaphore]] = WeakKeyDictionary()

ENVIRONMENTS = "environments"
POLICY = "policy"
"""The run's own servers as an async function (scoring.served_policy), for rewards whose signature names it: the name stays free for
columns and arguments."""
ALWAYS_OFFERED = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"})
OFFERED = ALWAYS_OFFERED | {ENVIRONMENTS}
"""Arguments that every reward may ask for; no column of the data can have such a name."""
# TRL's documentation has this spelling in its examples; only functions that name the alias get it.
ALIASES = {"completions_ids": "completion_ids"}


def shared_slots(what: Hashable, count: int) -> asyncio.Semaphore:
    """A semaphore for `count` users of `what`, shared by all calls of all rewards on the running loop."""
    return _slots.setdefault(asyncio.get_running_loop(), {}).setdefault((what, count), asyncio.Semaphore(count))


def with_checked_arguments(reward: Reward) -> Reward:
    """Give a reward a `check_arguments` (see `load_rewards`) that compares the arguments with the annotations of its signature."""

    def check(arguments: Mapping[str, Any]) -> None:
        hints = get_type_hints(reward, include_extras=True)
        for name, value in arguments.items():
            if name not in hints:
                continue
            try:
                TypeAdapter(hints[name]).validate_python(value, strict=True)
            except ValidationError as error:
                raise ValueError(f"{name}: {value!r}: {problems_of(error)}") from error

    reward.check_arguments = check  # type: ignore[attr-defined]
    return reward


class RewardError(GrpoAsyncError):
    """A reward function failed one call; only the group of that call is lost."""

    def __init__(self, name: str, problem: str, is_lost: bool = False) -> None:
        self.name, self.problem, self.is_lost = name, problem, is_lost
        super().__init__(name, problem)

    def __str__(self) -> str:
        return reward_failure(self.name, self.problem)


@dataclass(slots=True, kw_only=True)
class TrainerState:
    """What a reward function may read about the progress of the run: the fields of transformers' class of this name, whose import
    takes seconds in every worker process. Those that a run here has no value for keep its defaults."""

    epoch: float = 0.0
    global_step: int = 0  # optimizer steps done
    max_steps: int = 0  # optimizer steps of the run
    logging_steps: int = 1
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None  # completions of a step
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0
    log_history: list[dict[str, float]] = field(
        default_factory=list
    )  # the metrics of the last 100 steps since the start
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome:
    """Result of one call."""

    values: list[float | None]  # [num_completions]; None = not applicable
    extra_columns: dict[str, list[Any]] = field(default_factory=dict)  # from log_extra: column -> [num_completions]
    metrics: dict[str, float] = field(default_factory=dict)  # from log_metric; several calls of one name are averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """The arguments of one call; every list has one entry per completion. Picklable if the columns are and there are no
    `environments` and no `policy`: those are live objects. None = the run has none."""

    name: str
    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    trainer_state: TrainerState = field(default_factory=TrainerState)
    environments: Sequence[Any] | None = None
    policy: Callable[..., Any] | None = None

    def call(self, function: RewardCallable) -> UserCall[RewardOutcome]:
        """The call of `function` with these arguments; TypeError if its signature cannot be read."""
        extra_columns: dict[str, list[Any]] = {}
        metrics: dict[str, list[float]] = {}

        def log_extra(column: str, values: Sequence[Any]) -> None:
            values = list(values)
            if len(values) != len(self.completions):
                raise ValueError(
                    f"log_extra({column!r}) got {len(values)} values for {len(self.completions)} completions"
                )
            extra_columns[column] = own_copy(values)  # the function may go on changing them

        def log_metric(name: str, value: float) -> None:
            if describe(str(name)).is_known:
                raise ValueError(
                    f"log_metric({name!r}): this is a metric of the run itself; choose another name, such as "
                    f"'{self.name}/{name}'"
                )
            if math.isfinite(number := float(value)):
                metrics.setdefault(str(name), []).append(number)
            else:
                logger.warning("log_metric(%r) got %s, which is ignored: the mean would not be a number", name, number)

        def finish(raw: Any) -> RewardOutcome:
            try:
                numbers = read_numbers(raw, len(self.completions), of="completion")
            except ValueError as error:
                hint = "; if it makes reward functions, name in the config what it made" if callable(raw) else ""
                raise RewardError(self.name, f"{error}{hint}") from error
            means = {name: sum(values) / len(values) for name, values in metrics.items()}
            return RewardOutcome(values=numbers, extra_columns=extra_columns, metrics=means)

        parameters = read_parameters(function)
        offered: dict[str, Any] = {
            **{column: list(values) for column, values in self.columns.items()},
            **self.arguments,
            "prompts": list(self.prompts),
            "completions": list(self.completions),
            "completion_ids": list(self.completion_ids),
            "trainer_state": self.trainer_state,
            "log_extra": log_extra,
            "log_metric": log_metric,
        }
        chosen = parameters.choose(offered)
        for alias, name in ALIASES.items():
            if alias in parameters.names and alias not in chosen:
                chosen[alias] = offered[name]
        live = {} if self.environments is None else parameters.choose({ENVIRONMENTS: list(self.environments)})
        if self.policy is not None and POLICY in parameters.names and POLICY not in chosen:
            live[POLICY] = self.policy
        return UserCall(function, chosen, finish, live)


def read_parameters(function: RewardCallable) -> Parameters:
    """The parameters of `function`; TypeError says why it cannot be called with keywords only."""
    try:
        parameters = Parameters.of(function)
    except ValueError as error:
        raise TypeError(f"it {NO_SIGNATURE}") from error
    if parameters.by_position:
        names = list(parameters.by_position)
        raise TypeError(f"its parameters {names} are positional-only, but rewards are called with keywords")
    if not parameters.names and not parameters.takes_any:
        raise TypeError("it takes no keyword arguments; a reward is `f(completions, **kwargs) -> list of floats`")
    return parameters
