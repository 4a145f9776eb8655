"""The main functions of the two processes of a test run; see `code_peer` for what they say to each other."""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from grpo_async.rewards.code_peer import CANDIDATE_MODULE, TESTS_MODULE, Peer, PeerGone, own_module, text_of


def run_candidate(descriptors: tuple[int, int]) -> None:
    """Main function of the candidate's process: import its code, then do what the examiner asks."""
    peer = Peer(descriptors, is_trusting=True)
    module = types.ModuleType(CANDIDATE_MODULE)
    sys.modules[CANDIDATE_MODULE] = module

    def load(wanted: list[str]) -> dict[str, Any]:
        with open("candidate.txt", encoding="utf-8") as file:
            source = file.read()
        exec(compile(source, "candidate.py", "exec"), module.__dict__)
        return {name: vars(module)[name] for name in wanted if name in vars(module)}

    peer.encode(load)  # object number 1
    try:
        peer.serve()
    except PeerGone:
        os._exit(0)


def run_examiner(descriptors: tuple[int, int]) -> None:
    """Main function of the examiner's process. Writes one JSON line for each step to stdout:

    ["begun"], then ["not loaded", why], or ["total", number of tests] and [test number, passed, why not] for each, and
    ["done"]. Where it ends earlier, the tests that it does not name have failed.
    """
    with open("tests.json", encoding="utf-8") as file:
        work = json.load(file)
    verdicts = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the tests print is no verdict

    def tell(*line: Any) -> None:
        verdicts.write(json.dumps(line) + "\n")
        verdicts.flush()

    tell("begun")
    peer = Peer(descriptors, is_trusting=False)
    try:
        names = _load(peer, work)
        _examine(names, work, tell)
        tell("done")
    except PeerGone:
        tell("gone")
    except BaseException as error:  # noqa: BLE001 - told to the owner
        tell("not loaded", f"{type(error).__name__}: {text_of(error)}")
    verdicts.flush()
    os._exit(0)


def _load(peer: Peer, work: dict[str, Any]) -> dict[str, Any]:
    """The tests' global names: those of the candidate that they use, then what the row's set-up defines."""
    theirs: dict[str, Any] = peer.ask("call", 1, (_names_used_by(work),))
    has_other = any(not hasattr(builtins, name) for name in theirs)
    names: dict[str, Any] = {"__name__": TESTS_MODULE, "__builtins__": builtins}
    for name, value in theirs.items():
        if name in sys.stdlib_module_names:
            names[name] = own_module(name)  # whatever the candidate calls `math`
        elif not hasattr(builtins, name) or not has_other:
            names[name] = (
                value  # a function called `sum` is meant only where the tests use nothing else of the candidate
            )
    exec(compile(work["setup"], "setup", "exec"), names)
    return names


def _examine(names: dict[str, Any], work: dict[str, Any], tell: Callable[..., None]) -> None:
    entry_point = work["entry_point"]
    steps: list[Callable[[], Any]]
    if work["kind"] == "asserts":
        steps = [partial(_run_text, text, names) for text in work["script"]]
    elif work["kind"] == "calls":
        steps = [partial(_call, names, entry_point, *case) for case in work["cases"]]
    else:
        whole = partial(_run_script, work["script"], names, entry_point)
        if not _passes(0, whole, lambda *line: None if line[1] else tell(*line)):
            tell("total", 1)
            return
        steps = _tests_defined_by(names) or [lambda: None]  # without tests of its own the script was the test
    tell("total", len(steps))
    for number, step in enumerate(steps):
        _passes(number, step, tell)


def _passes(number: int, step: Callable[[], Any], tell: Callable[..., None]) -> bool:
    try:
        step()
    except PeerGone:
        raise
    except BaseException as error:  # noqa: BLE001 - the test has failed, whatever it is
        tell(number, False, f"{type(error).__name__}: {text_of(error)}")
        return False
    tell(number, True, "")
    return True


def _run_text(text: str, names: dict[str, Any]) -> None:
    exec(compile(text, "test", "exec"), names)


def _run_script(script: str, names: dict[str, Any], entry_point: str | None) -> None:
    """Run a script of tests; a function `check` that it defines gets the entry point."""
    _run_text(script, names)
    check = names.get("check")
    if entry_point is not None and isinstance(check, types.FunctionType):
        check(_named(names, entry_point))


def _tests_defined_by(names: dict[str, Any]) -> list[Callable[[], Any]]:
    """Functions `test_...`, and the methods of classes of unittest."""
    functions: list[Callable[[], Any]] = [
        value for name, value in names.items() if name.startswith("test_") and isinstance(value, types.FunctionType)
    ]
    unittest = sys.modules.get("unittest")
    if unittest is None:
        return functions
    cases = [
        case
        for value in names.values()
        if isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == TESTS_MODULE
        for case in unittest.defaultTestLoader.loadTestsFromTestCase(value)
    ]
    return [*functions, *(partial(_run_case, case) for case in cases)]


def _run_case(case: Any) -> None:
    result = case.defaultTestResult()
    case.run(result)
    problems = [*result.errors, *result.failures]
    assert not problems, problems[0][1].strip().rpartition("\n")[2]


def _call(names: dict[str, Any], entry_point: str, arguments: list[Any], expected: Any) -> None:
    given = _plain(_named(names, entry_point)(*arguments))
    wanted = _plain(expected)
    # Some data sets wrap the one result in a list.
    assert given == wanted or (isinstance(wanted, list) and len(wanted) == 1 and given == wanted[0]), f"got {given!r}"


def _named(names: dict[str, Any], entry_point: str) -> Any:
    """The function; one of an instance of `Solution` where that is how it is written."""
    if entry_point not in names and "Solution" in names:
        return getattr(names["Solution"](), entry_point)
    return names[entry_point]


def _plain(value: Any) -> Any:
    """JSON knows no tuples."""
    if type(value) in (list, tuple):
        return [_plain(item) for item in value]
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    return value


def _names_used_by(work: dict[str, Any]) -> list[str]:
    if work["kind"] == "calls":
        return [work["entry_point"], "Solution"]
    texts = work["script"] if work["kind"] == "asserts" else [work["script"]]
    nodes = [node for text in [work["setup"], *texts] for node in ast.walk(ast.parse(text))]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return sorted(names | ({work["entry_point"], "Solution"} if work["entry_point"] else set()))
