"""Finds the object that `module:attribute` names. The working directory comes first on `sys.path`, as with `python -m`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from grpo_async.errors import ConfigError
from grpo_async.user_code.calls import NO_SIGNATURE, Raised, is_async
from grpo_async.utils.text import did_you_mean


def resolve(reference: str) -> Any:
    """The object named by `package.module:attribute` or `package.module:object.attribute`.

    Raises:
        ConfigError: the module does not exist or cannot be imported, or it lacks the attribute.
    """
    module_name, _, path = reference.partition(":")
    make_working_directory_importable()
    found: Any = _import(module_name)
    for depth, attribute in enumerate(names := path.split(".")):
        if not hasattr(found, attribute):
            owner, where = ".".join([module_name, *names[:depth]]), "" if depth else " at the top level of its file"
            hint = did_you_mean(attribute, [name for name in dir(found) if name[0] != "_"])
            raise ConfigError(f"`{owner}` has no `{attribute}`{where}{hint}")
        found = getattr(found, attribute)
    return found


def resolve_function(reference: str, where: str) -> Callable[..., Any]:
    """Like `resolve`, for a function, a partial, or a callable object, but not a class.

    `where` begins every error, such as "rewards.0.function: mine:score".
    """
    try:
        function = resolve(reference)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if inspect.isclass(function):
        raise ConfigError(
            f"{where}: is a class; make an instance in its module (`mine = {function.__name__}()`) and name that"
        )
    if not callable(function):
        raise ConfigError(f"{where}: is of type {type(function).__name__}, which cannot be called; name a function")
    return function  # type: ignore[no-any-return]


def make_working_directory_importable() -> None:
    """Put the working directory first on `sys.path`, as `python -m` does; for callers that let a library import user code."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
        importlib.invalidate_caches()


def _import(module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(missing + "."):
            raise ConfigError(f"importing `{module_name}` failed: {error}; install what it needs") from error
        parent, _, name = missing.rpartition(".")
        folders = list(getattr(sys.modules.get(parent), "__path__", ())) if parent else [os.getcwd()]
        hint = did_you_mean(name, [module.name for module in pkgutil.iter_modules(folders)])
        raise ConfigError(
            f"there is no module `{missing}`{hint}; install it, or start the run from the folder that holds it (working "
            f"directory: {os.getcwd()})"
        ) from error
    except (Exception, SystemExit) as error:
        raised = Raised(error)
        place = "" if isinstance(error, SyntaxError) else raised.place  # a SyntaxError names its line itself
        raise ConfigError(f"importing `{module_name}` raised {raised.summary}{place}") from error


def resolve_and_check(
    reference: str,
    setting: str,
    *,
    given: Mapping[str, Any],
    arguments: Mapping[str, Any] | None = None,
    may_be_async: bool = False,
) -> Callable[..., Any]:
    """Return a user's function that is called as f(*given, **arguments), checked before anything is started. `setting` is the path
    that names it, such as `loss.function`; `arguments` None: it has no such setting beside it.

    Raises:
        ConfigError: it does not exist, is async although it must not be, or does not accept its arguments.
    """
    where = f"{setting}: {reference}"
    function = resolve_function(reference, where)
    if is_async(function) and not may_be_async:
        raise ConfigError(f"{where}: is async; make it a plain function")
    names = ", ".join(given)
    further = "" if arguments is None else f", **{setting.removesuffix('function')}arguments"
    arguments = arguments or {}
    try:
        inspect.signature(function).bind(*given.values(), **arguments)
    except TypeError as error:
        raise ConfigError(
            f"{where}: does not take ({names}{''.join(f', {name}=' for name in arguments)}): {error}; it is called as "
            f"f({names}{further})"
        ) from error
    except ValueError as error:  # a builtin
        raise ConfigError(f"{where}: {NO_SIGNATURE}") from error
    return function
