"""On-policy distillation (arXiv 2306.13649; Thinking Machines Lab, "On-Policy Distillation", 2025): teachers score what the policy
sampled, and the loss adds weight x (teacher's - policy's log-probability) to the advantage of each token. Its mean over samples of
the policy is the gradient of the reverse KL divergence from the teacher."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from grpo_async.config.sections import DistillationSection, TeacherSection
from grpo_async.errors import ConfigError
from grpo_async.records import FloatArray, Prompt, RolloutCompletion, RolloutGroup, TokenPath
from grpo_async.rewards.call import shared_slots
from grpo_async.rewards.served_model import ServedModelError, open_client, post_json, token_of
from grpo_async.utils.concurrency import all_of
from grpo_async.utils.text import clipped

DISTILLATION = "distillation"
"""Name of the reward that shows what teachers say: minus the reverse KL divergence, in nats per token."""

Score = Callable[[Sequence[int]], Awaitable[Sequence[float]]]
"""Log-probabilities of all tokens but the first, each given those before it."""


class Teachers:
    """Score paths of completions. `own` scores by the policy, on the servers of the run; `teacher_prompt_ids` gives the tokens of a
    prompt of the data in which `prompt_column` takes the prompt's place."""

    def __init__(
        self, section: DistillationSection, *, own: Score, teacher_prompt_ids: Callable[[Prompt, Any], Sequence[int]]
    ) -> None:
        self._section = section
        self._prompt_ids = teacher_prompt_ids
        self._scores = {
            name: own if teacher.url is None else _VllmTeacher(teacher) for name, teacher in section.teachers.items()
        }

    async def score(
        self, group: RolloutGroup, completions: Sequence[RolloutCompletion]
    ) -> dict[str, tuple[FloatArray, float]]:
        """For each path of each completion that is trained, by sample id: the sum over its teachers of weight x log-probability of
        each of its completion's tokens, and the sum of the weights."""
        chosen = self._section.teachers_of(group.prompt.columns)
        paths = {
            completion.sample_id(path): path
            for completion in completions
            for path in completion.paths
            if path.completion_mask.any()
        }

        async def score(path: TokenPath) -> tuple[FloatArray, float]:
            parts = await all_of(self._score(name, group.prompt, path) for name in chosen)
            weights = [self._section.teachers[name].weight for name in chosen]
            total = sum(weight * part for weight, part in zip(weights, parts, strict=True))
            return np.asarray(total, np.float32), sum(weights)

        results = await all_of(map(score, paths.values()))
        return dict(zip(paths, results, strict=True))

    async def _score(self, name: str, prompt: Prompt, path: TokenPath) -> FloatArray:
        column = self._section.teachers[name].prompt_column
        before = path.prompt_ids if column is None else self._prompt_ids(prompt, prompt.columns[column])
        logprobs = await self._scores[name]([*map(int, before), *path.completion_ids.tolist()])
        return np.asarray(logprobs[len(before) - 1 :], np.float32)


class _VllmTeacher:
    """A model that `vllm serve` serves, by the log-probabilities of the prompt that `/v1/completions` returns."""

    def __init__(self, section: TeacherSection) -> None:
        assert section.url is not None
        self._url = f"{section.url.rstrip('/').removesuffix('/v1')}/v1/completions"
        self._section = section
        try:
            token_of(section.token_env)
        except ValueError as error:
            raise ConfigError(f"distillation: {error}") from error

    async def __call__(self, token_ids: Sequence[int]) -> Sequence[float]:
        name = self._section.served_model_name
        # one token more is generated: vLLM has no request without
        body = {"prompt": list(token_ids), "max_tokens": 1, "prompt_logprobs": 0} | ({"model": name} if name else {})
        async with (
            shared_slots(self._url, self._section.max_concurrency),
            open_client(self._section.token_env, timeout_s=self._section.timeout_s) as client,
        ):
            answer = await post_json(client, self._url, json.dumps(body).encode())
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
            return [
                float(entry[str(token)]["logprob"]) for entry, token in zip(entries[1:], token_ids[1:], strict=True)
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServedModelError(
                f"{self._url}: expected the log-probabilities of {len(token_ids)} tokens in `prompt_logprobs`, as vLLM sends them, "
                f"got {clipped(repr(answer), 200)}"
            ) from error
