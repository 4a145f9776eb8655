"""Rollout functions as users of TRL write them; nothing of this package is imported."""

from __future__ import annotations

calls = []


def rollout_func(prompts, trainer):
    """One completion for each prompt: the length of its text, then the end of the turn (2)."""
    calls.append((list(prompts), trainer.state.global_step))
    tokenizer = trainer.processing_class
    prompt_ids = [tokenizer(_text(prompt))["input_ids"] for prompt in prompts]
    completion_ids = [[len(ids) + index % trainer.args.num_generations, 2] for index, ids in enumerate(prompt_ids)]
    for prompt in prompts:  # raw and ours alone: changing it must not change anybody else's
        if isinstance(prompt, list):
            prompt.append({"role": "assistant", "content": "changed"})
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": [[-0.25, -0.5] for _ in prompts],
        "env_reward": [float(index) for index in range(len(prompts))],
        "source": "games",
    }


def generating_rollout_func(prompts, trainer):
    outputs = trainer.generate(prompts, generation_overrides={"temperature": 0.5})
    return {key: [output[key] for output in outputs] for key in ("prompt_ids", "completion_ids", "logprobs")}


def masked_rollout_func(prompts, trainer):
    """Two sampled tokens, two of the environment, one sampled."""
    count = len(prompts)
    return {
        "prompt_ids": [[1]] * count,
        "completion_ids": [[5, 6, 90, 91, 2]] * count,
        "logprobs": [[-0.1, -0.2, 0.0, 0.0, -0.3]] * count,
        "env_mask": [[1, 1, 0, 0, 1]] * count,
    }


def _text(prompt):
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]
