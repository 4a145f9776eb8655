"""What is known of a configured environment once one instance of it, the probe, was made: checked once, shared by all instances.

Only methods are looked at, and only through the class: a property or attribute of an instance is never touched, for reading it
may do anything. Tools are the public methods but the reserved ones; static methods are helpers, as in TRL.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_async.config.sections import EnvironmentSection
from grpo_async.tools.schema import ToolSpec, UnusableError, build_spec
from grpo_async.tools.tool import FailureLog
from grpo_async.user_code.calls import Parameters

RESERVED = frozenset({"reset", "is_done", "get_reward", "close"})
_OPTIONAL = ("is_done", "get_reward", "close")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentKind:
    """One configured environment."""

    name: str
    factory: Callable[..., Any]
    section: EnvironmentSection
    environment_class: type
    specs: Mapping[str, ToolSpec]  # by the method's name
    reset_parameters: Parameters  # which columns `reset` takes
    methods: frozenset[str]  # which of is_done, get_reward and close there are
    selected_by_column: bool  # the column `environment` chose it; then it is not the environment's to see
    notes: tuple[str, ...] = ()
    failures: FailureLog = field(default_factory=FailureLog)

    @property
    def timeout_s(self) -> float:
        return self.section.timeout_s

    @property
    def setting(self) -> str:
        return f"environments.{self.name}"

    @property
    def reward_name(self) -> str | None:
        """Name of its reward in the metrics: the class's, as in TRL; None without `get_reward`."""
        return self.environment_class.__name__ if "get_reward" in self.methods else None


def examine(
    probe: Any, *, name: str, factory: Callable[..., Any], section: EnvironmentSection, selected_by_column: bool
) -> EnvironmentKind:
    """Check a new instance of an environment.

    Raises:
        UnusableError: all that is wrong with it.
    """
    problems: list[str] = []
    notes: list[str] = []
    parameters = _reset_parameters(probe, problems)
    specs = {}
    for method_name in _public_methods(probe):
        try:
            specs[method_name] = build_spec(getattr(probe, method_name), name=method_name)
        except UnusableError as error:
            problems.extend(
                f"`{method_name}` is a public method, so a tool, but {problem}; or begin its name with `_`"
                for problem in error.problems
            )
    methods = frozenset(optional for optional in _OPTIONAL if _has_method(probe, optional))
    for optional in sorted(set(_OPTIONAL) - methods):
        if inspect.getattr_static(probe, optional, None) is not None:
            notes.append(f"`{optional}` is not a method, so it is not called")
    if section.reward_weight != 1.0 and "get_reward" not in methods:
        notes.append("`reward_weight` has no effect, for there is no `get_reward`")
    if problems or parameters is None:
        raise UnusableError(problems)
    return EnvironmentKind(
        name=name,
        factory=factory,
        section=section,
        environment_class=type(probe),
        specs=specs,
        reset_parameters=parameters,
        methods=methods,
        selected_by_column=selected_by_column,
        notes=tuple(f"environments.{name}: {note}" for note in notes),
    )


def _reset_parameters(probe: Any, problems: list[str]) -> Parameters | None:
    if not _has_method(probe, "reset"):
        problems.append(f"makes a {type(probe).__name__}, which has no method `reset(**row)`; write one")
        return None
    try:
        parameters = Parameters.of(probe.reset)
    except ValueError:
        return Parameters()
    if parameters.by_position:
        problems.append(
            f"has a `reset` that takes {list(parameters.by_position)} by position only; it is called with keywords: "
            "remove the `/`"
        )
    return parameters


def _public_methods(probe: Any) -> list[str]:
    names = [name for name in dir(type(probe)) if not name.startswith("_") and name not in RESERVED]
    return [name for name in names if _is_method(probe, name)]


def _is_method(probe: Any, name: str) -> bool:
    """Whether reading it gives a bound method: functions, class methods, and what decorators make of them (lru_cache)."""
    attribute = inspect.getattr_static(type(probe), name)
    if inspect.isfunction(attribute) or isinstance(attribute, classmethod):
        return True
    # A property can be read but not called, so nothing that computes a value gets past this.
    binds = (
        callable(attribute) and hasattr(type(attribute), "__get__") and not isinstance(attribute, (staticmethod, type))
    )
    return binds and inspect.ismethod(getattr(probe, name))


def _has_method(probe: Any, name: str) -> bool:
    """Looked up without running a property; anything callable will do."""
    found = inspect.getattr_static(probe, name, None)
    return callable(found) or isinstance(found, (staticmethod, classmethod))
