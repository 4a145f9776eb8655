"""The two ends of a test run, each in its own sandbox, joined by a socket. Nothing here runs in the trainer's process.

    examiner: the row's tests                       candidate: the model's code
      f(3)      -- call f, 3 ------------------->     runs f(3)
                <- value 9 ----------------------
      9 == 9 is decided here, and reported to the owner

They exchange plain data of exact types, which the receiver rebuilds. Everything else of the candidate stays where it is, and the
tests get a `Handle`, whose operations give plain data in the end. What would show the expected value to the candidate, or let it
decide (`Handle` refuses it), fails the test. Arguments changed in place are sent back only if the code returned None.
"""

from __future__ import annotations

import operator
import os
import sys
from _json import encode_basestring_ascii as _text  # `json` itself takes longer to import than Python to start
from _json import make_scanner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, BinaryIO


MAX_MESSAGE_BYTES = 1 << 24
MAX_DEPTH = 200  # maximum nesting of data
MAX_INT_BITS = 1 << 20
_EXACT_IN_JSON = 1 << 53
_BUILTINS = vars(sys.modules["builtins"])


class PeerGone(BaseException):
    """The other process has ended. Not an Exception: the tests must not catch it."""


class RemoteError(Exception):
    """An exception of the candidate whose class does not exist here."""


class RefusedError(TypeError):
    """The test asks for something that only the candidate could decide, or that would reveal the test to it."""


class _Json:
    """The settings that the scanner reads from its owner."""

    strict = False
    object_hook = object_pairs_hook = None
    parse_float, parse_int = float, int

    @staticmethod
    def parse_constant(name: str) -> float:
        raise ValueError(name)  # written as text, see `encode`


_scan: Any = make_scanner(_Json)  # type: ignore[arg-type]


def read_json(text: str) -> Any:
    """Parse JSON; ValueError if the text is not JSON."""
    try:
        value, end = _scan(text, 0)
    except StopIteration as error:
        raise ValueError("no JSON") from error
    if end != len(text):
        raise ValueError("more than one value")
    return value


class Channel:
    """Lines of JSON to and from the other process, over the Unix socket `descriptor`."""

    def __init__(self, descriptor: int) -> None:
        self._input: BinaryIO = open(descriptor, "rb")  # noqa: SIM115 - as long as the process
        self._output: BinaryIO = open(descriptor, "wb", closefd=False)  # noqa: SIM115
        self.is_gone = False

    def send(self, message: str) -> None:
        try:
            self._output.write(message.encode("ascii") + b"\n")
            self._output.flush()
        except ConnectionError as error:
            self.is_gone = True
            raise PeerGone from error

    def receive(self) -> Any:
        try:
            line = self._input.readline(MAX_MESSAGE_BYTES) if not self.is_gone else b""  # the sandbox has wall_s
            if not line.endswith(b"\n"):
                raise ValueError("it has ended, or sends more than any result needs")
            return read_json(line[:-1].decode("ascii"))
        except (ValueError, RecursionError, ConnectionError) as error:
            self.is_gone = True
            raise PeerGone from error


# ------------------------------------------------------------------------------------------------------------ data

_MODULE_OF = {  # modules of the kinds that are not builtins
    **dict.fromkeys(("deque", "OrderedDict", "defaultdict", "Counter"), "collections"),
    **dict.fromkeys(("date", "time", "timedelta", "datetime"), "datetime"),
    "Decimal": "decimal",
    "Fraction": "fractions",
}
_ITEM_KINDS = ("list", "tuple", "set", "frozenset", "deque")
_PAIR_KINDS = ("dict", "OrderedDict", "defaultdict", "Counter")
_TEXT_KINDS = ("bytes", "bytearray", "Decimal")
_FIELDS_OF = {
    "complex": ("real", "imag"),
    "range": ("start", "stop", "step"),
    "Fraction": ("numerator", "denominator"),
    "date": ("year", "month", "day"),
    "time": ("hour", "minute", "second", "microsecond"),
    "timedelta": ("days", "seconds", "microseconds"),
    "datetime": ("year", "month", "day", "hour", "minute", "second", "microsecond"),
}
_KINDS = frozenset((*_ITEM_KINDS, *_PAIR_KINDS, *_TEXT_KINDS, *_FIELDS_OF))


def encode(value: Any, show: Callable[[Any], str], depth: int = 0) -> str:
    """Encode as JSON, where lists begin with the name of their kind; `show` encodes values that are not data. Only exact types are
    data: a subclass may behave differently. [1, (2.5, "a")] -> ["list",1,["tuple",2.5,"a"]]"""
    kind = type(value)
    if kind is str:
        return _text(value)
    if kind is int:
        return repr(value) if -_EXACT_IN_JSON < value < _EXACT_IN_JSON else f'["int","{value:x}"]'
    if value is None or kind is bool:
        return "null" if value is None else "true" if value else "false"
    if kind is float:
        return repr(value) if value - value == 0.0 else f'["float","{value!r}"]'
    if depth > MAX_DEPTH:
        raise RecursionError(f"data nested over {MAX_DEPTH} levels deep")
    parts = _parts(value, kind)
    if parts is not None:
        return f'["{kind.__name__}"' + "".join(["," + encode(item, show, depth + 1) for item in parts]) + "]"
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), show, depth + 1)
    return show(value)


def decode(value: Any, find: Callable[[list[Any]], Any], may_be_nan: bool = True, depth: int = 0) -> Any:
    """Decode data from an untrusted sender, the inverse of `encode`; `find` takes what `show` made. Raises if the value is not
    an output of `encode`."""
    if type(value) is not list:
        _must(type(value) is not dict)
        return value
    _must(depth <= MAX_DEPTH)
    tag = value[0]
    if tag in ("object", "exception"):
        return find(value)
    parts = [decode(item, find, may_be_nan, depth + 1) for item in value[1:]]
    if tag == "int":
        (text,) = parts
        _must(type(text) is str and len(text) * 4 <= MAX_INT_BITS)
        return int(text, 16)
    if tag == "float":
        _must(parts[0] in ("inf", "-inf") or (parts[0] == "nan" and may_be_nan))
        return float(parts[0])
    _must(tag in _KINDS)
    kind = getattr(__import__(_MODULE_OF.get(tag, "builtins")), tag)
    if tag in _ITEM_KINDS:
        return kind(parts)
    if tag in _PAIR_KINDS:
        pairs = dict(zip(parts[::2], parts[1::2], strict=True))
        return kind(None, pairs) if tag == "defaultdict" else kind(pairs)
    made = kind.fromhex(*parts) if tag in ("bytes", "bytearray") else kind(*parts)
    _must(may_be_nan or tag != "Decimal" or not made.is_nan())
    return made


def _must(is_so: bool) -> None:
    """Raise ValueError if false. Not an assertion: the data is not ours."""
    if not is_so:
        raise ValueError("this is not an output of `encode`, or it is NaN, which the tests do not mention")


def _parts(value: Any, kind: type) -> Sequence[Any] | None:
    """The parts of the value if it is data: {"a": 1} -> ["a", 1]."""
    name = kind.__name__
    if type(name) is not str or name not in _KINDS or getattr(value, "tzinfo", None) is not None:
        return None
    if getattr(sys.modules.get(_MODULE_OF.get(name, "builtins")), name, None) is not kind:
        return None
    if name in _ITEM_KINDS:
        return list(value)
    if name in _PAIR_KINDS:
        return [item for pair in value.items() for item in pair]
    if name in _TEXT_KINDS:
        return [str(value) if name == "Decimal" else value.hex()]
    return [getattr(value, field) for field in _FIELDS_OF[name]]


def text_of(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except Exception:  # noqa: BLE001 - a class of the candidate may raise anything
        return ""


# --------------------------------------------------------------------------------------------------- the candidate


def serve(channel: Channel, load: Callable[[list[str]], dict[str, Any]]) -> None:
    """Serve the examiner's requests until it is gone. `load` is object number 0."""
    shown: list[Any] = [load]
    numbers: dict[int, int] = {}  # id of a shown object, which `shown` keeps alive -> its number

    def show(value: Any) -> str:
        number = numbers.setdefault(id(value), len(shown))
        if number == len(shown):
            shown.append(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            base = next(each.__name__ for each in value.__mro__ if _BUILTINS.get(each.__name__) is each)
            return f'["exception",{number},{_text(value.__name__)},{_text(base)}]'
        return f'["object",{number}]'

    def find(reference: list[Any]) -> Any:
        return shown[reference[1]]

    while True:  # ends by PeerGone
        name, number, arguments, keywords = channel.receive()
        try:
            values = [decode(item, find) for item in arguments]
            by_name = {key: decode(item, find) for key, item in keywords}
            value = _operation(name)(shown[number], *values, **by_name)
            changed = [*values, *by_name.values()] if value is None else []
            now = [encode(item if type(item) in (list, dict, set, bytearray) else None, show) for item in changed]
            answer = f'["value",{encode(value, show)},[{",".join(now)}]]'
        except BaseException as error:  # noqa: BLE001 - raised at the other end
            given = error.args[0] if len(error.args) == 1 else None
            said = given if type(given) in (str, int, float) else text_of(error)
            answer = f'["error",{show(type(error))},{encode(said, show)}]'
        channel.send(answer)


def _operation(name: str) -> Callable[..., Any]:
    """The operation that `name` means on an object and further arguments: a call, entering and leaving its block, a builtin, or a
    function of `operator`."""
    if name == "call":
        return lambda target, *arguments, **keywords: target(*arguments, **keywords)
    if name in ("enter", "exit"):
        return lambda target, *arguments: getattr(type(target), f"__{name}__")(target, *arguments)
    if name == "isinstance":
        return lambda kind, instance: isinstance(instance, kind)
    operation: Callable[..., Any] = _BUILTINS.get(name) or getattr(operator, name)
    return operation


# ---------------------------------------------------------------------------------------------------- the examiner


class Handle:
    """An object of the candidate, as the tests see it."""

    __slots__ = ("_candidate", "_is_result", "_name", "_number")

    def __init__(self, candidate: Candidate, number: int, is_result: bool = False) -> None:
        object.__setattr__(self, "_candidate", candidate)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_name", "")  # as the tests name it
        object.__setattr__(self, "_is_result", is_result)  # of a function, where data would be

    def __getattr__(self, name: str) -> Any:
        return named(_ask(self, "getattr", name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        name, is_of_result = (object.__getattribute__(self, slot) for slot in ("_name", "_is_result"))
        if is_of_result and name in _METHODS_OF_DATA and (arguments or keywords):
            _refuse(
                self, f"{name}()"
            )  # of its own class: f(x).startswith("abc") would show it "abc", and it would say yes
        return _ask(self, "call", *arguments, **keywords)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Handle) and _ask(self, "isinstance", instance) is True

    def __eq__(self, other: object) -> bool:
        return False if other is None else _refuse(self, "==")

    def __ne__(self, other: object) -> bool:
        return True if other is None else _refuse(self, "!=")

    def __exit__(self, *error: object) -> None:
        """The candidate never sees an error, and never suppresses one."""
        _ask(self, "exit", None, None, None)


_METHODS_OF_DATA = frozenset(name for kind in (str, bytes, int, float, list, tuple, set, dict) for name in dir(kind))


def named(value: Any, name: str) -> Any:
    """The value; a handle remembers the name that the tests use for it."""
    if type(value) is Handle:
        object.__setattr__(value, "_name", name)
    return value


def _ask(handle: Handle, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
    candidate, number, name, is_result = (object.__getattribute__(handle, slot) for slot in _HANDLE_SLOTS)
    # An object of a class that the tests name is theirs to use. What functions return and attributes hold should be data.
    is_class = name.lstrip("_")[:1].isupper()
    gives_result = is_result or not (is_class or (not name and operation in ("getattr", "enter")))
    value = candidate.ask(operation, number, arguments, keywords, gives_result)
    if operation == "call" and not gives_result and name != "Solution" and type(value) is Handle:
        candidate.made.add(object.__getattribute__(value, "_number"))
    return value


_HANDLE_SLOTS = ("_candidate", "_number", "_name", "_is_result")


def _refuse(handle: Handle, what: str) -> Any:
    candidate: Candidate = object.__getattribute__(handle, "_candidate")
    why = "on an object of the tested code, which would decide the test itself; compare its attributes, or what its methods return"
    raise candidate.failed(RefusedError(f"{what} {why}"))


def _asking(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: _ask(self, name, *arguments)


def _refusal(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: _refuse(self, name)


_ASKED = "len iter next getitem setitem delitem reversed str repr bool int float complex index neg pos abs invert round enter"
for _name in _ASKED.split():
    setattr(Handle, f"__{_name}__", _asking(_name))
_CALCULATIONS = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split()  # noqa: SIM905
for _name in ["lt", "le", "gt", "ge", "hash", *(side + name for name in _CALCULATIONS for side in ("", "r", "i"))]:
    setattr(Handle, f"__{_name}__", _refusal(f"__{_name}__"))


class Candidate:
    """The candidate's process, which is not trusted.

    Args:
        channel: the channel to it.
        may_be_nan: whether a NaN can be a right result. It is neither above nor below any limit, so it would pass
            `if abs(x - y) > limit: fail`; if the tests do not mention NaN, it is a failure.
    """

    def __init__(self, channel: Channel, *, may_be_nan: bool) -> None:
        self._channel = channel
        self._may_be_nan = may_be_nan
        self._exceptions: dict[int, type[BaseException]] = {}  # number at the candidate -> class made here
        self.faults: list[Exception] = []  # errors of the running test, which has then failed, whatever it catches
        self.num_asked = 0
        self._gives_result = False
        self.made: set[int] = set()  # numbers of the objects that the tests have made: a method may return itself

    @property
    def is_gone(self) -> bool:
        return self._channel.is_gone

    def ask(
        self,
        operation: str,
        number: int,
        arguments: Sequence[Any] = (),
        keywords: dict[str, Any] | None = None,
        gives_result: bool = False,
    ) -> Any:
        """Make the candidate do something; returns its result or raises its exception. Objects in it are marked as results."""
        self.num_asked += 1
        self._gives_result = gives_result
        keywords = keywords or {}
        given = ",".join([encode(item, self._show) for item in arguments])
        by_name = ",".join([f"[{_text(key)},{encode(item, self._show)}]" for key, item in keywords.items()])
        self._channel.send(f"[{_text(operation)},{number},[{given}],[{by_name}]]")
        message = self._channel.receive()
        try:
            kind, first, second = message
            _must(kind in ("value", "error"))
            value = self._read(first)
            now = [self._read(item) for item in second] if kind == "value" else [self._read(second)]
            if kind == "error":
                value = self._exception(value, now[0], is_next=operation == "next")
        except Exception as error:  # an untrusted sender may send anything
            problem = f"the tested code gave something that is not data ({type(error).__name__})"
            raise self.failed(ValueError(problem)) from error
        if kind == "error":
            raise value
        for given_item, item in zip((*arguments, *keywords.values()), now, strict=False):
            _update(given_item, item)
        return value

    def failed(self, error: Exception) -> Exception:
        """Make the running test fail, even if it catches the error."""
        self.faults.append(error)
        return error

    def _show(self, value: Any) -> str:
        if isinstance(value, Handle):
            return f'["object",{object.__getattribute__(value, "_number")}]'
        raise self.failed(
            RefusedError(f"the test hands a {type(value).__name__} to the tested code; give it plain data")
        )

    def _find(self, reference: list[Any]) -> Any:
        tag, number, *rest = reference
        _must(type(number) is int)
        if tag == "object":
            return Handle(self, number, is_result=self._gives_result and number not in self.made)
        name, base_name = rest
        base: Any = _BUILTINS.get(base_name)
        # Never a way out of the process: the candidate's SystemExit and KeyboardInterrupt are ordinary failures.
        is_error = isinstance(base, type) and issubclass(base, Exception)
        if is_error and name == base_name:
            return base
        made = type(str(name)[:100], (base if is_error else RemoteError,), {})
        return self._exceptions.setdefault(number, made)

    def _read(self, value: Any) -> Any:
        return decode(value, self._find, self._may_be_nan)

    def _exception(self, made: Any, said: Any, *, is_next: bool) -> BaseException:
        """Rebuild an exception. StopIteration ends an iterator, so a call may not raise it: within `map` or `all` in the tests it
        would end their loop over the cases."""
        _must(isinstance(made, type) and issubclass(made, Exception))
        if issubclass(made, StopIteration) and not (is_next and made is StopIteration):
            made = RemoteError
        try:
            error: BaseException = made.__new__(made, said)
        except TypeError:  # some exceptions need more arguments than a text
            error = RemoteError.__new__(RemoteError, said)
        error.args = (said,)
        return error


def _update(given: Any, now: Any) -> None:
    """Update an argument that the candidate changed in place."""
    if type(given) is not type(now):
        return
    if isinstance(given, list | bytearray):
        given[:] = now
    elif isinstance(given, dict | set):
        given.clear()
        given.update(now)


# -------------------------------------------------------------------------------------------------- main functions

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
        import asyncio  # here, because it adds to the start of every run

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
