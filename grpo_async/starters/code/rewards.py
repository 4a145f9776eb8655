"""Rewards in addition to the tests. A reward function gets all completions of a prompt."""

import re

BLOCK = re.compile(r"\A\s*```python\n(?:(?!```).)*```\s*\Z", re.DOTALL)


def in_a_block(completions, **_):
    """1.0 where the whole answer is one Python code block, else 0.0."""
    return [
        float(BLOCK.match(completion if isinstance(completion, str) else completion[-1]["content"]) is not None)
        for completion in completions
    ]
