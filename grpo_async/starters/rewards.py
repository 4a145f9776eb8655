"""Rewards. A reward function gets all completions of a prompt, and the columns of its row, one value for each completion."""


def correct(completions, answer, **_):
    """1.0 where the last line says the answer, else 0.0."""
    return [
        float(last_line(completion) == gold.casefold()) for completion, gold in zip(completions, answer, strict=True)
    ]


def brief(completions, **_):
    """From 1.0 for a few words down to 0.0 for 100 and more."""
    return [max(0.0, 1.0 - len(text_of(completion).split()) / 100) for completion in completions]


def last_line(completion):
    lines = text_of(completion).strip().splitlines()
    return lines[-1].strip(" .!*").casefold() if lines else ""


def text_of(completion):
    """A completion is the list of messages that the model wrote, or plain text where the prompt is plain text."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
