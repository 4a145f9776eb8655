"""Failures of rollouts and groups: each kind is logged once with its traceback, after that only counted.

Used on the rollout thread; `counts` may be read from any thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

logger = logging.getLogger(__name__)


class ErrorLog:
    """Counts failures by kind, such as "rollout: ServerUnavailableError"."""

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        """`counts` are those of a checkpoint; their kinds were logged then."""
        self._counts: Counter[str] = Counter(counts or {})

    def note(self, what: str, error: BaseException) -> None:
        """Count a failure of `what` ("rollout", "group")."""
        kind = f"{what}: {type(error).__name__}"
        self._counts[kind] += 1
        if self._counts[kind] == 1:
            logger.warning("%s failed (this kind is logged once, then counted): %s", what, error, exc_info=error)

    def count(self, kind: str) -> None:
        """Count something that is not an error but should be seen ("prompt too long")."""
        self._counts[kind] += 1

    @property
    def counts(self) -> dict[str, int]:
        """Everything counted so far, by kind."""
        return dict(self._counts)
