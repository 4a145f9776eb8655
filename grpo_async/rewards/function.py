"""A reward function with its name, weight, place to run and time limit, and how the config's `rewards` are loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from grpo_async.config.sections import RewardSection
from grpo_async.errors import ConfigError, Problems
from grpo_async.rewards.call import (
    ALIASES,
    ALWAYS_OFFERED,
    ENVIRONMENTS,
    OFFERED,
    POLICY,
    RewardCallable,
    RewardError,
    RewardOutcome,
    RewardRequest,
    TrainerState,
    read_parameters,
)
from grpo_async.user_code.calls import Caller, CallError, own_name, process_hint, unwrap_partial
from grpo_async.user_code.references import resolve_function
from grpo_async.user_code.threads import ThreadRunner, UserLoop
from grpo_async.user_code.workers import WorkerPool
from grpo_async.utils.text import duplicates

OPENED = "opened_by_template"


class RewardFunction:
    """Calls one reward function.

    An async function runs on an event loop apart from the run's, which it may block; a plain one runs in a thread;
    `run_in="process"` runs either in worker processes, which are killed on timeout.
    """

    def __init__(
        self,
        function: RewardCallable,
        *,
        name: str | None = None,
        weight: float = 1.0,  # in the sum of the rewards; not applied here
        arguments: Mapping[str, Any] | None = None,
        run_in: Literal["thread", "process"] = "thread",
        timeout_s: float = 60.0,
        reference: str | None = None,  # `module:attribute` of the function; needed for `run_in="process"`
        setting: str = "rewards",  # dotted path of its section in the config, for errors
        loop: UserLoop | None = None,  # of an async function; `close` ends it
    ) -> None:
        self.name = name or own_name(function)
        self.weight = weight
        self._function = function
        self._parameters = read_parameters(function)
        self._arguments = dict(arguments or {})
        self._setting = setting
        self._loop = loop or UserLoop(f"reward-{self.name}")
        self._caller = Caller(ThreadRunner(f"reward-{self.name}"), timeout_s, loop=self._loop)
        self._pool: WorkerPool | None = None
        loads = getattr(unwrap_partial(function), "is_loaded_first", False)
        if run_in == "process" or loads:
            if reference is None:
                raise TypeError("run_in='process' needs `reference`: workers import the function by its name")
            empty = RewardRequest(
                name=self.name, prompts=(), completions=(), completion_ids=(), arguments=self._arguments
            )
            self._pool = WorkerPool(f"reward-{self.name}", reference, first=empty if loads else None)

    def __repr__(self) -> str:
        return f"RewardFunction({self.name!r}, weight={self.weight})"

    @property
    def timeout_s(self) -> float:
        """Time limit of one call."""
        return self._caller.timeout_s

    def has_parameter(self, name: str) -> bool:
        """Whether the signature has a parameter with this name (**kwargs does not count)."""
        return name in self._parameters.names

    @property
    def live_inputs(self) -> list[str]:
        """Those of `environments` and `policy` that the function requires."""
        return sorted({ENVIRONMENTS, POLICY}.intersection(self._parameters.missing(self._arguments)))

    def missing_inputs(
        self,
        columns: Iterable[str],
        *,
        has_environments: bool = False,
        has_policy: bool = True,
        source: str = "data.train",
    ) -> str | None:
        """What is missing and how to fix it, as the end of a sentence that begins with the function's name; None if
        nothing is: "needs the column(s) ['answer'], but the data has ['solution']; rename with ..."."""
        columns = sorted(columns)
        offered = {*(OFFERED if has_environments else ALWAYS_OFFERED), *([POLICY] if has_policy else [])}
        missing = self._parameters.missing({*offered, *ALIASES, *self._arguments, *columns})
        if ENVIRONMENTS in missing:
            return "needs `environments`, but the run has none; give it a section `environments`, or give the parameter a default"
        if POLICY in missing:
            return "asks the policy, which answers only in a run or an evaluation"
        if missing:
            return (
                f"needs the column(s) {missing}, but the data has {columns}; rename with `{source}.columns`, "
                f"or set them in `{self._setting}.arguments`"
            )
        return None

    async def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        *,
        trainer_state: TrainerState | None = None,
        environments: Sequence[Any] | None = None,
        policy: Callable[..., Any] | None = None,
    ) -> RewardOutcome:
        """Score completions; every list has one entry per completion, columns included.

        `environments` are the user's own instances, None if the run has none; `policy` asks the run's servers. They are live
        objects, so functions in worker processes do not get them.

        `timeout_s` counts once the call runs; before that it may wait for earlier calls, which have the same limit.

        Raises:
            RewardError: the function raised, took too long, died with its process, or returned something unusable.
        """
        request = RewardRequest(
            name=self.name,
            prompts=prompts,
            completions=completions,
            completion_ids=completion_ids,
            columns=columns,
            arguments=self._arguments,
            trainer_state=trainer_state or TrainerState(),
            environments=environments,
            policy=policy,
        )
        if not completions:
            return RewardOutcome(values=[])
        missing = self.missing_inputs(columns, has_environments=environments is not None, has_policy=policy is not None)
        if missing is not None:
            raise RewardError(self.name, missing)
        try:
            if self._pool is not None:
                outcome: RewardOutcome = await self._pool.run(
                    dataclasses.replace(request, environments=None, policy=None),
                    self.timeout_s,
                )
                return outcome
            return await self._caller.run(request.call(self._function))
        except CallError as error:
            if isinstance(error.error, RewardError):
                raise error.error from error.error.__cause__
            hint = f"; raise `{self._setting}.timeout_s` if this is expected" if error.is_timeout else ""
            hint += process_hint(error.error, self._setting)
            if error.error is None and self._pool is None:
                hint += f"; {'or ' if hint else ''}set `{self._setting}.run_in: process`: worker processes are killed on timeout"
            raise RewardError(self.name, f"{error.problem}{hint}", error.is_lost) from error.origin

    def close(self) -> None:
        """End the worker processes and the event loop, if any. Safe to call twice."""
        self._loop.close()
        if self._pool is not None:
            self._pool.close()


def load_rewards(sections: Sequence[RewardSection], *, opened_by_template: bool = False) -> list[RewardFunction]:
    """Import and check every reward function. Starts no process or thread.

    A function with a parameter `opened_by_template` gets whether the chat template begins the policy's thinking, unless the
    section's `arguments` say so.

    A function may have three attributes. `check_arguments(arguments)` gets the section's `arguments`, in which one without a
    default may be missing, and raises ValueError("NAME: what is wrong"): a typo then stops the start, instead of failing every
    group. With `is_loaded_first = True` it always runs in one worker process, whose first call, without completions, loads
    something large, with the time limit of a worker's start instead of the section's `timeout_s`. `startup_notes(...)` gets those
    of the `arguments` that it names, and returns lines for the start of the run, or raises ConfigError.

    Raises:
        ConfigError: some function cannot be found, imported or called as a reward; the message has a line for each.
    """
    rewards: list[RewardFunction] = []
    loop = UserLoop("async rewards")  # one loop for all: an HTTP client or lock that two functions share belongs to one
    problems = Problems()
    for index, section in enumerate(sections):
        with problems.collecting():
            rewards.append(load_reward(section, f"rewards.{index}", loop=loop, opened_by_template=opened_by_template))
    names = [reward.name for reward in rewards]
    problems.extend(
        f"rewards: the name `{name}` belongs to more than one function; give each a `name`"
        for name in duplicates(names)
    )
    problems.raise_if_any()
    return rewards


def load_reward(
    section: RewardSection, path: str, *, loop: UserLoop | None = None, opened_by_template: bool = False
) -> RewardFunction:
    """Import and check one reward; `path` is that of its section (`rewards.0`), for errors. See RewardFunction for `loop`."""
    where = f"{path}.function: {section.reference}"
    function = resolve_function(section.reference, where)
    try:
        parameters = read_parameters(function)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error
    for argument in section.keywords:
        if argument in OFFERED:
            raise ConfigError(
                f"{path}.arguments.{argument}: every reward gets `{argument}` from the run; choose another name"
            )
        if not parameters.accepts(argument):
            raise ConfigError(
                f"{path}.arguments.{argument}: {section.reference} takes no `{argument}`; "
                f"it takes {sorted(parameters.names)}"
            )
    live = {ENVIRONMENTS, POLICY}.intersection(parameters.missing(section.keywords))
    if section.run_in == "process" and live:
        raise ConfigError(
            f"{path}.run_in: process: {section.reference} needs {sorted(live)}, live objects of this process that cannot be sent "
            "to another one; leave out `run_in`, or score in the environment's `get_reward`"
        )
    check = getattr(unwrap_partial(function), "check_arguments", None)
    try:
        if check is not None:
            check(section.keywords)
    except ValueError as error:
        raise ConfigError(f"{path}.arguments.{error}") from error
    name = own_name(function) if section.model is None else section.own_name
    if name == "<lambda>":
        name = section.own_name.rpartition(".")[2]
    return RewardFunction(
        function,
        name=section.name or name,
        weight=section.weight,
        arguments=({OPENED: opened_by_template} if OPENED in parameters.names else {}) | section.keywords,
        run_in=section.run_in,
        timeout_s=section.timeout_s,
        reference=section.reference,
        setting=path,
        loop=loop,
    )
