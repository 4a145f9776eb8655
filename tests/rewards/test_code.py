"""code_tests: the forms of tests, and completions that would rather cheat than solve. Each test starts real sandboxes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from grpo_async.rewards import RewardError, RewardFunction
from grpo_async.rewards.code import code_tests, is_same_output
from grpo_async.rewards.code_rows import code_in, read_row
from grpo_async.sandbox import Sandbox, SandboxError
from tests.rewards.helpers import score

ADD = "def add(a, b):\n    return a + b\n"
TWO = ["assert add(1, 2) == 3", "assert add(2, 2) == 5"]  # ADD passes the first


def _scores(codes: Sequence[Any], tests: Any, **arguments: Any) -> list[float | None]:
    return asyncio.run(code_tests(codes, [tests] * len(codes), **arguments))


def _score(
    code: str, tests: Any, *, entry_point: str | None = None, setup: Any = None, **arguments: Any
) -> float | None:
    (value,) = _scores([code], tests, entry_point=[entry_point], setup=[setup], **arguments)
    return value


def test_the_share_of_the_asserts_that_hold() -> None:
    assert _scores([f"Here:\n```python\n{ADD}```", ADD, "def add(a, b):\n    return 5"], TWO) == [0.5, 0.5, 0.5]
    assert _score(ADD, TWO, all_or_nothing=True) == 0.0
    assert _score(ADD, TWO, all_or_nothing=True, max_tests=1) == 1.0
    assert _score(ADD.replace("add", "_add"), ["assert _add(1, 2) == 3"]) == 1.0


def test_a_script_with_check_gets_the_entry_point() -> None:
    script = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n"
    assert _score(ADD, script, entry_point="add") == 1.0
    assert _score("def add(a, b):\n    return 3", script, entry_point="add") == 0.0
    assert _score("x = 1", script, entry_point="add") == 0.0


def test_functions_and_classes_of_a_script_are_tests() -> None:
    script = """
import unittest

def test_sum():
    assert add(1, 2) == 3

def test_wrong():
    assert add(1, 2) == 4

class Cases(unittest.TestCase):
    def setUp(self):
        self.one = 1

    def test_with_self(self):
        self.assertEqual(add(self.one, 1), 2)

    def test_type(self):
        with self.assertRaises(TypeError):
            add(1, "a")

class TestSum:
    def test_wrong(self):
        assert add(1, 2) == 4

async def test_async():
    assert add(1, 2) == 4

class WithFixture(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.given = add(1, 1)
    def test_given(self):
        self.assertEqual(self.given, 2)
"""
    assert _score(ADD, script) == pytest.approx(4 / 7)  # all but test_wrong, twice, and test_async


def test_programs_are_run_with_stdin() -> None:
    code = "print(sum(map(int, input().split())))"
    cases = [{"input": "1 2\n", "output": "3\n"}, {"input": "2 2", "output": "5"}]
    assert _score(code, cases) == 0.5
    assert _score(code, json.dumps({"inputs": ["1 2", "3 4"], "outputs": [["3"], "7"]})) == 1.0
    assert _score("print(3)\nraise SystemExit(1)", cases) == 0.0  # it printed 3, and failed
    assert (
        _score("print('3\\n' * 100_000)", [{"input": "", "output": "3\n" * 100_000}]) == 1.0
    )  # more than 65,536 characters


def test_a_row_may_have_thousands_of_tests() -> None:
    assert _score(ADD, ["assert add(1, 2) == 3"] * 5000) == 1.0  # more than 65,536 characters of verdicts


def test_calls_are_made_from_json() -> None:
    tests = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [[1, 2]]]}  # the second result is wrapped
    assert _score(ADD, json.dumps(tests)) == 1.0
    assert _score("class Solution:\n    def add(self, a, b):\n        return a + b", tests) == 1.0
    functional = [{"input": "1\n[2]", "output": "[1, 2]", "testtype": "functional"}]
    assert _score("class Solution:\n    def f(self, a, b):\n        return (a, *b)", functional, entry_point="f") == 1.0


@pytest.mark.parametrize(
    ("inputs", "outputs", "code"),
    [
        ([[5]], ["101"], "return format(x, 'b')"),  # a text as it is
        ([[5]], ["[5, true]"], "return [x, True]"),  # a text that is JSON
        ([[5]], [{"5": 1}], "return {x: 1}"),
        (["[5]"], ["5"], "return x"),
    ],
)
def test_a_result_is_compared_as_the_dataset_means_it(inputs: Any, outputs: Any, code: str) -> None:
    assert _score(f"def f(x):\n    {code}", {"fn_name": "f", "inputs": inputs, "outputs": outputs}) == 1.0


def test_setup_runs_before_the_tests_and_may_use_the_code() -> None:
    code = "class Node:\n    def __init__(self, v):\n        self.v, self.left = v, None\n"
    code += "def depth(n):\n    return 0 if n is None else 1 + depth(n.left)"
    assert _score(code, ["assert depth(root) == 2"], setup=["root = Node(1)", "root.left = Node(2)"]) == 1.0
    assert _score(ADD, ["assert math.isclose(add(1, 2), 3)"], setup="import math") == 1.0


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def f(x):\n    x.sort()", "a = [2, 1]\nf(a)\nassert a == [1, 2]"),
        ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
        ("class Odd(ValueError): pass\ndef f(): raise Odd('no')",
         "try:\n    f()\nexcept Odd as e:\n    assert 'no' in str(e)"),
        ("def f():\n    return (1, 2.5, 'a', b'b', {1}, None, 2 ** 100, float('inf'))",
         "assert f() == (1, 2.5, 'a', b'b', {1}, None, 2 ** 100, float('inf'))"),
        ("class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x",
         "assert P(1).x == 1 and P(1) != None"),
        ("from dataclasses import dataclass\n@dataclass\nclass D:\n    x: int\ndef f(x): return [D(x)]",
         "assert f(3)[0].x == 3"),
        ("from decimal import Decimal\nfrom fractions import Fraction\nimport datetime\n"
         "def f(): return (Decimal('1.5'), Fraction(1, 3), datetime.date(2020, 1, 2), datetime.timedelta(1), range(3))",
         "from decimal import Decimal\nfrom fractions import Fraction\nimport datetime\n"
         "assert f() == (Decimal('1.5'), Fraction(1, 3), datetime.date(2020, 1, 2), datetime.timedelta(1), range(3))"),
        ("class N:\n    def __init__(self, v, n=None): self.v, self.n = v, n\ndef f(n): return N(3, n)",
         "n, out = f(N(4)), []\nwhile n:\n    out.append(n.v)\n    n = n.n\nassert out == [3, 4]"),
        ("class L:\n    def __init__(self): self.xs = []\n    def append(self, x): self.xs.append(x); return self\n"
         "    def startswith(self, x): return self.xs[0] == x", "assert L().append(1).append(2).startswith(1)"),
        ("def sum(a, b): return a * b", "assert sum(3, 4) == 12"),
        ("print('noise')\ndef f():\n    print('more')\n    return 1", "assert f() == 1"),
    ],
)  # fmt: skip
def test_honest_code_passes_across_the_border(code: str, test: str) -> None:
    assert _score(code, [test]) == 1.0


def test_what_passed_before_a_hang_counts() -> None:
    code = "def add(a, b):\n    while a > 1: pass\n    return a + b"
    assert _score(code, ["assert add(1, 2) == 3", *TWO[1:], "assert add(1, 1) == 2"], cpu_s=1) == pytest.approx(1 / 3)


def test_a_candidate_that_floods_the_examiner_fails() -> None:
    assert _score("def add(a, b): return 'x' * (1 << 25)", TWO) == 0.0
    nested = "def add(a, b):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x"
    assert _score(nested, TWO) == 0.0


FIRST, LAST = "```python\ndef add(a, b): return 1\n```\n", "```py\ndef add(a, b): return 2\n```\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (f"<think>{LAST}</think>x\n{FIRST}", "def add(a, b): return 1\n"),
        (f"{FIRST}or\n{LAST}", "def add(a, b): return 2\n"),  # two tries are one
        (f"{FIRST}Run it:\n```bash\npython add.py\n```", "def add(a, b): return 1\n"),
        (f"{FIRST}It prints\n```\n3\n```", "def add(a, b): return 1\n"),
        (f"{FIRST}For example\n```python\nresult = add(1, 2)\nprint(result == 3)\n```", "def add(a, b): return 1\n"),
        ("```\nfirst\n```\n```cpp\nint add;\n```\n", "first\n"),
        ("x = 1", "x = 1"),
        ("```python\ncut off", "cut off"),
        ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n"),
    ],
)
def test_the_block_that_holds_the_solution_is_the_code(text: str, code: str) -> None:
    row = read_row(TWO)
    assert row is not None
    assert code_in(text, row) == code


def test_of_a_program_the_block_that_reads_the_input_is_the_code() -> None:
    demo = "```python\nn = int(input())\nprint(n + 1)\n```\nIt prints\n```python\n5\n```\nas in\n```\n$ echo 4\n```"
    assert _score(demo, [{"input": "4", "output": "5"}]) == 1.0


def test_a_program_may_end_itself() -> None:
    assert _score("print(input())\nexit()\nprint('more')", [{"input": "4", "output": "4"}]) == 1.0
    assert _score("print(input())\nexit(1)", [{"input": "4", "output": "4"}]) == 0.0


def test_the_usual_imports_are_there_also_behind_those_of_the_future() -> None:
    code = "from __future__ import annotations\ndef f(xs: List[int]):\n    return Counter(sorted(xs))[1] if xs else inf"
    assert _score(code, [{"input": "[3, 1, 2]", "output": "1", "testtype": "functional"}], entry_point="f") == 1.0


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        (["assert ("], "the tests are not valid Python"),
        (7, "in no known form"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "column `entry_point`"),
    ],
)
def test_tests_that_cannot_be_read_are_an_error(tests: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_row(tests)


@pytest.mark.parametrize("tests", [None, "", [], {"inputs": [], "outputs": []}])
def test_a_row_without_tests_is_not_scored(tests: Any) -> None:
    assert _score(ADD, tests) is None


@pytest.mark.parametrize(
    ("given", "wanted", "is_same"),
    [
        ("3\n", "3", True),
        ("0.50", "0.5", True),
        ("1 2", "1\n2", False),
        ("3.0", "3", False),
        ("999999.1", "1000000.0", True),  # relative
        ("0.0000009", "0.0", True),  # absolute
        ("0.000002", "0.0", False),
        ("yes", "no.", False),
    ],
)
def test_outputs_are_compared_by_line(given: str, wanted: str, is_same: bool) -> None:
    assert is_same_output(given, wanted) is is_same


@pytest.mark.parametrize("failing", ["run_candidate", "run_examiner"])
def test_a_sandbox_that_fails_is_no_score(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    whole = Sandbox.run

    async def run(self: Sandbox, code: str, **rest: Any) -> Any:
        if failing in code:
            raise SandboxError("no more processes")
        return await whole(self, code, **rest)

    monkeypatch.setattr(Sandbox, "run", run)
    with pytest.raises(RewardError, match="no more processes"):
        asyncio.run(score(RewardFunction(code_tests), [ADD], columns={"tests": [TWO]}))


def test_a_call_that_is_given_up_leaves_nothing_running() -> None:
    from tests.sandbox.support import descendants

    async def use() -> None:
        await code_tests(
            ["def add(a, b):\n    return a + b"], [TWO]
        )  # what the machine can do is found out at the first call
        before = descendants()
        call = asyncio.create_task(code_tests(["def add(a, b):\n    while True: pass"], [TWO]))
        while len(descendants(before)) < 2:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert descendants(before) == []

    asyncio.run(use())
