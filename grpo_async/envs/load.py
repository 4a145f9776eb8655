"""Turns the `environments` section of a config into pools; all problems in one ConfigError, with their paths.

One instance of each is made for inspection, and kept as the first of its pool.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_async.config.sections import EnvironmentSection
from grpo_async.data.rows import ENVIRONMENT_COLUMN
from grpo_async.envs.environment import Environment, EnvironmentCallError, EnvironmentKind, examine
from grpo_async.envs.pool import Construction, EnvironmentPool
from grpo_async.errors import ConfigError, Problems
from grpo_async.tools.schema import UnusableError
from grpo_async.tools.tool import Tool
from grpo_async.user_code.calls import is_async
from grpo_async.user_code.references import resolve
from grpo_async.utils.text import did_you_mean


class Environments:
    """The configured environments, and the choice of one for each row."""

    def __init__(self, pools: Mapping[str, EnvironmentPool]) -> None:
        self.pools = dict(pools)

    @property
    def reward_weights(self) -> dict[str, float]:
        """Weight by name, for those with a `get_reward`: {"GuessingGame": 1.0}."""
        kinds = [pool.kind for pool in self.pools.values()]
        return {kind.reward_name: kind.section.reward_weight for kind in kinds if kind.reward_name is not None}

    @property
    def all_have_rewards(self) -> bool:
        """Whether every environment has a `get_reward`, so that no reward function is needed."""
        return all(pool.kind.reward_name is not None for pool in self.pools.values())

    @property
    def notes(self) -> list[str]:
        """Notes for the user at startup."""
        return [note for pool in self.pools.values() for note in pool.kind.notes]

    def for_row(self, columns: Mapping[str, Any]) -> EnvironmentPool:
        """The pool that the column `environment` names; without that column, the only pool."""
        names = list(self.pools)
        if ENVIRONMENT_COLUMN not in columns:
            if len(names) == 1:
                return self.pools[names[0]]
            raise ConfigError(
                f"the column `{ENVIRONMENT_COLUMN}` is missing, which says which of the environments {names} a row uses"
            )
        value = columns[ENVIRONMENT_COLUMN]
        if isinstance(value, str) and value in self.pools:
            return self.pools[value]
        raise ConfigError(
            f"the column `{ENVIRONMENT_COLUMN}` says {value!r}, but the environments are {names}{did_you_mean(str(value), names)} "
            "(if the column means something else, rename it with `data.train.columns`)"
        )

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Problems of these rows (columns and `prompt`): one sentence for each kind of problem, with its first row."""
        first: dict[str, int] = {}
        for index, row in enumerate(rows):
            try:
                self.for_row(row).kind.reset_arguments(row)
            except (ConfigError, EnvironmentCallError) as error:
                first.setdefault(str(error), index)
        return [f"row {index}: {problem}" for problem, index in first.items()]

    async def aclose(self) -> None:
        """End all instances. Bounded by the environments' time limits; safe to call twice."""
        await asyncio.gather(*(pool.aclose() for pool in self.pools.values()))


def load_environments(sections: Mapping[str, EnvironmentSection], extra_tools: Sequence[Tool] = ()) -> Environments:
    """Import every environment and inspect one instance of each. Waits for their construction.

    Raises:
        ConfigError: some environment cannot be found, imported, constructed or used; the message has a line for each problem.
    """
    pools: dict[str, EnvironmentPool] = {}
    problems = Problems()
    schemas = [tool.schema for tool in extra_tools]
    for name, section in sections.items():
        with problems.collecting():
            kind, probe = _load(name, section, selected_by_column=len(sections) > 1)
            pools[name] = EnvironmentPool(kind, probe, schemas)
            problems.extend(
                f"{kind.setting}.factory: {section.factory}: its method `{clash}` has the name of one of the `tools`; rename one"
                for clash in sorted({tool.name for tool in extra_tools} & set(kind.specs))
            )
    problems.extend(_contradicting_weights([pool.kind for pool in pools.values()]))
    if problems:
        for pool in pools.values():
            pool.discard_free()
    problems.raise_if_any()
    return Environments(pools)


def _load(name: str, section: EnvironmentSection, *, selected_by_column: bool) -> tuple[EnvironmentKind, Environment]:
    where = f"environments.{name}.factory: {section.factory}"
    try:
        factory = resolve(section.factory)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if is_async(factory):
        raise ConfigError(f"{where}: is async; instances are made in a thread, so write it as a plain function")
    construction = Construction(name, factory, section)
    concurrent.futures.wait({construction.future}, timeout=section.timeout_s)
    try:
        probe = construction.finish()
        kind = examine(probe, name=name, factory=factory, section=section, selected_by_column=selected_by_column)
    except (EnvironmentCallError, UnusableError) as error:
        construction.give_up()
        problems = error.problems if isinstance(error, UnusableError) else [error.problem]
        raise ConfigError("\n".join(f"{where}: {problem}" for problem in problems)) from error
    return kind, Environment(probe, kind, construction.thread)


def _contradicting_weights(kinds: Sequence[EnvironmentKind]) -> list[str]:
    """A class is one reward with one weight, even under two names."""
    return [
        f"environments: {one.name} and {other.name} are both {one.reward_name}, which is one reward, but their `reward_weight` "
        "differ; give them the same"
        for one, other in itertools.combinations(kinds, 2)
        if one.reward_name is not None
        and one.reward_name == other.reward_name
        and one.section.reward_weight != other.section.reward_weight
    ]
