"""Tools: typed functions that the model may call.

`load_tools` makes them from the config, `ToolExecutor` answers the calls of one turn. Shipped: `calculator`
(grpo_async.tools.calculator:calculator) and a sandboxed Python (grpo_async.tools.python:run_python).
"""

from grpo_async.tools.results import ToolError
from grpo_async.tools.tool import MAX_CALLS_PER_TURN, Tool, ToolExecutor, load_tools, tools_of_row

__all__ = ["MAX_CALLS_PER_TURN", "Tool", "ToolError", "ToolExecutor", "load_tools", "tools_of_row"]
