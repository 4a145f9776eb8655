"""Reward functions as people write them for TRL's GRPOTrainer; nothing here knows of this package."""

import asyncio
import functools
import re


def length_in_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def documented_spelling(completions_ids, **kwargs):
    return [float(len(ids)) for ids in completions_ids]


def all_three(prompts, completions, completion_ids, **kwargs):
    return [float(len(p) + len(c) + len(i)) for p, c, i in zip(prompts, completions, completion_ids, strict=True)]


def boxed_reward(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if content == truth else 0.0 for content, truth in zip(contents, ground_truth, strict=True)]


async def async_reward(prompts, completions, ground_truth, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if truth in completion else 0.0 for completion, truth in zip(completions, ground_truth, strict=True)]


def counter_reward(environments, **kwargs):
    return [float(env.counter) for env in environments]


def counter_from_kwargs(completions, **kwargs):
    return [float(env.counter) if hasattr(env, "counter") else None for env in kwargs["environments"]]


def counter_if_there_is_one(completions, environments=None, **kwargs):
    if environments is None:
        return [None] * len(completions)
    return [float(env.counter) for env in environments]


async def async_counter_reward(prompts, completions, environments, **kwargs):
    await asyncio.sleep(0)
    return [float(env.counter) for env in environments]


class LengthTarget:
    def __init__(self, target):
        self.target = target

    def __call__(self, completions, **kwargs):
        return [-abs(len(completion) - self.target) for completion in completions]


class AsyncJudge:
    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0)
        return [float("please" in completion) for completion in completions]


def scaled(completions, factor, **kwargs):
    return [factor * len(completion) for completion in completions]


length_target = LengthTarget(5)
async_judge = AsyncJudge()
scaled_by_ten = functools.partial(scaled, factor=10)
async_partial = functools.partial(async_reward)
