"""How the rewards of a run are compared: the advantages of a group as far as they follow from it alone, then those of a step.

    of_group      when a group is scored: final for group, none, rloo and custom; decides for all whether there is a signal
    over_step     when the groups of a step are taken: what needs them all (batch, normalize_each)

`over_step` goes by the rewards alone, never by the advantages that stand in the samples: it may be called again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from grpo_async.config.sections import AdvantageSection
from grpo_async.errors import RunError
from grpo_async.records import RolloutSample, ScoredGroup
from grpo_async.scoring.advantages import (
    Rewards,
    batch_advantages,
    group_advantages,
    leave_one_out_advantages,
    normalize_each,
    normalized_over_step,
)
from grpo_async.user_code.calls import Raised, read_numbers
from grpo_async.user_code.references import resolve_plain_function

Value = TypeVar("Value")


class Advantages:
    """See the module's docstring.

    Args:
        section: what the config says.
        weights: of every reward, by name.

    Raises:
        ConfigError: the user's own function cannot be used.
    """

    def __init__(self, section: AdvantageSection, weights: Mapping[str, float]) -> None:
        self._section = section
        self._weights = weights
        self._custom = UserAdvantage(section) if section.type == "custom" else None

    def of_group(self, rewards: Rewards, parts: Sequence[Mapping[str, float | None]]) -> list[float]:
        """Advantages of one group, [num_completions]. What `over_step` completes is not divided by the std of the step yet,
        and has the sign of the final one. All are 0 in a group that teaches nothing, and only there.

        Args:
            rewards: summed by weight.
            parts: each reward function on its own.

        Raises:
            RunError: the user's own function failed.
        """
        if self._section.rewards == "normalize_each":
            return [value or 0.0 for value in normalize_each(parts, self._weights)]
        if self._custom is not None:
            return self._custom(rewards)
        if self._section.type == "rloo":
            return leave_one_out_advantages(rewards)
        return group_advantages(rewards, scale="group" if self._section.type == "group" else "none")

    def of_sample(
        self,
        sample: RolloutSample,
        place: int,
        rewards: Rewards,
        parts: Sequence[Mapping[str, float | None]],
    ) -> float:
        """Of a branch with its own reward: what the completion at `place` of its group would have with it."""
        return self.of_group(_with(rewards, place, sample.reward), _with(parts, place, sample.rewards))[place]

    def over_step(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """The groups of a step with their final advantages. The std is over all of them, those without samples too."""
        if self._section.rewards != "normalize_each" and self._section.type != "batch":
            return list(groups)
        rewards, parts = [group.rewards for group in groups], [group.reward_parts for group in groups]
        advantages = self._of_step(rewards, parts)
        changed = []
        for number, group in enumerate(groups):
            places = {each.rollout_id: place for place, each in enumerate(group.group.trainable)}
            samples = []
            for sample in group.samples:
                place = places[sample.root_id]
                advantage = advantages[number][place]
                if sample.rewards != parts[number][place]:  # a branch with its own reward
                    own_rewards = _with(rewards, number, _with(rewards[number], place, sample.reward))
                    own_parts = _with(parts, number, _with(parts[number], place, sample.rewards))
                    advantage = self._of_step(own_rewards, own_parts)[number][place]
                samples.append(replace(sample, advantage=advantage))
            changed.append(replace(group, samples=samples))
        return changed

    def _of_step(
        self, rewards: Sequence[Rewards], parts: Sequence[Sequence[Mapping[str, float | None]]]
    ) -> list[list[float]]:
        """Advantages of the completions of each group."""
        if self._section.rewards == "normalize_each":
            return normalized_over_step([normalize_each(rows, self._weights) for rows in parts])
        return batch_advantages(rewards)


def _with(values: Sequence[Value], place: int, value: Value) -> list[Value]:
    """`values` with another one at `place`."""
    return [*values[:place], value, *values[place + 1 :]]


class UserAdvantage:
    """A user's own advantage function, found and checked at the start, and its results checked at every call:
    f(rewards: list[float | None], **arguments) -> one finite number for each reward. It is called on the rollout thread's event
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
            raised = Raised(error)
            raise RunError(f"advantage {self._name} raised {raised.summary}{raised.place}") from error
        try:
            values = read_numbers(result, len(rewards), of="reward")
            if any(value is None and reward is not None for value, reward in zip(values, rewards, strict=True)):
                raise ValueError("returned None for a reward that is a number")
        except ValueError as error:
            raise RunError(f"advantage {self._name} {error}") from error
        return [0.0 if reward is None else value or 0.0 for reward, value in zip(rewards, values, strict=True)]
