"""Prompts: from a file or a dataset to an endless, reproducible stream.

Source -> load_rows -> list of rows -> PromptStream -> Prompt, Prompt, ...
"""

from grpo_async.data.sources import load_rows
from grpo_async.data.stream import PromptStream, make_prompt

__all__ = ["PromptStream", "load_rows", "make_prompt"]
