"""Every requirement is held by at least one test that names it: `R4.5` in the docstring of a test function.

What each number stands for is said by those tests. What a test holds is proved by breaking the code; this file only sees
to it that none is forgotten, and that none is named that does not exist.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
NUMBER_OF_ITEMS = {1: 15, 2: 8, 3: 5, 4: 7, 5: 5, 6: 8}
"""R1 asynchronous training, R2 records, R3 the end of an environment, R4 custom rollout functions, R5 sources without an engine,
R6 staleness and robustness: section -> number of its items."""

ITEMS = [f"R{section}.{item}" for section, count in NUMBER_OF_ITEMS.items() for item in range(1, count + 1)]
_MENTION = re.compile(r"\bR\d+\.\d+\b")


def mentions(source: str) -> Iterator[tuple[str, str]]:
    """(test function, item) for every item that a docstring of a test function names; other docstrings do not count."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            for item in _MENTION.findall(ast.get_docstring(node) or ""):
                yield node.name, item


def test_every_requirement_is_named_by_a_test_and_no_other_is() -> None:
    named: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        source = file.read_text(encoding="utf-8")
        if file.name != Path(__file__).name and _MENTION.search(source):
            for test, item in mentions(source):
                named.setdefault(item, []).append(f"{file.relative_to(TESTS).as_posix()}::{test}")
    missing = [item for item in ITEMS if item not in named]
    assert not missing, f"no test names {', '.join(missing)} in its docstring"
    unknown = {item: tests for item, tests in named.items() if item not in ITEMS}
    assert not unknown, f"there is no such requirement: {unknown}"
