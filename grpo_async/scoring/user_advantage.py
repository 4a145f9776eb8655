"""A user's own advantage function: found and checked at the start, and its results checked at every call."""

from __future__ import annotations

import math
from collections.abc import Iterable

from grpo_async.config.loss_sections import AdvantageSection
from grpo_async.errors import RunError
from grpo_async.records import LARGEST_REWARD
from grpo_async.scoring.advantages import Rewards
from grpo_async.user_code.references import resolve_plain_function


class UserAdvantage:
    """f(rewards: list[float | None], **arguments) -> one finite number for each reward. It is called on the rollout thread's event
    loop, so it has to be quick.

    Args:
        section: with `type: custom`.

    Raises:
        ConfigError: the function is not there, is a coroutine, or does not take what it would be given.
    """

    def __init__(self, section: AdvantageSection) -> None:
        assert section.function is not None
        self._name = section.function
        self._arguments = dict(section.arguments)
        self._function = resolve_plain_function(
            section.function,
            "advantage.function",
            given={"rewards": [0.0, None]},
            arguments=self._arguments,
            turns="numbers to turn into numbers",
        )

    def __call__(self, rewards: Rewards) -> list[float]:
        """Advantages of one group, [num_completions]; unscored rewards get 0, whatever the function says.

        Raises:
            RunError: it raised, or returned something else than one finite number for each reward.
        """
        try:
            result = self._function(list(rewards), **self._arguments)
        except Exception as error:  # anything may be raised by code that is not ours: it fails this group
            raise RunError(f"advantage {self._name} raised {type(error).__name__}: {error}") from error
        values = self._checked(result, len(rewards))
        return [0.0 if reward is None else value for reward, value in zip(rewards, values, strict=True)]

    def _checked(self, result: object, count: int) -> list[float]:
        if not isinstance(result, Iterable) or isinstance(result, str | bytes):
            raise RunError(
                f"advantage {self._name} returned a {type(result).__name__}; it is to return a list of {count} numbers"
            )
        entries = list(result)
        if len(entries) != count:
            raise RunError(f"advantage {self._name} returned {len(entries)} advantages for {count} rewards")
        values = []
        for index, entry in enumerate(entries):
            try:
                value = math.nan if isinstance(entry, str | bytes) else float(entry)
            except (TypeError, ValueError):
                value = math.nan
            if not abs(value) <= LARGEST_REWARD:
                raise RunError(
                    f"advantage {self._name} returned {entry!r} for reward {index}; it is to be a finite number of at most "
                    f"{LARGEST_REWARD:g}"
                )
            values.append(value)
        return values
