"""Rewards. A reward function gets all completions of a prompt, and the columns of its row, one value for each completion."""

from grpo_async.rewards.text import after_thinking, final_text


def correct(completions, answer, **_):
    """1.0 where the model's last message, after any thinking, is the answer, else 0.0."""
    return [float(last_text(completion) == gold) for completion, gold in zip(completions, answer, strict=True)]


def last_text(completion):
    """A completion is the list of messages after the prompt: the model's, and the results of tools."""
    last = completion if isinstance(completion, str) else completion[-1:]
    return after_thinking(final_text(last)).strip()
