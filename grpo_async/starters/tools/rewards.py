"""Rewards. A reward function gets all completions of a prompt, and the columns of its row, one value for each completion."""


def correct(completions, answer, **_):
    """1.0 where the model's last message is the answer, else 0.0."""
    return [float(last_text(completion) == gold) for completion, gold in zip(completions, answer, strict=True)]


def last_text(completion):
    """A completion is the list of messages after the prompt: the model's, and the results of tools."""
    if isinstance(completion, str):
        return completion.strip()
    last = completion[-1] if completion else {}
    return (last.get("content") or "").strip() if last.get("role") == "assistant" else ""
