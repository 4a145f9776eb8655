"""One call of a reward function: which arguments it gets and which results it may return. The same code runs on the
event loop, in a thread and in a worker process.

Offered as keywords, as in TRL: `prompts`, `completions`, `completion_ids`, every column, the section's `arguments`,
`trainer_state`, `log_extra(column, values)`, `log_metric(name, value)`, and, where the run has environments, `environments`:
the user's own instances, one per completion. A function gets those that its signature names, or all of them if it takes
**kwargs. On a clash of names ours win over `arguments`, and `arguments` over columns.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_async.records import LARGEST_REWARD
from grpo_async.rewards.errors import RewardError
from grpo_async.user_code.calls import Raised, UserCall, unwrap_partial

logger = logging.getLogger(__name__)

RewardCallable = Callable[..., Any]

ENVIRONMENTS = "environments"
_ALWAYS_OFFERED = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"})
OFFERED = _ALWAYS_OFFERED | {ENVIRONMENTS}
"""Arguments that every reward may ask for; no column of the data can have such a name."""
# TRL's documentation spells it this way in its examples; given only to functions that name it.
_ALIASES = {"completions_ids": "completion_ids"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What a reward function may ask about the progress of the run."""

    global_step: int = 0  # optimizer steps done
    max_steps: int = 0  # optimizer steps of the run


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome:
    """Result of one call."""

    values: list[float | None]  # [num_completions]; None = not applicable
    extra_columns: dict[str, list[Any]] = field(default_factory=dict)  # from log_extra: column -> [num_completions]
    metrics: dict[str, float] = field(default_factory=dict)  # from log_metric; several calls of one name are averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a call raised, in a form that crosses a process border.

    `error` is None when it cannot; `summary` and `trace` always say what it was.
    """

    summary: str
    trace: str
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """The arguments of one call; every list has one entry per completion. Picklable if the columns are and there are no
    `environments`: those are live objects. None = the run has none."""

    name: str
    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    trainer_state: TrainerState = field(default_factory=TrainerState)
    environments: Sequence[Any] | None = None


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a function's signature says about keyword arguments."""

    names: frozenset[str]
    required: frozenset[str]  # without a default
    takes_any: bool  # has **kwargs

    def accepts(self, name: str) -> bool:
        return self.takes_any or name in self.names


def read_parameters(function: RewardCallable) -> Parameters:
    """Read the signature of `function`; TypeError says why it cannot be called with keywords only."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise TypeError("its signature cannot be read; wrap it in a `def`") from error
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if positional:
        raise TypeError(f"its parameters {positional} are positional-only, but rewards are called with keywords")
    keywords = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not keywords and not takes_any:
        raise TypeError("it takes no keyword arguments; a reward is `f(completions, **kwargs) -> list of floats`")
    return Parameters(
        names=frozenset(p.name for p in keywords),
        required=frozenset(p.name for p in keywords if p.default is p.empty),
        takes_any=takes_any,
    )


def own_name(function: RewardCallable) -> str:
    """`__name__` of a function (of the inner one of a partial), else the class name of a callable object."""
    inner = unwrap_partial(function)
    name = getattr(inner, "__name__", None)
    return name if isinstance(name, str) else type(inner).__name__


def call_of(function: RewardCallable, request: RewardRequest) -> UserCall[RewardOutcome]:
    """The call of `function` that `request` asks for; TypeError where the signature cannot be read."""
    log = _CallLog(len(request.completions))
    return UserCall(function, _keywords(function, request, log), lambda raw: _finished(raw, request, log))


def failure_of(error: BaseException) -> Failure:
    raised = Raised(error)
    return Failure(summary=raised.summary, trace=raised.trace, error=error)


def checked_values(name: str, raw: Any, count: int) -> list[float | None]:
    """`raw` (list, tuple, tensor or array) as `count` finite floats or Nones; a RewardError names the index."""
    if hasattr(raw, "tolist"):
        raw = raw.tolist()
    if not isinstance(raw, (list, tuple)):
        raise RewardError(name, f"returned {_short(raw)}; it must return a list with one number or None per completion")
    if len(raw) != count:
        raise RewardError(
            name, f"returned {len(raw)} values for {count} completions; it must return one per completion"
        )
    return [_checked_value(name, value, index) for index, value in enumerate(raw)]


class _CallLog:
    """Collects what one call logs."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.extra_columns: dict[str, list[Any]] = {}
        self._metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        values = list(values)
        if len(values) != self._count:
            raise ValueError(f"log_extra({column!r}) got {len(values)} values for {self._count} completions")
        self.extra_columns[column] = values

    def log_metric(self, name: str, value: float) -> None:
        number = float(value)
        if math.isfinite(number):
            self._metrics.setdefault(name, []).append(number)
        else:
            logger.warning("log_metric(%r) got %s; left out, for it would spoil the mean", name, number)

    @property
    def metrics(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self._metrics.items()}


def _keywords(function: RewardCallable, request: RewardRequest, log: _CallLog) -> dict[str, Any]:
    parameters = read_parameters(function)
    offered: dict[str, Any] = {
        **{column: list(values) for column, values in request.columns.items()},
        **request.arguments,
        # Fresh outer lists: a function that pops from them does not disturb the other functions.
        "prompts": list(request.prompts),
        "completions": list(request.completions),
        "completion_ids": list(request.completion_ids),
        "trainer_state": request.trainer_state,
        "log_extra": log.log_extra,
        "log_metric": log.log_metric,
    }
    if request.environments is not None:
        offered[ENVIRONMENTS] = list(request.environments)
    chosen = {name: value for name, value in offered.items() if parameters.accepts(name)}
    for alias, name in _ALIASES.items():
        if alias in parameters.names and alias not in chosen:
            chosen[alias] = offered[name]
    return chosen


def missing_columns(
    parameters: Parameters, arguments: Mapping[str, Any], columns: Mapping[str, Any], *, has_environments: bool
) -> list[str]:
    """Parameters without a default that neither we, the `arguments` nor the `columns` fill; sorted. `environments` is among
    them where the run has none."""
    offered = OFFERED if has_environments else _ALWAYS_OFFERED
    return sorted(parameters.required - offered - set(_ALIASES) - set(arguments) - set(columns))


def _finished(raw: Any, request: RewardRequest, log: _CallLog) -> RewardOutcome:
    values = checked_values(request.name, raw, len(request.completions))
    return RewardOutcome(values=values, extra_columns=log.extra_columns, metrics=log.metrics)


def _checked_value(name: str, value: Any, index: int) -> float | None:
    if value is None:
        return None
    if hasattr(value, "tolist"):  # numpy scalar, 0-dimensional tensor
        value = value.tolist()
    if not isinstance(value, (bool, int, float)):
        raise RewardError(name, f"returned {_short(value)} for completion {index}; it must be a number or None")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST_REWARD:
        raise RewardError(
            name,
            f"returned {number:g} for completion {index}; it must be a number of at most {LARGEST_REWARD:g}, or None where it does "
            "not apply",
        )
    return number


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
