"""The two ends of a test run, each in a sandbox of its own, joined by two pipes. Nothing here runs in the trainer's process.

    examiner: the row's tests                       candidate: the model's code
      f(3)      -- call f, 3 ------------------->     runs f(3)
                <- value 9 ----------------------
      9 == 9 is found here, and told to the owner

Plain data crosses as data, rebuilt from JSON, so that what the examiner compares is its own. Everything else stays where
it is, with a `Remote` in its place on the other side. A Remote is never equal to plain data, nor less or more: an object
that claims to be equal to everything gains nothing. When the candidate's process ends, every test that has not passed has
failed: no exit code, output or patched builtin of the candidate counts.
"""

from __future__ import annotations

import builtins
import importlib
import json
import math
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_MESSAGE_CHARS = 1 << 24
TESTS_MODULE = "tests_of_the_row"
CANDIDATE_MODULE = "candidate"
_NOT_IMPORTED = ("__main__", "grpo_async", TESTS_MODULE, CANDIDATE_MODULE)
_SPECIAL = (  # noqa: SIM905
    "__len__ __iter__ __next__ __getitem__ __setitem__ __delitem__ __reversed__ __str__ __repr__ __bool__ __int__ "
    "__float__ __complex__ __index__ __neg__ __pos__ __abs__ __invert__ __round__ __add__ __radd__ __sub__ "
    "__rsub__ __mul__ __rmul__ __truediv__ __floordiv__ __mod__ __pow__ __matmul__ __and__ __or__ __xor__ "
    "__enter__ __exit__"
).split()


_COMPARING = ("__hash__", "__lt__", "__le__", "__gt__", "__ge__")
# Of the builtins, those that do nothing but compute: the candidate names them, and the examiner calls its own.
_PURE = (  # noqa: SIM905
    "abs all any ascii bin bool bytearray bytes callable chr complex dict divmod enumerate filter float format "
    "frozenset hash hex int isinstance issubclass iter len list map max min next oct ord pow print range repr "
    "reversed round set slice sorted str sum tuple zip"
).split()


class PeerGone(BaseException):
    """The other process has ended. Not an Exception: the tests must not catch it."""


class RemoteError(Exception):
    """An exception of the other side that has no class here."""


class Remote:
    """Stands for an object of the other side."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return _ask(self, "call", *arguments, **keywords)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and _ask(self, "equal", other) is True

    def __hash__(self) -> int:
        return hash(_ask(self, "special", "__hash__"))

    def __lt__(self, other: object) -> bool:
        return self._compare("__lt__", other)

    def __le__(self, other: object) -> bool:
        return self._compare("__le__", other)

    def __gt__(self, other: object) -> bool:
        return self._compare("__gt__", other)

    def __ge__(self, other: object) -> bool:
        return self._compare("__ge__", other)

    def _compare(self, name: str, other: object) -> bool:
        if not isinstance(other, Remote):
            raise TypeError("an object of the tested code is not compared with a value of the tests")
        return _ask(self, "special", name, other) is True

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and _ask(self, "is_class_of", instance) is True


def _special(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: _ask(self, "special", name, *arguments)


for _name in _SPECIAL:
    setattr(Remote, _name, _special(_name))


def _ask(remote: Remote, what: str, *arguments: Any, **keywords: Any) -> Any:
    peer: Peer = object.__getattribute__(remote, "_peer")
    return peer.ask(what, object.__getattribute__(remote, "_number"), arguments, keywords)


class Peer:
    """One end of the pipes: asks the other end, and answers what it asks meanwhile.

    Args:
        descriptors: to read from and to write to.
        is_trusting: whether the other end may look at every attribute of what it gets. Not so for the examiner.
    """

    def __init__(self, descriptors: tuple[int, int], *, is_trusting: bool) -> None:
        self._input = open(descriptors[0], encoding="utf-8", newline="\n")  # noqa: SIM115 - as long as the process
        self._output = open(descriptors[1], "w", encoding="utf-8", newline="\n")  # noqa: SIM115
        self._is_trusting = is_trusting
        self._shown: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}  # id of a shown object, which `_shown` keeps alive -> its number
        self._exceptions: dict[int, type[BaseException]] = {}  # number over there -> class made here

    def ask(
        self, what: str, number: int, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        """Have the other end do something; returns its result or raises its exception."""
        keywords = keywords or {}
        self._send({"ask": what, "of": number, "with": self.encode(list(arguments)), "by": self.encode(keywords)})
        while True:
            message = self._receive()
            if "ask" in message:
                self._answer(message)
            elif "error" in message:
                raise self._exception(message["error"])
            else:
                for given, now in zip(arguments, message.get("now") or (), strict=False):
                    _update(given, self.decode(now))
                return self.decode(message["value"])

    def serve(self) -> None:
        """Answer until the other end is gone."""
        while True:
            self._answer(self._receive())

    def encode(self, value: Any) -> Any:
        """As JSON. Only exact types are data: a subclass may have a mind of its own."""
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if -(1 << 53) < value < (1 << 53) else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind in _SEQUENCES:
            return {kind.__name__: [self.encode(item) for item in value]}
        if kind in _MAPPINGS:
            return {kind.__name__: [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if kind in (bytes, bytearray):
            return {kind.__name__: value.hex()}
        if kind in (complex, Decimal, Fraction):
            return {kind.__name__: str(value)}
        if kind is range:
            return {"range": [value.start, value.stop, value.step]}
        if kind is types.ModuleType:
            return {"module": value.__name__}
        if (kind is type or kind is types.BuiltinFunctionType) and _is_pure_builtin(value):
            return {"builtin": value.__name__}
        if isinstance(value, Remote):
            return {"yours": object.__getattribute__(value, "_number")}
        if kind.__module__ == "numpy" and hasattr(value, "tolist"):
            return self.encode(value.tolist())
        return self._show(value)

    def decode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind in _BY_NAME:
            return _BY_NAME[kind]([self.decode(item) for item in content])
        if kind in _MAPPINGS_BY_NAME:
            pairs = [(self.decode(key), self.decode(item)) for key, item in content]
            return defaultdict(None, pairs) if kind == "defaultdict" else _MAPPINGS_BY_NAME[kind](pairs)
        if kind in _BY_TEXT:
            return _BY_TEXT[kind](content)
        if kind == "range":
            return range(*content)
        if kind == "module":
            return own_module(content)
        if kind == "builtin":
            return _builtin(content)
        if kind == "yours":
            return self._shown[content]
        if kind == "exception":
            return self._exception_class(content)
        return Remote(self, content)

    def _show(self, value: Any) -> Any:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._shown) + 1
            self._shown[number] = value
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": [number, value.__name__, _builtin_base(value)]}
        return {"mine": number}

    def _exception_class(self, content: list[Any]) -> type[BaseException]:
        number, name, base = content
        if number not in self._exceptions:
            self._exceptions[number] = type(str(name), (_builtin_exception(base),), {})
        return self._exceptions[number]

    def _exception(self, content: list[Any]) -> BaseException:
        kind, text = content
        return (_builtin_exception(kind) if isinstance(kind, str) else self._exception_class(kind))(text)

    def _answer(self, message: dict[str, Any]) -> None:
        try:
            arguments, keywords = self.decode(message["with"]), self.decode(message["by"])
            value = self._do(message["ask"], message["of"], arguments, keywords)
            answer: dict[str, Any] = {"value": self.encode(value)}
            now = self.encode(arguments)["list"]
            if message["ask"] == "call" and now != message["with"]["list"]:
                answer["now"] = now  # a function may work in place
        except PeerGone:
            raise
        except BaseException as error:  # noqa: BLE001 - raised at the other end
            kind = type(error)
            is_builtin = getattr(builtins, kind.__name__, None) is kind
            answer = {"error": [kind.__name__ if is_builtin else self._show(kind)["exception"], text_of(error)]}
        self._send(answer)

    def _do(self, what: str, number: int, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        target = self._shown[number]
        if not self._is_trusting and what != "call" and type(target).__module__ != TESTS_MODULE:
            raise TypeError("this object can only be called")  # a function would lead to its globals, and to the tests
        if what == "call":
            return target(*arguments, **keywords)
        if what == "equal":
            return bool(target == arguments[0])
        if what == "is_class_of":
            return isinstance(arguments[0], target)
        name = arguments[0]
        if what == "special":
            return _do_special(target, name, arguments[1:])
        if not self._is_trusting and name.startswith("_"):
            raise AttributeError(name)
        return getattr(target, name) if what == "get" else setattr(target, name, arguments[1])

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._output.write(json.dumps(message) + "\n")
            self._output.flush()
        except BrokenPipeError:
            raise PeerGone from None

    def _receive(self) -> Any:
        line = self._input.readline(MAX_MESSAGE_CHARS)  # waits: the sandbox has wall_s
        if not line.endswith("\n"):
            raise PeerGone  # it has ended, or sends more than any result needs
        return json.loads(line)


def _do_special(target: Any, name: str, arguments: list[Any]) -> Any:
    if name == "__bool__":  # every object has a truth value, few have the method
        return bool(target)
    method = getattr(type(target), name, None) if name in _SPECIAL or name in _COMPARING else None
    if method is None:
        raise TypeError(f"{type(target).__name__} has no {name}")
    return method(target, *arguments)


def _is_pure_builtin(value: Any) -> bool:
    name = value.__name__
    return getattr(builtins, name, None) is value and (name in _PURE or _is_exception(value))


def _builtin(name: str) -> Any:
    found = getattr(builtins, name, None)
    if name in _PURE or _is_exception(found):
        return found
    raise TypeError(f"{name} is not for the other side to give")


def _is_exception(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


_SEQUENCES = (list, tuple, set, frozenset, deque)
_MAPPINGS = (dict, OrderedDict, Counter, defaultdict)
_BY_NAME: dict[str, Callable[[Any], Any]] = {kind.__name__: kind for kind in _SEQUENCES}
_MAPPINGS_BY_NAME: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
    "defaultdict": dict,
}
_BY_TEXT: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": complex,
    "Decimal": Decimal,
    "Fraction": Fraction,
}


def own_module(name: str) -> Any:
    """A module as this process has it; the other side only says which."""
    if name.partition(".")[0] in _NOT_IMPORTED:
        raise ImportError(name)
    return importlib.import_module(name)


def _update(given: Any, now: Any) -> None:
    """Make a changed argument of a call what it is at the other end now."""
    if type(given) is not type(now):
        return
    if isinstance(given, list | bytearray):
        given[:] = now
    elif isinstance(given, dict | set):
        given.clear()
        given.update(now)
    elif isinstance(given, deque):
        given.clear()
        given.extend(now)


def _builtin_base(kind: type) -> str:
    names = [str(base.__name__) for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base]
    return names[0]


def _builtin_exception(name: str) -> type[BaseException]:
    """Never a way out of the process: SystemExit and KeyboardInterrupt of the candidate are failures like others."""
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, Exception):
        return found
    return RemoteError


def text_of(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except Exception:  # noqa: BLE001 - whatever a class of the candidate does
        return ""
