"""Turns the `rewards` sections of a config into reward functions; all problems in one ConfigError, with their paths.

A function may carry an attribute `check_arguments(arguments)`, which gets the section's `arguments` and raises ValueError
where they cannot be used: a typing error then stops the start and not every group (see `checked_by`).
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_async.config.interaction_sections import RewardSection
from grpo_async.errors import ConfigError
from grpo_async.rewards.arguments import CHECK, ArgumentCheck
from grpo_async.rewards.call import ENVIRONMENTS, OFFERED, own_name, read_parameters
from grpo_async.rewards.function import RewardFunction
from grpo_async.user_code.calls import unwrap_partial
from grpo_async.user_code.loop import UserLoop
from grpo_async.user_code.references import resolve_function


def load_rewards(sections: Sequence[RewardSection]) -> list[RewardFunction]:
    """Import and check every reward function. Starts no process or thread.

    Raises:
        ConfigError: some cannot be found, imported or called as a reward; the message has one line for each.
    """
    rewards: list[RewardFunction] = []
    loop = UserLoop("async rewards")  # one for all: an HTTP client or a lock that two of them share belongs to one loop
    problems: list[str] = []
    for index, section in enumerate(sections):
        try:
            rewards.append(load_reward(section, f"rewards.{index}", loop=loop))
        except ConfigError as error:
            problems.append(str(error))
    problems.extend(_names_used_twice(rewards))
    if problems:
        raise ConfigError("\n".join(problems))
    return rewards


def load_reward(
    section: RewardSection, path: str, *, num_workers: int | None = None, loop: UserLoop | None = None
) -> RewardFunction:
    """Import and check one; `path` is that of its section (`rewards.0`), for errors. The others: see RewardFunction."""
    where = f"{path}.function: {section.function}"
    function = resolve_function(section.function, where)
    try:
        parameters = read_parameters(function)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error
    for argument in section.arguments:
        if argument in OFFERED:
            raise ConfigError(
                f"{path}.arguments.{argument}: every reward gets `{argument}` from the run; choose another name"
            )
        if not parameters.accepts(argument):
            raise ConfigError(
                f"{path}.arguments.{argument}: {section.function} takes no `{argument}`; "
                f"it takes {sorted(parameters.names)}"
            )
    if section.run_in == "process" and ENVIRONMENTS in parameters.required:
        raise ConfigError(
            f"{path}.run_in: process: {section.function} needs `environments`, which are live objects of this process and "
            "cannot be sent to another one; leave out `run_in`, or score in the environment's `get_reward`"
        )
    check: ArgumentCheck | None = getattr(unwrap_partial(function), CHECK, None)
    if check is not None:
        try:
            check(section.arguments)
        except ValueError as error:
            raise ConfigError(f"{path}.arguments.{error}") from error
    attribute = section.function.rpartition(":")[2].rpartition(".")[2]
    name = own_name(function)
    return RewardFunction(
        function,
        name=section.name or (attribute if name == "<lambda>" else name),
        weight=section.weight,
        arguments=section.arguments,
        run_in=section.run_in,
        timeout_s=section.timeout_s,
        reference=section.function,
        setting=path,
        num_workers=num_workers,
        loop=loop,
    )


def _names_used_twice(rewards: Sequence[RewardFunction]) -> list[str]:
    names = [reward.name for reward in rewards]
    twice = sorted({name for name in names if names.count(name) > 1})
    return [f"rewards: the name `{name}` belongs to more than one function; give each a `name`" for name in twice]
