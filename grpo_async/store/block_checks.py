"""What the index asks of a block before it takes it up."""

from __future__ import annotations

from pathlib import Path

import orjson

from grpo_async.store.rows import from_json
from grpo_async.store.tables import check_version


def bounds(path: Path) -> tuple[int, int]:
    """First and last seq of a sealed block, by its name."""
    _, first, last = path.stem.split("-")
    return int(first), int(last)


def check_schema(path: Path, line: bytes) -> None:
    """Raises VersionError. A line that says no version is damaged, which is found out later."""
    try:
        schema = orjson.loads(line).get("schema")
    except (ValueError, AttributeError):
        return
    if isinstance(schema, int):
        check_version(str(path), str(schema))


def problem_of(line: bytes) -> str | None:
    """What is wrong with a line; None: nothing."""
    try:
        from_json(line)
    except ValueError as error:
        return str(error)
    return None
