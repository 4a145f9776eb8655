"""The protocol of what makes the rollouts of a group. One that fails is a completion with status FAILED and its `error`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from grpo_async.buffer.group import OpenGroup
from grpo_async.errors import message_of
from grpo_async.utils.text import count, first_line

logger = logging.getLogger(__name__)


class GroupProducer(Protocol):
    """Makes the rollouts of a group."""

    def produce(self, group: OpenGroup) -> AbstractAsyncContextManager[None]:
        """Set `completions` and `environments`. The environments exist until the context ends: leave it after scoring."""
        ...


class ErrorLog:
    """Counts failures by kind, such as "rollout: ServerUnavailableError". `tell` gets what the user should see while the run
    goes on; `counts` come from a checkpoint."""

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self._counts: Counter[str] = Counter(counts or {})
        self.tell: Callable[[str], None] = lambda text: None

    def note(self, what: str, error: BaseException) -> None:
        """Count a failure of `what` ("rollout", "group")."""
        kind = f"{what}: {type(error).__name__}"
        self._counts[kind] += 1
        if self._counts[kind] == 1:
            logger.warning("%s failed (this kind is logged once, then counted): %s", what, error, exc_info=error)
        number = self._counts[kind]
        if what == "group" and number in (1, 10, 100, 1000):
            self.tell(f"{count(number, 'group')} failed by now, the last one: {first_line(message_of(error))}")

    def count(self, kind: str) -> None:
        """Count something that is not an error but should be seen ("prompt too long")."""
        self._counts[kind] += 1

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._counts)
