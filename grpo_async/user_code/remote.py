"""Stand-ins for tools and environments that run in worker processes: in their main thread, so that `signal.alarm`
works. A stand-in is called like the original, from a thread, and is plain even where the original is async."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_async.user_code.calls import CallError, UserCall
from grpo_async.user_code.workers import WorkerPool

_made: list[Any] = []
"""In the worker of an instance: the instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A call of the worker's function, whose result is kept if it is the factory of an instance; or of a method of the instance;
    or, without arguments, a look at an attribute of the instance."""

    arguments: Mapping[str, Any] | None = None
    attribute: str = ""
    is_factory: bool = False

    def call(self, function: Callable[..., Any]) -> UserCall[Any]:
        if self.attribute:
            owner = _made[0]
            if self.arguments is None:
                return UserCall(lambda: getattr(owner, self.attribute))
            function = getattr(owner, self.attribute)
        return UserCall(function, finish=_keep if self.is_factory else lambda raw: raw, live=self.arguments or {})


def _keep(instance: Any) -> type:
    _made.append(instance)
    return type(instance)


def remote_function(function: Callable[..., Any], pool: WorkerPool, timeout_s: float) -> Callable[..., Any]:
    """Return a stand-in for the function of the pool. A call takes at most `timeout_s` seconds in a worker."""

    @functools.wraps(function)
    def call(**arguments: Any) -> Any:
        return pool.ask(_Request(arguments=arguments), timeout_s)

    return call


def remote_instance(reference: str, name: str, timeout_s: float, **arguments: Any) -> Any:
    """Return a stand-in for what the factory `reference` makes of `arguments` in a process of its own. Its attributes are those
    of the original. `close` also ends the process; so does a call that takes longer than `timeout_s` seconds."""
    pool = WorkerPool(name, reference, size=1)
    try:
        kind = pool.ask(_Request(arguments=arguments, is_factory=True), timeout_s)
    except BaseException:
        pool.close()
        raise
    instance: Any = object.__new__(_stand_in(kind))
    vars(instance).update(_pool=pool, _ask_worker=lambda request: pool.ask(request, timeout_s))
    return instance


@functools.cache
def _stand_in(kind: type) -> type:
    """Return the class of the stand-ins for instances of `kind`."""

    def method(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(kind, name))
        def call(self: Any, **arguments: Any) -> Any:
            try:
                return self._ask_worker(_Request(arguments=arguments, attribute=name))
            except CallError as error:
                if error.is_lost:
                    self._pool.close()  # another worker would not have the instance
                raise

        return call

    def read(self: Any, name: str) -> Any:
        if name.startswith("__") or name in ("_pool", "_ask_worker") or callable(getattr(type(self), name, None)):
            return object.__getattribute__(self, name)
        return self._ask_worker(_Request(attribute=name))

    def close(self: Any) -> None:
        try:
            if hasattr(kind, "close"):
                self._ask_worker(_Request(arguments={}, attribute="close"))
        finally:
            self._pool.close()

    names = [name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")]
    methods = {name: method(name) for name in names if not isinstance(inspect.getattr_static(kind, name), staticmethod)}
    return type(kind.__name__, (kind,), {**methods, "close": close, "__getattribute__": read})
