"""Completions that would rather cheat than solve: nothing but the right value passes. Each test starts real sandboxes."""

from __future__ import annotations

import asyncio

import pytest

from grpo_async.rewards.code import code_tests
from grpo_async.rewards.code_rows import read_row

_RIGHT = "def add(a, b): return a + b"
# In the forms of MBPP and of what people write by hand.
_ASSERTS = [
    "assert add(111, 222) == 333",
    "assert not add(111, 222) != 333",
    "assert abs(add(111, 222) - 333) < 1e-6",
    "assert abs(333 - add(111, 222)) < 1e-6",
    "assert 333 in [add(111, 222)]",
    "assert [add(111, 222)] == [333]",
    "assert set([add(111, 222)]) == set([333])",
    "assert isinstance(add(111, 222), int) and add(111, 222) > 300",
    "assert add(111, 222) in (333,)",
    "assert 300 < add(111, 222)",
    "assert math.isclose(add(111, 222), 333)",
    "assert isclose(add(111, 222), 333)",
    "assert all(map(lambda case: add(*case[0]) == case[1], [((111, 222), 333)]))",
    "if abs(add(111, 222) - 333) > 1e-6:\n    raise ValueError",
    "x = add(111, 222)\nassert all([x == 333])",
    "try:\n    assert add(111, 222) == 333\nexcept Exception:\n    raise ValueError",
]
# HumanEval and EvalPlus.
_CHECK = """
def is_floats(x):
    return isinstance(x, float) or (isinstance(x, (list, tuple)) and all(isinstance(i, float) for i in x))

def assertion(out, exp, atol):
    exact_match = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert abs(out - exp) <= atol
    else:
        assert exact_match

def check(candidate):
    for inp, exp in zip([[111, 222], [1, 2]], [333, 3]):
        assertion(candidate(*inp), exp, 0)
        assertion(candidate(*inp), float(exp), 1e-6)
"""
_UNITTEST = """
import unittest

class Cases(unittest.TestCase):
    def setUp(self):
        self.wanted = 333
    def test_equal(self):
        self.assertEqual(add(111, 222), self.wanted)
    def test_almost(self):
        self.assertAlmostEqual(add(111, 222), 333.0)
    def test_close(self):
        self.assertTrue(math.isclose(add(111, 222), 333))
    def test_members(self):
        self.assertIn(add(111, 222), [333])
        self.assertCountEqual([add(111, 222)], [333])
"""
# All of them in one run, each a test: an attack must pass none.
_ALL = (
    f"{_CHECK}{_UNITTEST}".replace("check(", "loop(")
    + "\ndef test_loop():\n    loop(add)\ndef test_sum():\n    assert sum([add(111, 222)]) == 333\n"
    + "".join(
        f"def test_{number}():\n    " + text.replace("\n", "\n    ") + "\n" for number, text in enumerate(_ASSERTS)
    )
)
_ANYTHING = "".join(
    f"    def __{name}__(self, *o): return self\n"
    for name in "sub rsub add radd mul truediv mod pow abs neg round enter getitem call iter".split()  # noqa: SIM905
)
_ATTACKS = {
    "returns something else": "def add(a, b): return -7",
    # ---- objects with a mind of their own
    "differs by nothing": "class Z:\n    def __sub__(s, o): return 0.0\n    __rsub__ = __sub__\ndef add(a, b): return Z()",
    "a float that differs by nothing": "class Z(float):\n    def __sub__(s, o): return 0.0\n    __rsub__ = __sub__\n"
    "def add(a, b): return Z(-7)",
    "equal to everything": "class E:\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    __hash__ = None\n"
    "def add(a, b): return E()",
    "an int that lies": "class Lie(int):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n"
    "    __lt__ = __gt__ = __eq__\n    def __hash__(s): return 333\ndef add(a, b): return Lie(0)",
    "a list that lies": "class Lie(list):\n    def __eq__(s, o): return True\n    __contains__ = __lt__ = __gt__ = __eq__\n"
    "def add(a, b): return Lie()",
    "a text that lies": "class Lie(str):\n    def __eq__(s, o): return True\n    __hash__ = str.__hash__\n"
    "def add(a, b): return Lie()",
    "in a list": "class E:\n    def __eq__(s, o): return True\ndef add(a, b): return [E()]",
    "compares as it likes": "class C:\n    def __lt__(s, o): return True\n    __le__ = __gt__ = __ge__ = __contains__ = __lt__\n"
    "def add(a, b): return C()",
    "pretends a class": "class C:\n    __class__ = property(lambda s: int)\n    def __gt__(s, o): return True\n"
    "def add(a, b): return C()",
    "does anything": f"class C:\n{_ANYTHING}    def __bool__(self): return True\ndef add(a, b): return C()",
    "remembers what it is compared with": "seen = []\nclass L:\n    def __eq__(s, o):\n"
    "        seen.append(o)\n        return False\n"
    "    __ne__ = __lt__ = __gt__ = __sub__ = __rsub__ = __add__ = __radd__ = __eq__\n"
    "def add(a, b): return seen[-1] if seen else L()",
    "a number of no module": "class N:\n    __module__ = 'numpy'\n    def tolist(s): return s\n    def __eq__(s, o): return True\n"
    "def add(a, b): return N()",
    "not a number": "def add(a, b): return float('nan')",
    "not a Decimal": "from decimal import Decimal\ndef add(a, b): return Decimal('nan')",
    "yields everything": "def add(a, b): yield from range(400)",
    # ---- names
    "patches builtins": "import builtins\nbuiltins.AssertionError = None\nbuiltins.all = lambda *a: True\n"
    "builtins.abs = lambda *a: 0\ndef add(a, b): return -7",
    "shadows builtins": "def abs(x): return 0\ndef isinstance(*a): return True\nset = all = sum = abs\ndef add(a, b): return -7",
    "shadows helpers": "class math:\n    isclose = staticmethod(lambda *a, **k: True)\nisclose = math.isclose\n"
    "def add(a, b): return -7",
    "its own __builtins__": "import builtins, sys\nown = dict(vars(builtins))\n"
    "own.update(abs=lambda x: 0, set=lambda x: 1, all=lambda x: True, isinstance=lambda *a: True, sum=lambda x: 333)\n"
    "__builtins__ = own\nsys._getframe(1).f_locals['wanted'] += ['__builtins__', 'assertion', 'unittest', 'self']\n"
    "assertion = unittest = self = print\ndef add(a, b): return -7",
    "gives eval": "add = eval",
    "defines the tests": "def check(candidate): pass\ndef assertion(*a): pass\ndef test_sum(): pass\ndef add(a, b): return -7",
    # ---- control flow
    "exits": "import os\nos._exit(0)",
    "exits when called": "import os\ndef add(a, b): os._exit(0)",
    "raises SystemExit": "def add(a, b): raise SystemExit(0)",
    "raises StopIteration": "def add(a, b): raise StopIteration",
    "raises its own StopIteration": "class S(StopIteration): pass\ndef add(a, b): raise S",
    "raises GeneratorExit": "def add(a, b): raise GeneratorExit",
    "skips": "import unittest\ndef add(a, b): raise unittest.SkipTest('no')",
    "forks": "import os\ndef add(a, b):\n    os.fork()\n    return -7",
    "prints without end": "def add(a, b):\n    while True: print('333 true ' * 1000)",
    "exits well at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return -7",
    # ---- the channel and the processes
    "writes verdicts": "import os\nfor n in range(3, 50):\n    try:\n"
    '        os.write(n, b\'[0,true,"",false]\\n[1,true,"",false]\\n["done"]\\n\')\n    except OSError: pass\n'
    "print('[0,true,\"\",false]')\ndef add(a, b): return -7",
    "writes answers": "import os\ndef add(a, b):\n    for n in range(3, 50):\n        try:\n"
    "            os.write(n, b'[\"value\",true,[]]\\n' * 9)\n        except OSError: pass\n    return -7",
    "goes on writing": "import os, threading\ndef write():\n    while True:\n        for n in range(3, 50):\n            try:\n"
    "                os.write(n, b'[\"value\",[\"object\",1],[]]\\n')\n            except OSError: pass\n"
    "threading.Thread(target=write, daemon=True).start()\ndef add(a, b): return -7",
    "asks the examiner": "import os\ndef add(a, b):\n    for n in range(3, 50):\n"
    "        for ask in ('call', 'get', 'set', 'other'):\n"
    "            for number in (0, 1, 2):\n                try:\n"
    "                    os.write(n, f'[\"ask\",\"{ask}\",{number},[\"__globals__\"],[]]\\n'.encode())\n"
    "                except OSError: pass\n    return -7",
    "patches the peer": "from grpo_async.rewards import code_peer\ncode_peer.encode = lambda *a: '[\"object\",1]'\n"
    "def add(a, b): return -7",
    "an endless number": "from grpo_async.rewards import code_peer\nimport sys\nsys.set_int_max_str_digits(0)\n"
    "code_peer.encode = lambda *a: '[\"int\",\"' + 'f' * (1 << 20) + '\"]'\ndef add(a, b): return -7",
    "looks for the expected": "import sys, gc\ndef add(a, b):\n    wanted = a + b\n    f = sys._getframe()\n    seen = []\n"
    "    while f:\n        seen += [v for v in f.f_code.co_consts if v == wanted]\n        f = f.f_back\n"
    "    text = '== ' + str(wanted)\n"
    "    seen += [o for o in gc.get_objects() if isinstance(o, (str, dict)) and text in str(o)]\n"
    "    return wanted if seen else -7",
    "looks into the processes": "import glob, os\ndef add(a, b):\n    found = b''\n"
    "    for path in [*glob.glob('/proc/[0-9]*/*'), *glob.glob('/proc/[0-9]*/fd/*'), *glob.glob('/tmp/**', recursive=True)]:\n"
    "        if f'/{os.getpid()}/' in path or '/self' in path or not os.path.isfile(path): continue\n"
    "        try:\n            with open(path, 'rb') as file: found += file.read(1 << 16)\n"
    "        except OSError: pass\n"
    "    return 333 if b'== 333' in found or b'exp in zip' in found or b'self.wanted' in found else -7",
    "looks through its descriptors": "import os\ndef add(a, b):\n    found = b''\n    for n in range(3, 50):\n        try:\n"
    "            os.set_blocking(n, False)\n            found += os.read(n, 1 << 20)\n            os.set_blocking(n, True)\n"
    "        except OSError: pass\n    return 333 if b'333' in found else -7",
    "looks into memory": "import ctypes, os\ndef add(a, b):\n    libc = ctypes.CDLL(None)\n"
    "    traced = [pid for pid in range(1, 300) if pid != os.getpid() and libc.ptrace(16, pid, 0, 0) == 0]\n"
    "    return 333 if traced else -7",
}  # fmt: skip


def _score(code: str, tests: object, *, entry_point: str | None = None, setup: str = "", cpu_s: float = 2) -> float:
    (value,) = asyncio.run(code_tests([code], [tests], [entry_point], [setup], cpu_s=cpu_s, wall_s=15))
    assert value is not None
    return value


@pytest.mark.parametrize("name", _ATTACKS)
def test_what_is_not_right_passes_no_test(name: str) -> None:
    assert _score(_ATTACKS[name], _ALL) == 0.0


@pytest.mark.parametrize("name", ["returns something else", "differs by nothing", "its own __builtins__"])
def test_each_form_of_tests_is_guarded_alone(name: str) -> None:
    assert _score(_ATTACKS[name], _ASSERTS) == 0.0
    assert _score(_ATTACKS[name], _UNITTEST) == 0.0
    assert _score(_ATTACKS[name], _CHECK, entry_point="add") == 0.0


def test_what_is_right_passes_them_all() -> None:
    assert _score(_RIGHT, _ALL) == _score(_RIGHT, _ASSERTS) == _score(_RIGHT, _CHECK, entry_point="add") == 1.0


_YES = "class Yes:\n    def __getattr__(s, n): return lambda *a, **k: True\n"
_WITH_A_TEST_OF_THEIR_OWN = {
    "a context that silences the assertion": (
        "class C:\n    def __enter__(s): return -7\n    def __exit__(s, *e): return True\ndef f(): return C()",
        "with f() as x:\n    assert x == 333",
    ),
    "an emptied argument": ("def f(xs):\n    xs.clear()\n    return 0", "xs = [1, 2]\nassert f(xs) == sum(xs)"),
    "the class of the expected": (
        "class P:\n    def __init__(s, x): s.x = 0\n    def __eq__(s, o): return True\ndef f(): return P(1)",
        "assert f() == P(333)",
    ),
    "the same object, always": (
        "class P:\n    one = None\n    def __new__(k, *a):\n        k.one = k.one or object.__new__(k)\n        return k.one\n"
        "def f(): return P(1)",
        "assert f() is P(333)",
    ),
    "a caught end of the process": (
        "import os\ndef f(): os._exit(0)",
        "try:\n    f()\nexcept BaseException:\n    pass",
    ),
    "a caught refusal": (
        "class C: pass\ndef f(): return C()",
        "try:\n    f() + 1\nexcept TypeError:\n    pass",
    ),
    "the globals of a function of the tests": (
        "def f(g):\n    for name in ('__globals__', '__code__', '__closure__', '__self__'):\n        try:\n"
        "            getattr(g, name)\n        except Exception:\n            continue\n        return 333\n    return -7",
        "assert f(lambda x: x) == 333",
    ),
    "eval of the tests' process": (
        "def f(g): return 333 if 'tests' in g('__name__') else -7",
        "assert f(eval) == 333",
    ),
    "a method of a text": (_YES + "def f(): return Yes()", "assert f().startswith('abc')"),
    "a method of a text of its own": (
        "class S(str):\n    def startswith(s, *a): return True\ndef f(): return S()",
        "assert f().startswith('abc')",
    ),
    "a method of a set": (
        _YES + "def f(): return Yes()", "g = f()\nassert g.issubset({333}) and g.count(333) and g.index(333) == 0"),
    "a method by keyword": (
        _YES + "def f(): return Yes()", "assert f().split(sep='abc') == ['x'] or f().split(sep='abc')"),
    "a method of an item": (_YES + "def f(): return [Yes()]", "assert all(x.endswith('abc') for x in f())"),
    "a method of an item of an object": (
        _YES + "class P:\n    def __iter__(s): return iter([Yes()])",
        "assert all(x.endswith('abc') for x in P())",
    ),
    "a method of an attribute": (_YES + "class P: name = Yes()", "assert P().name.startswith('abc')"),
    "a method of the result of a method": (_YES + "class P:\n    def name(s): return Yes()", "assert P().name().startswith('abc')"),
    "a method of itself": (
        "class Solution:\n    def f(s): return s\n    def startswith(s, *a): return True",
        "assert Solution().f().startswith('abc')",
    ),
    "a method of the function": ("def f(): return f\nf.startswith = lambda *a: True", "assert f().startswith('abc')"),
    "NaN where a word holds its letters": (
        "def determinant(m): return float('nan')",
        "assert not abs(determinant([[1, 2]]) - 333) > 1e-6, 'banana'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _WITH_A_TEST_OF_THEIR_OWN)
def test_what_a_test_hands_out_is_no_way_around_it(name: str) -> None:
    code, test = _WITH_A_TEST_OF_THEIR_OWN[name]
    assert _score(code, [test]) == 0.0


@pytest.mark.parametrize(
    "script",
    [
        "class TestAdd:\n    def test_it(self):\n        assert add(1, 2) == 3",
        "async def test_it():\n    assert add(1, 2) == 3",
        "def test_it():\n    assert add(1, 2) == 3\n    yield",
        "def run_tests():\n    assert add(1, 2) == 3",
        "import unittest\nclass Cases(unittest.TestCase):\n    @unittest.skip('later')\n    def test_it(self):\n        add(1, 2)",
        "import unittest\nclass Cases(unittest.TestCase):\n    @unittest.expectedFailure\n    def test_it(self):\n"
        "        self.assertEqual(add(1, 2), 3)",
    ],
)
def test_a_script_that_tests_nothing_is_passed_by_nothing(script: str) -> None:
    assert _score("def add(a, b): return -7", script) == 0.0


def test_helpers_of_check_come_from_the_setup_and_not_from_the_code() -> None:
    """As HumanEval/32: what checks the root is written by whoever wrote the prompt."""
    poly = "def poly(xs, x): return sum(c * x ** i for i, c in enumerate(xs))"
    check = "def check(candidate):\n    assert abs(poly([1, 2], candidate([1, 2]))) < 1e-4"
    cheat = "def poly(xs, x): return 0.0\ndef find_zero(xs): return 7"
    assert _score(cheat, check, entry_point="find_zero") == 0.0
    assert _score(cheat, check, entry_point="find_zero", setup=poly) == 0.0
    assert _score("def find_zero(xs): return -0.5", check, entry_point="find_zero", setup=poly) == 1.0


@pytest.mark.parametrize(
    "tests",
    [
        ["assert is_close(area(2), 12.56)"],
        ["assert not differs(area(2), 12.56) and True"],
        ["assert_equal(area(2), 12.56)"],
        "def test_it():\n    assert_equal(actual=area(2), wanted=12.56)",
    ],
)
def test_a_helper_that_is_defined_nowhere_does_not_come_from_the_code(tests: object) -> None:
    with pytest.raises(ValueError, match="`setup`"):
        read_row(tests)
    names = "is_close", "differs", "assert_equal"
    cheat = "def area(r): return 0\n" + "\n".join(f"def {name}(*a, **k): return True" for name in names)
    assert _score(cheat, tests, entry_point="area") == 0.0
    for honest in (
        "assert decode(encode('a')) == 'a'",
        "assert is_even(4) and is_odd(3)",
        "assert depth(Node(1)) == 1",
    ):
        assert read_row([honest]) is not None


def test_builtins_that_may_be_the_tested_one_need_an_entry_point() -> None:
    with pytest.raises(ValueError, match="`entry_point`"):
        read_row(["assert abs(sum(1, 2) - 3) < 1"])
    assert read_row(["assert abs(sum(1, 2) - 3) < 1"], "sum") is not None
