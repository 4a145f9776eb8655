"""Rewards. A reward function gets all completions of a prompt, and the columns of its row, one value for each completion."""

from grpo_async.rewards.text import after_thinking, final_text, last_boxed, last_number


def correct(completions, answer, **_):
    r"""1.0 where the last \boxed{} holds the number that `answer` is (0.3 is 3/10), else 0.0."""
    return [
        float((given := boxed_number(completion)) is not None and given == last_number(gold))
        for completion, gold in zip(completions, answer, strict=True)
    ]


def boxed_number(completion):
    return last_number(last_boxed(after_thinking(final_text(completion))) or "")
