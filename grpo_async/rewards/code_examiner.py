"""The main functions of the two processes of a test run. They talk through `code_peer`, which defines the protocol."""

from __future__ import annotations

import os
import sys

from grpo_async.rewards.code_peer import (
    Candidate,
    Channel,
    Handle,
    PeerGone,
    RefusedError,
    encode,
    named,
    read_json,
    serve,
)

TYPE_CHECKING = False  # see `code_peer`
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

TESTS_MODULE = "tests_of_the_row"
CANDIDATE_MODULE = "candidate"
CHECK_CALL = "_check_call"
"""Name of the check in tests that `code_rows` makes from arguments and right results: _check_call('add', '[[1, 2], [3]]')."""
_FUNCTION: type[Any] = type(lambda: None)


def run_candidate(descriptor: int) -> None:
    """Main function of the candidate's process: import its code, then do what the examiner asks."""
    channel = Channel(descriptor)
    module = type(sys)(CANDIDATE_MODULE)
    sys.modules[CANDIDATE_MODULE] = module

    def load(wanted: list[str]) -> dict[str, Any]:
        with open("candidate.txt", encoding="utf-8") as file:
            source = file.read()
        exec(compile(source, "candidate.py", "exec", dont_inherit=True), module.__dict__)
        return {name: vars(module)[name] for name in wanted if name in vars(module)}

    try:
        serve(channel, load)
    except PeerGone:
        os._exit(0)


def run_examiner(descriptor: int) -> None:
    """Main function of the examiner's process. It reads the work from stdin, where no other process finds it, and writes JSON lines
    to stdout: ["total", number of tests], again if a script has defined its own, and [test number, passed, why it was refused] for
    each test. Tests without a line have failed.
    """
    work = read_json(sys.stdin.read())
    verdicts = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the tests' output must not mix with the verdict

    def tell(*line: Any) -> None:
        verdicts.write("[" + ",".join([encode(item, repr) for item in line]) + "]\n")
        verdicts.flush()

    tell("total", len(work["tests"]))
    try:
        _examine(Candidate(Channel(descriptor), may_be_nan=work["may_be_nan"]), work, tell)
    finally:  # even if the row's own code raised
        os._exit(0)


def _examine(peer: Candidate, work: dict[str, Any], tell: Callable[..., None]) -> None:
    """Run the tests of one row."""
    names = _load(peer, work)
    steps = [_bound(_run_text, text, names) for text in work["tests"]]
    if work["is_script"]:
        (script,) = work["tests"]
        passed, refused = _try(peer, lambda: _run_script(script, names, work["entry_point"]))
        steps = _tests_defined_by(names)
        if not passed or not steps:  # the script itself was the test
            never = "" if peer.num_asked > 1 else "the tests never used the code"  # the first call was `load`
            tell(0, passed and not never, refused or never)
            return
        tell("total", len(steps))
    for number, step in enumerate(steps):
        tell(number, *_try(peer, step))


def _load(peer: Candidate, work: dict[str, Any]) -> dict[str, Any]:
    """The tests' global names: the candidate's names that they use, modules, then the names that the row's setup defines."""
    wanted = work["names"]
    theirs = peer.ask("call", 0, (wanted,))
    if type(theirs) is not dict or not any(name in theirs for name in wanted):
        raise NameError(f"the code defines none of {wanted}")
    names: dict[str, Any] = {"__name__": TESTS_MODULE, "__builtins__": sys.modules["builtins"]}
    for name, (module, attribute) in work["provided"].items():
        try:
            own = __import__(module)
        except ImportError:
            continue  # tests that use it get a NameError
        names[name] = getattr(own, attribute) if attribute else own
    names.update({name: named(theirs[name], name) for name in wanted if name in theirs})
    names[CHECK_CALL] = lambda entry_point, case: _check_call(_named(names, entry_point), *read_json(case))
    _run_text(work["setup"], names)
    return names


def _try(peer: Candidate, step: Callable[[], Any]) -> tuple[bool, str]:
    """Whether the step passes, and why it was refused, if it was."""
    peer.faults.clear()
    passed = True
    try:
        _finish(step())
    except PeerGone:
        raise
    except BaseException:  # noqa: BLE001 - any exception fails the test
        passed = False
    if peer.is_gone:
        raise PeerGone  # a bare `except` in the tests had caught it
    refused = [f"{type(fault).__name__}: {fault}" for fault in peer.faults[:1] if isinstance(fault, RefusedError)]
    return passed and not peer.faults, "".join(refused)  # even if the tests caught the error


def _bound(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)


def _finish(result: Any) -> None:
    """Run an async test; refuse a generator, which would have tested nothing."""
    kind = type(result)
    if kind is Handle:
        return
    if hasattr(kind, "__await__"):
        import asyncio

        asyncio.run(result)
    elif hasattr(kind, "__next__") or hasattr(kind, "__anext__"):
        raise TypeError("a test that yields tests nothing")


def _run_text(text: str, names: dict[str, Any]) -> None:
    exec(compile(text, "test", "exec", dont_inherit=True), names)


def _run_script(script: str, names: dict[str, Any], entry_point: str | None) -> None:
    """Run a script of tests; a function `check` that it defines gets the entry point."""
    _run_text(script, names)
    check = names.get("check")
    if entry_point is not None and isinstance(check, _FUNCTION):
        _finish(check(_named(names, entry_point)))


def _tests_defined_by(names: dict[str, Any]) -> list[Callable[[], Any]]:
    """Functions `test_...`, and the methods of classes of unittest and of classes `Test...`."""
    steps: list[Callable[[], Any]] = [
        value for name, value in names.items() if name.startswith("test_") and isinstance(value, _FUNCTION)
    ]
    unittest = sys.modules.get("unittest")
    for name, value in list(names.items()):
        if not isinstance(value, type) or value.__module__ != TESTS_MODULE:
            continue
        if unittest is not None and issubclass(value, unittest.TestCase):
            cases = unittest.defaultTestLoader.loadTestsFromTestCase(value)
            steps += [_bound(_run_case, case) for case in cases]
        elif name.startswith("Test"):
            steps += [_bound(_run_method, value, test) for test in vars(value) if test.startswith("test_")]
    return steps


def _run_method(kind: type, name: str) -> Any:
    return getattr(kind(), name)()


def _run_case(case: Any) -> None:
    """Run a unittest case; a skipped or expected failure has tested nothing."""
    import unittest

    result = unittest.TestResult()
    unittest.TestSuite([case]).run(result)
    problems = [text for _, text in (*result.errors, *result.failures, *result.skipped, *result.expectedFailures)]
    assert not problems, problems[0].strip().rpartition("\n")[2]
    assert result.testsRun == 1, "the test did not run"
    assert result.wasSuccessful(), "it was expected to fail"


def _check_call(function: Any, arguments: list[Any], right: list[Any]) -> None:
    given = _plain(function(*arguments))
    # Some datasets wrap the single result in a list.
    unwrapped = [wanted[0] for wanted in right if isinstance(wanted, list) and len(wanted) == 1]
    assert any(given == wanted for wanted in (*right, *unwrapped)), f"got {given!r}"


def _named(names: dict[str, Any], entry_point: str) -> Any:
    """The function, or the method of an instance of `Solution` if the code is written that way."""
    if entry_point not in names and "Solution" in names:
        return getattr(names["Solution"](), entry_point)
    return names[entry_point]


def _plain(value: Any) -> Any:
    """Convert tuples to lists and the numbers among keys to text, because JSON has neither."""
    if type(value) in (list, tuple):
        return [_plain(item) for item in value]
    if type(value) is dict:
        return {str(key) if type(key) in (int, float) else key: _plain(item) for key, item in value.items()}
    return value
