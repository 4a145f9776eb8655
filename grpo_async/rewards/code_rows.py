"""Reads a row's tests, in the forms that datasets use, and finds the code in a completion."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import json
import re
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from grpo_async.rewards.code_peer import CHECK_CALL
from grpo_async.rewards.text import after_thinking
from grpo_async.utils.text import clipped

_BLOCK = re.compile(  # language, code; a block that is cut off ends with the text
    r"^[ \t]*(`{3,}|~{3,})[^\w\n`]*(\w*)[^\n`]*\n(.*?)(?:^[ \t]*\1[`~]*[ \t]*$|\Z)", re.DOTALL | re.MULTILINE
)
_PYTHON = ("python", "python3", "py", "py3")
_READS_INPUT = r"\b(?:input|stdin)\b|\bopen\(0"


class RowKind(StrEnum):
    """The kind of `RowTests.tests`, and so how they are run."""

    # Statements, each a test: "assert add(1, 2) == 3" (MBPP's `test_list`), or calls of the entry point.
    ASSERTS = "asserts"
    # One script: `check(candidate)` as in HumanEval, functions `test_...`, unittest classes, or bare asserts.
    SCRIPT = "script"
    # Runs of the whole program: (stdin, expected stdout).
    PROGRAMS = "programs"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTests:
    """All tests of one row."""

    kind: RowKind
    tests: Sequence[Any]
    entry_point: str | None = None
    setup: str = ""  # runs before the tests, in their process

    @property
    def sources(self) -> list[str]:
        """Setup and tests, without the calls that are generated from arguments and expected results."""
        return [self.setup, *(test for test in self.tests if not test.startswith(CHECK_CALL))]


@functools.lru_cache(maxsize=256)  # all completions of a group have the same tests
def names_of(text: str, entry_point: str | None) -> tuple[list[str], dict[str, tuple[str, str]]]:
    """Global names that the tests use and do not define: those that come from the code, and a map of those that come from the
    tests' process to module and attribute (or ""). The tests alone decide this, so the code cannot provide a name that compares.

    With an entry point, only that comes from the code. Without one, all come from it except builtins, modules, and names that the
    standard library has. If that leaves none, a single builtin or name of the standard library comes from the code, too.

    Example: "assert math.isclose(area(1), 2)" -> ["area"], {"math": ("math", "")};
    "assert gcd(4, 6) == 2" -> ["gcd"], {}, although `math` has one.
    """
    free = {name for name in _free_names(text) if not name.startswith("__")}
    modules = _used_as_modules(text) & free
    helpers = _names_in(*_HELPERS)  # tests may use them although only the code imports them
    provided = {name: (_ALIASES.get(name, name), "") for name in modules if name != entry_point}
    provided |= {name: (helpers[name], name) for name in free & helpers.keys() - {entry_point}}
    if entry_point is not None:
        return [entry_point, "Solution"], provided
    deciding = _deciding_calls(text, free - provided.keys())
    if deciding:
        raise ValueError(
            f"the tests call {sorted(deciding)}, which would decide them and is defined nowhere; define it in the column "
            "`setup`, or name the function that they test in the column `entry_point`"
        )
    shadowing = {name for name in free if hasattr(builtins, name)}
    wanted = free - shadowing - provided.keys()
    if not wanted:
        wanted = (provided.keys() - modules) or shadowing
        if len(wanted) > 1:
            raise ValueError(
                f"the tests use {sorted(wanted)}, which Python has too; name the one that they test in the column `entry_point`"
            )
    return sorted(wanted), {name: place for name, place in provided.items() if name not in wanted}


def _deciding_calls(text: str, names: set[str]) -> set[str]:
    """Those of the undefined functions that are called with the result of another one, and whose own result is the test."""
    undefined = {name for name in names if not hasattr(builtins, name) and not name[0].isupper()}
    nodes = list(ast.walk(ast.parse(text)))
    verdicts = [node.test for node in nodes if isinstance(node, ast.Assert)]
    verdicts += [node.value for node in nodes if isinstance(node, ast.Expr)]
    deciding = set()
    for verdict in verdicts:  # its parts are appended
        if isinstance(verdict, ast.BoolOp):
            verdicts += verdict.values
        elif isinstance(verdict, ast.UnaryOp):
            verdicts.append(verdict.operand)
        elif isinstance(verdict, ast.Call) and isinstance(verdict.func, ast.Name) and verdict.func.id in undefined:
            calls = [part.func for part in ast.walk(verdict) if isinstance(part, ast.Call)]
            called = {function.id for function in calls if isinstance(function, ast.Name)} & undefined
            deciding |= {verdict.func.id} if len(called) > 1 else set()
    return deciding


@functools.lru_cache(maxsize=256)
def may_be_nan(text: str) -> bool:
    """Whether tests name NaN, so that it may be right: `math.isnan(f())`, `float("nan")`, but not "determinant"."""
    named = {getattr(node, field, None) for node in ast.walk(ast.parse(text)) for field in ("id", "attr", "value")
             if isinstance(node, ast.Name | ast.Attribute | ast.Constant)}  # fmt: skip
    return any(isinstance(name, str) and name.strip("+-").lower() in ("nan", "isnan", "is_nan") for name in named)


def _free_names(text: str) -> set[str]:
    """Global names that are read but never assigned."""
    used, given = set(), set()
    for table, symbol in _symbols(symtable.symtable(text, "tests", "exec")):
        if table.get_type() == "module" or symbol.is_global():
            if symbol.is_assigned() or symbol.is_imported():
                given.add(symbol.get_name())
            elif symbol.is_referenced():
                used.add(symbol.get_name())
    return used - given


def _symbols(table: symtable.SymbolTable) -> Iterator[tuple[symtable.SymbolTable, symtable.Symbol]]:
    for symbol in table.get_symbols():
        yield table, symbol
    for child in table.get_children():
        yield from _symbols(child)


def _used_as_modules(text: str) -> set[str]:
    """Names of known modules that are only used before a dot."""
    nodes = list(ast.walk(ast.parse(text)))
    before_dot = [node.value for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    alone = {node.id for node in nodes if isinstance(node, ast.Name) and node not in before_dot}
    known = sys.stdlib_module_names | _ALIASES.keys() | set(_ALIASES.values())
    return {node.id for node in before_dot} & known - alone


_ALIASES = {"np": "numpy", "pd": "pandas"}


_HELPERS = ("math", "collections", "itertools", "functools", "decimal", "fractions", "datetime")
# Of the first six only the modules, because words like `choice`, `mean` and `search` are names of variables.
_USUAL_MODULES = (
    "json", "random", "re", "statistics", "sys", "operator",
    "string", "typing", "copy", "bisect", "heapq", *_HELPERS,
)  # fmt: skip


@functools.cache
def _names_in(*modules: str) -> dict[str, str]:
    """The public names of modules and where they are; of several the last: {"isclose": "math", "Counter": "collections", ...}."""
    found = [(name, importlib.import_module(name)) for name in modules]
    return {name: at for at, module in found for name in getattr(module, "__all__", dir(module)) if name[0] != "_"}


def code_in(text: str, row: RowTests) -> str:
    """The fenced block after any thinking that is the solution, dedented; the whole text if there is none.

    That is the last block that defines what the tests use, or reads the input; else the last one of Python, or without a language.
    So a demonstration, its output or a command may follow, and several solutions are still one try.

    Example: "Try:\\n```python\\nx = int(input())\\n```\\nIt prints\\n```\\n3\\n```" -> "x = int(input())\\n".
    """
    answer = after_thinking(text).replace("\r\n", "\n")
    if row.kind is RowKind.PROGRAMS:
        is_solution = re.compile(_READS_INPUT)
    else:
        names = "|".join(map(re.escape, names_of("\n".join(row.sources), row.entry_point)[0]))
        is_solution = re.compile(
            rf"^(?:async +)?(?:def|class) +(?:{names})\b|^(?:{names})\b[^=\n(]*=(?!=)", re.MULTILINE
        )
    best = (False, -1, answer)
    for _, language, block in _BLOCK.findall(answer):
        code = textwrap.dedent(block) if block.lstrip("\n")[:1] in (" ", "\t") else block
        rank = is_solution.search(code) is not None, 2 if language.lower() in _PYTHON else int(not language)
        if rank >= best[:2]:
            best = (*rank, code)
    return best[2]


def with_usual_imports(code: str) -> str:
    """Code with the imports that it may take for granted: the pages of LeetCode and LiveCodeBench make them before it. What it
    imports or defines itself goes before. `exit` and `quit`, which Python only has in a session, are `sys.exit`.

    Example: "def f(x: List[int]): ..." -> "from typing import List\\ndef f(x: List[int]): ...".
    """
    words = set(re.findall(r"(?<![.\w])[A-Za-z_]\w+", code))
    modules = {name for name in re.findall(r"(?<![.\w])([a-z]\w*)\.", code) if name in _USUAL_MODULES}
    usual = _names_in(*_USUAL_MODULES[6:]) | {"exit": "sys", "quit": "sys"}
    names = sorted((words - modules - vars(builtins).keys()) & usual.keys() | words & {"exit", "quit"})
    imports = [f"import {name}" for name in sorted(modules)]
    imports += [f"from {usual[name]} import {'exit as quit' if name == 'quit' else name}" for name in names]
    begin = max([0, *(found.end() for found in re.finditer(r"^from __future__ import .*\n", code, re.MULTILINE))])
    return f"{code[:begin]}{'; '.join(imports)}\n{code[begin:]}"


def read_row(tests: Any, entry_point: Any = None, setup: Any = None) -> RowTests | None:
    """The tests of one row; None if it has none."""
    if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
        tests = _json_or(tests)  # a script may also begin with a bracket
    if not tests:
        return None
    function = tests.get("fn_name") if isinstance(tests, Mapping) else None
    name = str(function or entry_point) if function or entry_point else None
    kind, found = _read(tests, name)
    if not found:
        return None
    before = "\n".join(setup) if isinstance(setup, list | tuple) else str(setup or "")
    row = RowTests(kind=kind, tests=found, entry_point=name, setup=before)
    if kind is not RowKind.PROGRAMS:
        _check(row)
    return row


def _read(tests: Any, name: str | None) -> tuple[RowKind, list[Any]]:
    if isinstance(tests, str):
        return RowKind.SCRIPT, [tests]
    if isinstance(tests, Mapping):
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple):
            return _read_pairs(inputs, outputs, name if tests.get("fn_name") else None)
        tests = [tests]
    if isinstance(tests, Sequence) and all(isinstance(test, str) for test in tests):
        return RowKind.ASSERTS, list(tests)
    if isinstance(tests, Sequence) and all(isinstance(t, Mapping) and {"input", "output"} <= t.keys() for t in tests):
        kinds = {str(test.get("testtype") or "stdin") for test in tests}
        if kinds == {"functional"}:  # LiveCodeBench: one argument per line, as JSON
            if name is None:
                raise ValueError("tests that call a function need its name in the column `entry_point`")
            texts = [str(test["input"]).split("\n") for test in tests]  # not at U+2028, which JSON strings may hold
            inputs = [f"[{','.join(filter(str.strip, lines))}]" for lines in texts]
            return _read_pairs(inputs, [test["output"] for test in tests], name)
        if kinds == {"stdin"}:
            return _read_pairs([test["input"] for test in tests], [test["output"] for test in tests], None)
    raise ValueError(
        f"the tests {clipped(repr(tests), 200)} are in no known form; give a list of assert statements, a script, a list of "
        '{"input": ..., "output": ...}, or {"inputs": [...], "outputs": [...]}'
    )


def _read_pairs(inputs: Sequence[Any], outputs: Sequence[Any], name: str | None) -> tuple[RowKind, list[Any]]:
    """Programs, or with a function's name calls of it, whose inputs are lists of arguments."""
    if len(inputs) != len(outputs):
        raise ValueError(f"the tests have {len(inputs)} inputs and {len(outputs)} outputs; there must be one for each")
    pairs = zip(inputs, outputs, strict=True)
    if name is None:
        return RowKind.PROGRAMS, [(_lines(given), _lines(wanted)) for given, wanted in pairs]
    cases = [json.dumps([_arguments(given, name), _right_results(given, wanted)]) for given, wanted in pairs]
    return RowKind.ASSERTS, [f"{CHECK_CALL}({name!r}, {case!r})" for case in cases]


def _arguments(given: Any, name: str) -> list[Any]:
    arguments = _json_or(given)
    if not isinstance(arguments, list | tuple):
        raise ValueError(f"the input {clipped(repr(given), 200)} of `{name}` is not a list of arguments")
    return list(arguments)


def _right_results(given: Any, wanted: Any) -> list[Any]:
    """The results of which one is right: a text is JSON if the input is, else it may be meant as it is, too."""
    parsed = _json_or(wanted)
    return [parsed] if isinstance(given, str) or parsed is wanted else [wanted, parsed]


def _check(row: RowTests) -> None:
    for text in row.sources:
        try:
            compile(text, "tests", "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"the tests are not valid Python: {error}; in {clipped(repr(text), 200)}") from error
    wanted, _ = names_of("\n".join(row.sources), row.entry_point)
    if not wanted:
        raise ValueError(
            "the tests use no name that the code could define; they have to use its functions and classes without importing them"
        )


def _json_or(value: Any) -> Any:
    """Parse JSON text, as datasets store nested values; any other value is returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _lines(value: Any) -> str:
    if value is None:
        return ""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
