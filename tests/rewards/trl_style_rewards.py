"""Reward functions as people write them for TRL's GRPOTrainer; nothing here knows of this package."""

import asyncio
import functools
import re


def length_in_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def length_in_characters(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def documented_spelling(completions_ids, **kwargs):
    return [float(len(ids)) for ids in completions_ids]


def all_three(prompts, completions, completion_ids, **kwargs):
    return [float(len(p) + len(c) + len(i)) for p, c, i in zip(prompts, completions, completion_ids, strict=True)]


def format_reward(completions, **kwargs):
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content) else 0.0 for content in contents]


def boxed_reward(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if content == truth else 0.0 for content, truth in zip(contents, ground_truth, strict=True)]


def only_math(prompts, completions, task, **kwargs):
    return [1.0 if kind == "math" else None for kind in task]


async def async_reward(prompts, completions, ground_truth, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if truth in completion else 0.0 for completion, truth in zip(completions, ground_truth, strict=True)]


def logging_reward(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    rewards = [1.0 if c == truth else 0.0 for c, truth in zip(completions, ground_truth, strict=True)]
    if log_extra:
        log_extra("golden_answer", list(ground_truth))
    if log_metric:
        log_metric("accuracy", sum(rewards) / len(rewards))
    return rewards


def curriculum(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step >= trainer_state.max_steps / 2)] * len(completions)


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
