"""What is looked at: the run, its store, its token texts; and the way to ask the store without stopping the screen."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from grpo_async.rundir import RunDir
from grpo_async.store.table import RolloutTable
from grpo_async.viewer.runs import EvaluationDir
from grpo_async.viewer.token_text import TokenTexts

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One run, opened. `name` is how the user called it; `texts` the token texts, or the sentence that says why there are none."""

    run: RunDir
    name: str
    table: RolloutTable
    texts: TokenTexts | str
    with_superseded: bool = False

    async def ask(self, question: Callable[[RolloutTable], Answer]) -> Answer:
        """What the store answers; the question runs in a thread.

        Raises:
            QueryError: the query or the sort order is wrong.
            RunError: the store cannot be read, or has no such row.
        """
        return await asyncio.to_thread(question, self.table)

    @property
    def title(self) -> str:
        """'quickstart', 'quickstart, evaluation of step 40'."""
        return f"{self.name}, evaluation of step {self.run.step}" if isinstance(self.run, EvaluationDir) else self.name

    def command(self, *arguments: str) -> str:
        """The command line that shows something of this run again."""
        evaluation = ["--evaluation", str(self.run.step)] if isinstance(self.run, EvaluationDir) else []
        superseded = ["--superseded"] if self.with_superseded else []
        return shlex.join(["grpo-async", "inspect-rollouts", self.name, *arguments, *evaluation, *superseded])
