"""The two ends of a test run, each in a sandbox of its own, joined by two pipes. Nothing here runs in the trainer's process.

    examiner: the row's tests                       candidate: the model's code
      f(3)      -- call f, 3 ------------------->     runs f(3)
                <- value 9 ----------------------
      9 == 9 is found here, and reported to the owner

What crosses is plain data, rebuilt by the receiver: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set,
frozenset, dict, range, slice, Decimal, Fraction, what `collections` and `datetime` have, all of the exact type; numpy's arrays
and scalars as lists and numbers. Everything else (an instance of a class of the candidate, a dataclass and a named tuple too)
stays where it is, and the tests get a `Handle`. Through a handle they call, read attributes, iterate, and ask for text, length
and truth: each gives plain data in the end, which the examiner compares. They cannot compare or calculate with a handle
itself: the candidate would see the expected value and decide. Such a test is refused, which means that it has not passed.

Arguments that the code changed in place come back when it returned None, as functions that work in place do; else a function
could empty what the expected result is computed from. When the candidate's process ends, every test that has not passed has
failed: no exit code, output or patched builtin of the candidate counts.

Imports next to nothing: this is the startup time of every run.
"""

from __future__ import annotations

import sys
from _json import encode_basestring_ascii, make_scanner  # `json` itself takes longer to import than Python to start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, BinaryIO


MAX_MESSAGE_BYTES = 1 << 24
MAX_DEPTH = 200  # of nested data
MAX_INT_BITS = 1 << 20
TESTS_MODULE = "tests_of_the_row"
CANDIDATE_MODULE = "candidate"
_EXACT_IN_JSON = 1 << 53
_SPECIAL = (  # noqa: SIM905
    "__len__ __iter__ __next__ __getitem__ __setitem__ __delitem__ __reversed__ __str__ __repr__ __bool__ __int__ "
    "__float__ __complex__ __index__ __neg__ __pos__ __abs__ __invert__ __round__ __enter__ __exit__"
).split()
_COMPARING = "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __hash__".split()  # noqa: SIM905
_CALCULATING = [
    f"__{side}{name}__"
    for name in "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split()  # noqa: SIM905
    for side in ("", "r", "i")
    if (side, name) != ("i", "divmod")
]
_BUILTINS = vars(sys.modules["builtins"])


class PeerGone(BaseException):
    """The other process has ended. Not an Exception: the tests must not catch it."""


class RemoteError(Exception):
    """An exception of the other side that has no class here."""


class RefusedError(TypeError):
    """The test asks for something that only the candidate could decide."""


class Remote:
    """Stands for an object of the other side."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return _ask(self, "call", *arguments, **keywords)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and _ask(self, "is_class_of", instance) is True


class Handle(Remote):
    """An object of the candidate, as the examiner has it."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return False if other is None else _refuse(self, "==")

    def __ne__(self, other: object) -> bool:
        return True if other is None else _refuse(self, "!=")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        """The candidate learns the class of a builtin error alone, and never silences a failed assertion."""
        is_failure = kind is not None and not (issubclass(kind, Exception) and not issubclass(kind, AssertionError))
        shown = kind if kind is not None and not is_failure and _builtin_name(kind) is not None else None
        return _ask(self, "special", "__exit__", shown, None, None) is True and not is_failure


def _special(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: _ask(self, "special", name, *arguments)


def _refusal(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: _refuse(self, name)


for _name in _SPECIAL:
    setattr(Remote, _name, _special(_name))
    if _name not in vars(Handle):
        setattr(Handle, _name, _special(_name))
for _name in (*_COMPARING, *_CALCULATING):
    setattr(Remote, _name, _special(_name))
    if _name not in ("__eq__", "__ne__"):
        setattr(Handle, _name, _refusal(_name))


def _ask(remote: Remote, what: str, *arguments: Any, **keywords: Any) -> Any:
    peer: Peer = object.__getattribute__(remote, "_peer")
    return peer.ask(what, object.__getattribute__(remote, "_number"), arguments, keywords)


def _refuse(remote: Remote, what: str) -> Any:
    peer: Peer = object.__getattribute__(remote, "_peer")
    raise peer.failed(
        RefusedError(
            f"{what} on an object of the tested code, which would decide the test itself; compare its attributes, or what "
            "its methods return"
        )
    )


class _Json:
    """What the scanner asks its owner for."""

    strict = False
    object_hook = object_pairs_hook = None
    parse_float, parse_int = float, int

    @staticmethod
    def parse_constant(name: str) -> float:
        raise ValueError(name)  # written as text, see `encode`


_scan: Any = make_scanner(_Json)  # type: ignore[arg-type]


def read_json(text: str) -> Any:
    """ValueError where it is none."""
    try:
        value, end = _scan(text, 0)
    except StopIteration as error:
        raise ValueError("no JSON") from error
    if end != len(text):
        raise ValueError("more than one value")
    return value


class Peer:
    """One end of the pipes: asks the other end, and answers what it asks meanwhile.

    Args:
        descriptors: to read from and to write to.
        is_examiner: the other end is not to be trusted: it may call the functions that it was given, use the public names of
            instances of the tests' own classes, and nothing else.
        may_be_nan: whether a NaN can be a right result. It is neither above nor below any limit, so it slips through
            `if abs(x - y) > limit: fail`; where the tests do not speak of it, it is a failure.
    """

    def __init__(self, descriptors: tuple[int, int], *, is_examiner: bool, may_be_nan: bool = True) -> None:
        self._input: BinaryIO = open(descriptors[0], "rb")  # noqa: SIM115 - as long as the process
        self._output: BinaryIO = open(descriptors[1], "wb")  # noqa: SIM115
        self._is_examiner = is_examiner
        self._may_be_nan = may_be_nan
        self._shown: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}  # id of a shown object, which `_shown` keeps alive -> its number
        self._exceptions: dict[int, type[BaseException]] = {}  # number over there -> class made here
        self.faults: list[Exception] = []  # of the test that runs: it has failed, whatever it catches
        self.is_gone = False
        self.num_asked = 0

    def ask(self, what: str, number: int, arguments: Sequence[Any] = (), keywords: dict[str, Any] | None = None) -> Any:
        """Have the other end do something; returns its result or raises its exception."""
        self.num_asked += 1
        given = ",".join([self.encode(item) for item in arguments])
        by_name = ",".join([f"[{_text(name)},{self.encode(item)}]" for name, item in (keywords or {}).items()])
        self._send(f'["ask",{_text(what)},{number},[{given}],[{by_name}]]')
        while True:
            message = self._receive()
            try:
                kind, *content = message
                if kind == "value":
                    value, now = self.decode(content[0]), [self.decode(item) for item in content[1]]
                elif kind == "error":
                    is_next = what == "special" and arguments[0] == "__next__"
                    value, now = self._exception(content, is_next=is_next), []
                else:
                    what_else, of, with_, by = content
                    _must(kind == "ask" and type(of) is int and type(with_) is list and type(by) is list)
            except Exception as error:  # whatever somebody who is not to be trusted sends
                raise self.failed(
                    ValueError(f"the tested code gave something that is not data ({type(error).__name__})")
                ) from error
            if kind == "ask":
                self._answer(what_else, of, with_, by)
                continue
            if kind == "error":
                raise value
            for given_item, item in zip(arguments, now, strict=False):
                _update(given_item, item)
            return value

    def serve(self) -> None:
        """Answer until the other end is gone."""
        while True:
            _, what, number, arguments, keywords = self._receive()
            self._answer(what, number, arguments, keywords)

    def failed(self, error: Exception) -> Exception:
        """Have the test that runs fail, even if it catches the error."""
        self.faults.append(error)
        return error

    # --------------------------------------------------------------------------------------------------- data

    def encode(self, value: Any, depth: int = 0) -> str:
        """As JSON, where lists begin with the name of their kind. Only exact types are data: a subclass may have a mind of its
        own. [1, (2.5, "a")] -> ["list",1,["tuple",2.5,"a"]]"""
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
            return self._list(kind.__name__, parts, depth)
        if isinstance(value, Remote):
            return f'["yours",{object.__getattribute__(value, "_number")}]'
        if kind.__module__ == "numpy" and hasattr(value, "tolist"):
            return self.encode(value.tolist(), depth + 1)
        if self._is_examiner and (place := _importable(value)) is not None:
            return self._list("import", place, depth)  # eval, print, math.sqrt: those of the candidate's own process
        return self._show(value)

    def _list(self, tag: str, parts: Sequence[Any], depth: int) -> str:
        return f'["{tag}"' + "".join(["," + self.encode(item, depth + 1) for item in parts]) + "]"

    def decode(self, value: Any, depth: int = 0) -> Any:
        """Raises something where it is nothing that `encode` makes."""
        if type(value) is not list:
            _must(type(value) is not dict)
            return value
        _must(depth <= MAX_DEPTH)
        tag = value[0]
        if tag == "yours":
            return self._shown[value[1]]
        if tag == "mine":
            return (Handle if self._is_examiner else Remote)(self, _number(value[1]))
        if tag == "exception":
            return self._exception_class(value)
        if tag == "import" and not self._is_examiner:
            return _imported(value[1], value[2])
        made = _made(tag, [self.decode(item, depth + 1) for item in value[1:]])
        if not self._may_be_nan and _has_nan(made):
            self.failed(ValueError("the tested code gave NaN, which the tests do not mention"))
        return made

    def _show(self, value: Any) -> str:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._shown) + 1
            self._shown[number] = value
        if isinstance(value, type) and issubclass(value, BaseException):
            return f'["exception",{number},{_text(value.__name__)},{_text(_builtin_base(value))}]'
        return f'["mine",{number}]'

    # --------------------------------------------------------------------------------------------- exceptions

    def _exception_class(self, content: list[Any]) -> type[BaseException]:
        _, number, name, base = content
        if _number(number) not in self._exceptions:
            self._exceptions[number] = type(str(name)[:100], (_builtin_exception(base),), {})
        return self._exceptions[number]

    def _exception(self, content: list[Any], *, is_next: bool) -> BaseException:
        """StopIteration is the end of an iterator, and nothing that a call may raise: within `map` or `all` of the tests it would
        end their loop over the cases."""
        kind, arguments = content
        made = _builtin_exception(kind) if type(kind) is str else self._exception_class(kind)
        if issubclass(made, StopIteration) and not (is_next and made is StopIteration):
            made = RemoteError
        values = [self.decode(item) for item in arguments]
        try:
            error = made.__new__(made, *values)
        except TypeError:  # some want more than a text
            error = RemoteError.__new__(RemoteError, *values)
        error.args = tuple(values)
        return error

    def _error(self, error: BaseException) -> str:
        kind = type(error)
        name = _builtin_name(kind)
        if self._is_examiner and isinstance(error, AssertionError):
            self.failed(error)
            return '["error","AssertionError",[]]'  # the text may name what was expected
        shown = _text(name) if name is not None else self._show(kind)
        if name is not None and len(error.args) == 1 and type(error.args[0]) in (str, int, float):
            return f'["error",{shown},[{self.encode(error.args[0])}]]'
        return f'["error",{shown},[{_text(text_of(error))}]]'

    # ------------------------------------------------------------------------------------------------ answering

    def _answer(self, what: str, number: int, arguments: list[Any], keywords: list[Any]) -> None:
        try:
            values = [self.decode(item) for item in arguments]
            value = self._do(what, number, values, {name: self.decode(item) for name, item in keywords})
            now = [self.encode(item if type(item) in _CHANGEABLE else None) for item in values] if value is None else []
            answer = f'["value",{self.encode(value)},[{",".join(now)}]]'
        except PeerGone:
            raise
        except BaseException as error:  # noqa: BLE001 - raised at the other end
            answer = self._error(error)
        self._send(answer)

    def _do(self, what: str, number: int, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        target = self._shown[number]
        if what == "call":
            return target(*arguments, **keywords)
        if what == "is_class_of":
            return isinstance(arguments[0], target)
        name, *rest = arguments
        _must(type(name) is str)
        if self._is_examiner:
            _check_access(target, what, name)
        if what == "special":
            return _do_special(target, name, rest)
        if what == "get":
            return getattr(target, name)
        _must(what == "set")
        return setattr(target, name, rest[0])

    def _send(self, message: str) -> None:
        try:
            self._output.write(message.encode("ascii") + b"\n")
            self._output.flush()
        except BrokenPipeError as error:
            self.is_gone = True
            raise PeerGone from error

    def _receive(self) -> Any:
        line = self._input.readline(MAX_MESSAGE_BYTES) if not self.is_gone else b""  # the sandbox has wall_s
        if not line.endswith(b"\n"):
            self.is_gone = True  # it has ended, or sends more than any result needs
            raise PeerGone
        try:
            return read_json(line[:-1].decode("ascii"))
        except (ValueError, RecursionError) as error:
            self.is_gone = True
            raise PeerGone from error


def _check_access(target: Any, what: str, name: str) -> None:
    """What the candidate may do with an object of the tests besides calling it. A function would lead to its globals, and so to
    the tests; a method put in place of theirs would judge itself."""
    if what == "special" and name in ("__iter__", "__next__", "__len__", "__bool__", "__eq__", "__ne__"):
        return
    if type(target).__module__ != TESTS_MODULE:
        raise TypeError("this object can only be called")
    if what != "special" and name.startswith("_"):
        raise AttributeError(name)
    if what == "set" and callable(getattr(target, name, None)):
        raise AttributeError(f"{name} is a method of the tests")


def _do_special(target: Any, name: str, arguments: list[Any]) -> Any:
    if name == "__bool__":  # every object has a truth value, few have the method
        return bool(target)
    if name == "__iter__":  # `__getitem__` alone makes an iterable too
        return iter(target)
    method = (
        getattr(type(target), name, None) if name in _SPECIAL or name in _COMPARING or name in _CALCULATING else None
    )
    if method is None:
        raise TypeError(f"{type(target).__name__} has no {name}")
    result = method(target, *arguments)
    if result is NotImplemented and name in ("__eq__", "__ne__"):
        return (target is arguments[0]) == (name == "__eq__")
    if result is NotImplemented:
        raise TypeError(f"{name} of {type(target).__name__} does not take these operands")
    return result


# ---------------------------------------------------------------------------------------------------- kinds of data


def _text(value: str) -> str:
    return encode_basestring_ascii(value)


def _must(is_so: bool) -> None:
    """Not an assertion: this is not an invariant of ours."""
    if not is_so:
        raise ValueError("this is nothing that `encode` makes")


def _number(value: Any) -> int:
    _must(type(value) is int)
    return int(value)


def _not_finite(text: str) -> float:
    _must(text in ("inf", "-inf", "nan"))
    return float(text)


def _int(text: str) -> int:
    _must(type(text) is str and len(text) * 4 <= MAX_INT_BITS)
    return int(text, 16)


_MODULE_OF = {  # of the kinds that are no builtins
    **dict.fromkeys(("deque", "OrderedDict", "defaultdict", "Counter"), "collections"),
    **dict.fromkeys(("date", "timedelta", "datetime", "time"), "datetime"),
    "Decimal": "decimal",
    "Fraction": "fractions",
}
_OF_ITEMS = ("list", "tuple", "set", "frozenset", "deque")
_OF_PAIRS = ("dict", "OrderedDict", "defaultdict", "Counter")
_OF_TEXT = ("bytes", "bytearray", "Decimal")
_OF_FIELDS = {
    "complex": ("real", "imag"),
    "range": ("start", "stop", "step"),
    "slice": ("start", "stop", "step"),
    "Fraction": ("numerator", "denominator"),
    "date": ("year", "month", "day"),
    "timedelta": ("days", "seconds", "microseconds"),
    "datetime": ("year", "month", "day", "hour", "minute", "second", "microsecond"),
    "time": ("hour", "minute", "second", "microsecond"),
}
_KINDS = frozenset((*_OF_ITEMS, *_OF_PAIRS, *_OF_TEXT, *_OF_FIELDS))
_CHANGEABLE = (list, dict, set, bytearray)


def _parts(value: Any, kind: type) -> Sequence[Any] | None:
    """What the value is made of, if it is data: {"a": 1} -> ["a", 1]."""
    name = kind.__name__
    if type(name) is not str or name not in _KINDS:
        return None
    if getattr(sys.modules.get(_MODULE_OF.get(name, "builtins")), name, None) is not kind:
        return None
    if getattr(value, "tzinfo", None) is not None:
        return None
    if name in _OF_ITEMS:
        return list(value)
    if name in _OF_PAIRS:
        return [item for pair in value.items() for item in pair]
    if name in _OF_TEXT:
        return [str(value) if name == "Decimal" else value.hex()]
    return [getattr(value, field) for field in _OF_FIELDS[name]]


def _made(name: str, parts: list[Any]) -> Any:
    """The opposite of `_parts`, of what somebody who is not to be trusted sent. An error where it is none of the kinds."""
    if name == "int":
        return _int(*parts)
    if name == "float":
        return _not_finite(*parts)
    _must(name in _KINDS)
    kind = getattr(__import__(_MODULE_OF.get(name, "builtins")), name)
    if name in _OF_ITEMS:
        return kind(parts)
    if name in _OF_PAIRS:
        pairs = dict(zip(parts[::2], parts[1::2], strict=True))
        return kind(None, pairs) if name == "defaultdict" else kind(pairs)
    if name in ("bytes", "bytearray"):
        return kind.fromhex(*parts)
    return kind(*parts)


def _has_nan(value: Any) -> bool:
    kind = type(value)
    if kind is float or kind is complex:
        return bool(value != value)  # this is what NaN is
    return kind.__name__ == "Decimal" and bool(value.is_nan())


def _update(given: Any, now: Any) -> None:
    """Make a changed argument of a call what it is at the other end now."""
    if type(given) is not type(now):
        return
    if isinstance(given, list | bytearray):
        given[:] = now
    elif isinstance(given, dict | set):
        given.clear()
        given.update(now)


def _importable(value: Any) -> tuple[str, str] | None:
    """Where a module, or a function or class of one, is found: math.sqrt -> ("math", "sqrt")."""
    if type(value) is type(sys):
        return (value.__name__, "")
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if type(value).__name__ in ("method_descriptor", "wrapper_descriptor"):
        module = value.__objclass__.__module__
    if not isinstance(module, str) or not isinstance(name, str) or module == TESTS_MODULE:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return (module, name) if found is value and found is not None else None


def _imported(module: str, name: str) -> Any:
    __import__(module)
    found: Any = sys.modules[module]
    for part in name.split(".") if name else ():
        found = getattr(found, part)
    return found


# ------------------------------------------------------------------------------------------------------- exceptions


def _builtin_name(kind: type) -> str | None:
    name = kind.__name__
    return name if type(name) is str and _BUILTINS.get(name) is kind else None


def _builtin_base(kind: type) -> str:
    return next(str(base.__name__) for base in kind.__mro__ if _BUILTINS.get(base.__name__) is base)


def _builtin_exception(name: Any) -> type[BaseException]:
    """Never a way out of the process: SystemExit and KeyboardInterrupt of the candidate are failures like others."""
    found = _BUILTINS.get(name)
    return found if isinstance(found, type) and issubclass(found, Exception) else RemoteError


def text_of(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except Exception:  # noqa: BLE001 - whatever a class of the candidate does
        return ""
