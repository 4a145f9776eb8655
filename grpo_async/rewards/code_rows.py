"""Reads a row's tests, in the forms that data sets have them, and finds the code in a completion."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_async.rewards.completion import after_thinking

_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertTests:
    """Statements, each a test. MBPP's `test_list`: ["assert add(1, 2) == 3"]."""

    statements: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptTests:
    """A script: `check(candidate)` as in HumanEval, functions `test_...`, unittest classes, or bare asserts (one test)."""

    script: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTests:
    """Calls of the entry point: (arguments, expected result)."""

    cases: Sequence[tuple[Sequence[Any], Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTests:
    """Runs of the whole program: (stdin, expected stdout)."""

    cases: Sequence[tuple[str, str]]


Tests = AssertTests | ScriptTests | CallTests | ProgramTests


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTests:
    """All tests of one row."""

    tests: Tests
    entry_point: str | None = None
    setup: str = ""  # runs before the tests, in their process


def code_in(text: str) -> str:
    """The last fenced code block after any thinking; all of the text when there is none.

    Example: "Try:\\n```python\\nx = 1\\n```\\nDone." -> "x = 1\\n".
    """
    answer = after_thinking(text)
    blocks = _BLOCK.findall(answer)
    return blocks[-1] if blocks else answer


def read_row(tests: Any, entry_point: Any = None, setup: Any = None) -> RowTests | None:
    """The tests of one row; None if it has none.

    Raises:
        ValueError: they are in no form that is known, or cannot be parsed.
    """
    if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
        tests = _from_json(tests)
    if not tests:
        return None
    name = str(entry_point) if entry_point else None
    before = "\n".join(setup) if isinstance(setup, list | tuple) else str(setup or "")
    found = _read(tests, name)
    if isinstance(tests, Mapping) and tests.get("fn_name"):
        name = str(tests["fn_name"])
    _check(found, name, before)
    return RowTests(tests=found, entry_point=name, setup=before)


def _read(tests: Any, entry_point: str | None) -> Tests:
    if isinstance(tests, str):
        return ScriptTests(script=tests)
    if isinstance(tests, Mapping):
        if "inputs" in tests and "outputs" in tests:
            return _read_pairs(tests["inputs"], tests["outputs"], by_call=bool(tests.get("fn_name")))
        tests = [tests]
    if isinstance(tests, Sequence) and all(isinstance(test, str) for test in tests):
        return AssertTests(statements=list(tests))
    if isinstance(tests, Sequence) and all(isinstance(t, Mapping) and {"input", "output"} <= t.keys() for t in tests):
        kinds = {str(test.get("testtype") or "stdin") for test in tests}
        if kinds == {"functional"}:  # LiveCodeBench: one argument a line, as JSON
            cases = [
                ([json.loads(line) for line in str(t["input"]).splitlines() if line.strip()], _json_or(t["output"]))
                for t in tests
            ]
            return CallTests(cases=cases)
        if kinds == {"stdin"}:
            return ProgramTests(cases=[(_lines(test["input"]), _lines(test["output"])) for test in tests])
    raise ValueError(
        f"the tests {_short(tests)} are in no known form; give a list of assert statements, a script, a list of "
        '{"input": ..., "output": ...}, or {"inputs": [...], "outputs": [...]}'
    )


def _read_pairs(inputs: Sequence[Any], outputs: Sequence[Any], *, by_call: bool) -> Tests:
    """APPS, TACO: with `fn_name` the inputs are lists of arguments."""
    if len(inputs) != len(outputs):
        raise ValueError(f"the tests have {len(inputs)} inputs and {len(outputs)} outputs; there must be one for each")
    pairs = list(zip(inputs, outputs, strict=True))
    if by_call:
        return CallTests(cases=[(list(_json_or(given)), _json_or(wanted)) for given, wanted in pairs])
    return ProgramTests(cases=[(_lines(given), _lines(wanted)) for given, wanted in pairs])


def _check(tests: Tests, entry_point: str | None, setup: str) -> None:
    if isinstance(tests, CallTests) and entry_point is None:
        raise ValueError("tests that call a function need its name in the column `entry_point`")
    texts = [setup]
    if isinstance(tests, AssertTests):
        texts += tests.statements
    if isinstance(tests, ScriptTests):
        texts.append(tests.script)
    for text in texts:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"the tests are no Python: {error}; in {_short(text)}") from error
        if (
            isinstance(tests, ScriptTests)
            and text is tests.script
            and entry_point is None
            and _only_defines_check(tree)
        ):
            raise ValueError(
                "the script defines `check` and never calls it; name its argument in the column `entry_point`"
            )


def _only_defines_check(tree: ast.Module) -> bool:
    defines = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    outside = [node for node in tree.body if not isinstance(node, ast.FunctionDef)]
    names = {node.id for statement in outside for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return defines and "check" not in names


def _from_json(text: str) -> Any:
    """Data sets keep nested tests as JSON text; a script may begin with a bracket too."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json_or(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
