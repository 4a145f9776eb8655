"""Prompts: from a file, a dataset or a function to an endless, reproducible stream.

    Source -> reader -> rename, check, filter -> held-out split, leak check -> rows -> PromptStream -> Prompt, Prompt, ...
              `readers`                            `load_data`                         make_prompt (evaluation)
                               `load_rows`

`sources` has the order of the steps, `identity` says when two rows are the same task.
"""

from grpo_async.data.load import LoadedData, load_data
from grpo_async.data.rows import Row, Rows
from grpo_async.data.sources import first_rows, load_rows
from grpo_async.data.stream import PromptStream, SourceRows, make_prompt

__all__ = [
    "LoadedData",
    "PromptStream",
    "Row",
    "Rows",
    "SourceRows",
    "first_rows",
    "load_data",
    "load_rows",
    "make_prompt",
]
