"""JSON that other processes read, and that they write and may have been killed over: whatever a file holds, reading it raises
nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_async.utils.text import finite


def read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """The object that a file holds; empty where it is not there, or holds something else. What cannot be read is a sentence in
    `problems`."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}
    return content if isinstance(content, dict) else {}


def read_objects(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file. A torn last line is left out; other lines that are not one are counted in `problems`."""
    if not path.is_file():
        return
    num_bad = 0
    try:
        with path.open("rb") as file:
            for line in file:
                if (content := parse_object(line)) is not None:
                    yield content
                else:
                    num_bad += line.endswith(b"\n")
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error}")
    if num_bad:
        problems.append(f"{path.name}: {num_bad} line(s) are not JSON objects and were left out.")


def parse_object(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None: it is not one, or torn, or damaged."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def numbers(values: object) -> dict[str, float]:
    """Those of a mapping that are finite."""
    if not isinstance(values, Mapping):
        return {}
    return {str(name): number for name, value in values.items() if (number := finite(value)) is not None}


def json_safe(value: Any) -> Any:
    """`value` with null in place of NaN and the infinities, which JSON does not have, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): json_safe(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(each) for each in value]
    return value
