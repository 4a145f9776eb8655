"""The tasks, by the names that `prepare-quickstart --task` takes."""

from __future__ import annotations

from typing import Any

from grpo_async.quickstart.tasks.base import Task
from grpo_async.quickstart.tasks.code import CodeTask
from grpo_async.quickstart.tasks.game import GameTask
from grpo_async.quickstart.tasks.sums import ReasoningGymTask, ThinkTask, ToolTask

__all__ = ["TASKS", "Task"]

_TASKS: tuple[Task[Any], ...] = (ThinkTask(), ToolTask(), GameTask(), CodeTask(), ReasoningGymTask())
TASKS: dict[str, Task[Any]] = {task.name: task for task in _TASKS}
