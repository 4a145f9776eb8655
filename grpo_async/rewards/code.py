"""Judges code by the row's tests in the sandbox.

    column `tests` of a row                                           datasets
    ["assert add(1, 2) == 3", ...]                                    MBPP `test_list`
    "def check(candidate): ..." and a column `entry_point`            HumanEval `test`; also `test_...` functions, unittest
    [{"input": "1 2", "output": "3"}, ...]                            LiveCodeBench
    {"inputs": [...], "outputs": [...], "fn_name": optional}          APPS, TACO `input_output`, as JSON text too

Two processes that share nothing take part, each in a separate sandbox: one has the completion's code, the other the tests, and
they exchange plain data (see `code_peer`). So the code cannot see the expected results, patch the comparison, or write the
verdict. With an `entry_point`, the tests get that name (or `Solution`) from the code and nothing else. Anything that only the
code could decide is refused: such a test fails, and the log says so once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import itertools
import json
import logging
import marshal
import math
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_async.config.base import Count, Seconds
from grpo_async.rewards.call import shared_slots, with_checked_arguments
from grpo_async.rewards.code_rows import RowKind, RowTests, code_in, may_be_nan, names_of, read_row, with_usual_imports
from grpo_async.rewards.text import last_turns
from grpo_async.sandbox import Sandbox, SandboxError, SandboxLimits, SandboxStatus, problem, startup_notes
from grpo_async.utils.concurrency import all_of
from grpo_async.utils.processes import usable_cpus
from grpo_async.utils.warn_once import WarnOnce

logger = logging.getLogger(__name__)

_warn_once = WarnOnce(logger)


def _compiled() -> bytes:
    """Bytecode of `code_peer`: compiling it takes longer than the rest of the start."""
    path = Path(__file__).with_name("code_peer.py")
    code = compile(path.read_bytes(), path.name, "exec", dont_inherit=True, optimize=0)
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


# Both processes get it in their working directories.
_MODULES: dict[str, str | bytes] = {"grpo_async/rewards/code_peer.pyc": _compiled()}
_MAIN = """
import sys
for name in ("grpo_async", "grpo_async.rewards"):
    sys.modules[name] = package = type(sys)(name)
    package.__path__ = [sys.path[0] + "/" + name.replace(".", "/")]
from grpo_async.rewards.code_peer import {main}
{main}({descriptor})
"""
_TOLERANCE = 1e-6  # for numbers in the output of programs
_MAX_OUTPUT_CHARS = 1 << 22  # a program may print 10^5 numbers; the examiner prints a line for each test
_EXAMINER_SPARE_S = 10.0  # time for the examiner to report the verdict after the candidate has ended


def prepare_worker() -> None:
    """Called once in each worker process, so that the sandbox's trial run is not part of a call."""
    problem()


@with_checked_arguments
async def code_tests(
    completions: Sequence[Any],
    tests: Sequence[Any],
    entry_point: Sequence[Any] | None = None,
    setup: Sequence[Any] | None = None,
    *,
    prompts: Sequence[Any] | None = None,
    opened_by_template: bool = False,
    all_or_nothing: bool = False,
    max_tests: Count | None = None,
    wall_s: Seconds = 10.0,
    cpu_s: Seconds = 10.0,
    memory_mb: Count = 512,
    max_parallel: Count | None = None,
    with_site_packages: bool = False,
    **_: Any,
) -> list[float | None]:
    """The fraction of the row's tests that the completion's code passes; None if the row has no tests.

    The code is the last fenced block of the final assistant message that defines what the tests use (or, as a program, reads its
    input), else the last one of Python, or the whole message if it has none. The usual imports (`List`, `heapq`) are made for it.
    Once the code has hung or ended, the remaining tests have failed, so put the most important tests first.
    The reward's `timeout_s` covers all completions of a call: set it above completions x wall_s / max_parallel.

    Example: 2 asserts of which 1 holds -> 0.5, or 0.0 with `all_or_nothing`.

    Args:
        completions: plain text or messages.
        tests: tests of each row; see the table above.
        entry_point: name of the function that `check` gets, or that is called (may be a method of `Solution`).
        setup: code that runs before the tests, in their process (MBPP's `test_setup_code`, `test_imports`).
        all_or_nothing: 1.0 when all tests pass, else 0.0.
        max_tests: use only the first N tests of a row (not for scripts).
        wall_s: seconds for all tests of a completion, or for each run if the tests are inputs and outputs.
        cpu_s: CPU seconds, counted like `wall_s`.
        memory_mb: memory of the code, in MiB.
        max_parallel: completions judged at once, over all calls; with `run_in: process` in each worker; null = half the CPUs.
        with_site_packages: whether the code may import the packages of this environment.

    Raises:
        SandboxError: the sandbox failed; this never becomes a score.
        ValueError: a row's tests cannot be read.
    """
    limits = SandboxLimits(wall_s=wall_s, cpu_s=cpu_s, memory_mb=memory_mb, max_output_chars=_MAX_OUTPUT_CHARS)
    judge = await asyncio.to_thread(
        _Judge, limits, with_site_packages=with_site_packages, all_or_nothing=all_or_nothing
    )
    # Concurrent runs that starve each other would miss their time limits.
    slots = shared_slots("code_tests", max_parallel or max(1, usable_cpus() // 2))

    async def score(index: int, text: str) -> float | None:
        try:
            row = read_row(tests[index], entry_point[index] if entry_point else None, setup[index] if setup else None)
        except ValueError as error:
            raise ValueError(f"code_tests, completion {index}: {error}") from error
        if row is None:
            return None
        if not text.strip():
            return 0.0
        if row.kind is not RowKind.SCRIPT:
            row = dataclasses.replace(row, tests=row.tests[:max_tests])
        async with slots:  # runs have time limits
            return await judge.score(with_usual_imports(code_in(text, row)), row)

    turns = last_turns(completions, prompts, opened_by_template)
    return await all_of(score(index, text) for index, text in enumerate(turns))


code_tests.startup_notes = startup_notes  # type: ignore[attr-defined]


class _Judge:
    """Scores one completion at a time."""

    def __init__(self, limits: SandboxLimits, *, with_site_packages: bool, all_or_nothing: bool) -> None:
        self._candidate = Sandbox(limits, with_site_packages=with_site_packages)
        spare = dataclasses.replace(limits, wall_s=limits.wall_s + _EXAMINER_SPARE_S)
        self._examiner = Sandbox(spare, with_site_packages=with_site_packages)
        self._all_or_nothing = all_or_nothing

    async def score(self, code: str, row: RowTests) -> float:
        run = self._run_programs if row.kind is RowKind.PROGRAMS else self._examine
        passed, total = await run(code, row)
        return float(passed == total) if self._all_or_nothing else passed / total

    async def _run_programs(self, code: str, row: RowTests) -> tuple[int, int]:
        passed = 0
        for stdin, wanted in row.tests:
            result = await self._candidate.run(code, stdin=stdin)
            if result.status is SandboxStatus.OK and is_same_output(result.stdout, wanted):
                passed += 1
            elif self._all_or_nothing:
                break
        return passed, len(row.tests)

    async def _examine(self, code: str, row: RowTests) -> tuple[int, int]:
        """Run the two processes. The candidate's end of the channel closes with it, so the examiner never waits for it forever."""
        ours, theirs = socket.socketpair()

        async def run_candidate() -> None:
            with theirs:
                files = {**_MODULES, "candidate.txt": code}
                main = _MAIN.format(main="run_candidate", descriptor=theirs.fileno())
                await self._candidate.run(main, files=files, pass_descriptors=[theirs.fileno()])

        with ours:
            candidate = asyncio.create_task(run_candidate())
            try:
                main = _MAIN.format(main="run_examiner", descriptor=ours.fileno())
                result = await self._examiner.run(
                    main, stdin=json.dumps(_work(row)), files=_MODULES, pass_descriptors=[ours.fileno()]
                )  # the sandbox enforces wall_s
            finally:
                candidate.cancel()
                await asyncio.wait({candidate})
                theirs.close()  # the candidate may not have begun
            if not candidate.cancelled():
                candidate.result()  # raises the sandbox's error
        if not result.stdout:
            raise SandboxError(f"the process of the tests did not start: {result.status}. {result.stderr[-500:]}")
        return _verdict(result.stdout)


def _verdict(lines: str) -> tuple[int, int]:
    """Number of passed tests and of all tests, from the examiner's lines."""
    passed, total = 0, 1
    for text in lines.splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break  # incomplete: the examiner was killed
        if line[0] == "total":
            total = line[1]
            continue
        passed += line[1]
        if line[2]:
            _warn_once(line[2], "code_tests: a test was refused, which counts as failed: %s", line[2])
    return passed, total


def _work(row: RowTests) -> dict[str, Any]:
    names, provided = names_of("\n".join(row.sources), row.entry_point)
    return {
        "is_script": row.kind is RowKind.SCRIPT,
        "tests": list(row.tests),
        "entry_point": row.entry_point,
        "setup": row.setup,
        "names": names,
        "provided": provided,
        "may_be_nan": may_be_nan("\n".join(row.sources)),
    }


def is_same_output(given: str, wanted: str) -> bool:
    """Compare line by line, ignoring the whitespace around words, empty lines at both ends, and, where the wanted word is a number
    with a point or exponent, its notation and differences up to 1e-6, relative or absolute, whichever is more.

    Example: "0.50\\n" and "0.5" -> True; "1 2" and "1\\n2" -> False.
    """
    ours, theirs = ([line.split() for line in text.strip().splitlines()] for text in (given, wanted))
    if list(map(len, ours)) != list(map(len, theirs)):
        return False
    return all(map(_is_same_word, itertools.chain(*ours), itertools.chain(*theirs)))


def _is_same_word(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    if not any(mark in wanted.lower() for mark in ".e"):
        return False  # whole numbers and words must match exactly
    try:
        return math.isclose(float(given), float(wanted), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    except ValueError:
        return False
