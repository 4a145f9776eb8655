"""The tasks, one module each, by the name that `prepare-quickstart --task` takes."""

from __future__ import annotations

from typing import Any

from grpo_async.quickstart.tasks.base import Task
from grpo_async.quickstart.tasks.code import CodeTask
from grpo_async.quickstart.tasks.game import GameTask
from grpo_async.quickstart.tasks.reasoning_gym import ReasoningGymTask
from grpo_async.quickstart.tasks.think import ThinkTask
from grpo_async.quickstart.tasks.tool import ToolTask

__all__ = ["TASKS", "Task"]

_TASKS: tuple[Task[Any], ...] = (ThinkTask(), ToolTask(), GameTask(), CodeTask(), ReasoningGymTask())
TASKS: dict[str, Task[Any]] = {task.name: task for task in _TASKS}
