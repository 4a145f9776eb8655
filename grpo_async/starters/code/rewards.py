"""Rewards in addition to the tests. A reward function gets all completions of a prompt."""

import re

from grpo_async.rewards.text import after_thinking, final_text

BLOCK = re.compile(r"\A\s*```python\n(?:(?!```).)*```\s*\Z", re.DOTALL)


def in_a_block(completions, **_):
    """1.0 where the whole answer, after any thinking, is one Python code block, else 0.0."""
    return [float(BLOCK.match(after_thinking(final_text(completion))) is not None) for completion in completions]
