"""Warnings that every rollout would repeat."""

from __future__ import annotations

import logging
from collections.abc import Hashable


class WarnOnce:
    """Logs the first warning of each kind, and drops the others."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._seen: set[Hashable] = set()

    def __call__(self, kind: Hashable, text: str, *values: object) -> None:
        if kind not in self._seen:
            self._seen.add(kind)
            self._logger.warning(text, *values)
