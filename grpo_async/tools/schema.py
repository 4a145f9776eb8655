"""A function's JSON schema for the model, which Transformers makes from type hints and docstring, and the strict
check of a call's arguments by pydantic. Arguments that a partial or the config fixes are hidden. 3.0 is an integer,
because JSON has only one kind of number."""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NotRequired, Required, Union

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from grpo_async.tools.results import ToolError
from grpo_async.user_code.calls import NO_SIGNATURE, Raised, own_name, partials_of, unwrap_partial
from grpo_async.utils.text import clipped, did_you_mean, shortlist

Validator = TypeAdapter[dict[str, Any]]


def validator_of(name: str, hints: Mapping[str, Any], required: Collection[str]) -> Validator:
    """The validator of the arguments of the tool `name`: type hint by argument; `required` have no default."""
    make: Any = TypedDict  # its fields are not known to type checkers
    kind = make(name, {key: Required[hint] if key in required else NotRequired[hint] for key, hint in hints.items()})
    kind.__pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    return TypeAdapter(kind)


def check_arguments(
    validator: Validator, parameters: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Check the arguments of a call; `parameters` is that part of the tool's schema."""
    try:
        return validator.validate_json(json.dumps(_with_integers(arguments)))
    except ValidationError as error:
        problems = [_problem(each, parameters) for each in error.errors(include_url=False)]
    except Exception as error:  # noqa: BLE001 - a type hint may be a class of the user, whose `__post_init__` may raise anything
        problems = [Raised(error).summary]
    told = shortlist(problems)
    raise ToolError(f"{told}{'' if told.endswith('?') else '.'} {_signature(parameters)}")


def _with_integers(value: Any) -> Any:
    """{"a": [3.0, 3.5]} -> {"a": [3, 3.5]}; a float type hint converts 3 back to 3.0."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _with_integers(item) for key, item in value.items()}
    return [_with_integers(item) for item in value] if isinstance(value, (list, tuple)) else value


def _problem(error: Any, parameters: Mapping[str, Any]) -> str:
    """One of pydantic's errors in words: `argument "flags" at 1: input should be a valid boolean, not 1`."""
    key, *inside = error["loc"] or ("",)
    if error["type"] == "missing" and not inside:
        return f'missing argument "{key}"'
    if error["type"] == "extra_forbidden" and not inside:
        return f'unknown argument "{clipped(key)}"{did_you_mean(key, parameters.get("properties", {}))}'
    place = f" at {'.'.join(map(str, inside))}" if inside else ""
    given = clipped(json.dumps(error["input"], ensure_ascii=False, default=str))
    return f'argument "{key}"{place}: {error["msg"][0].lower()}{error["msg"][1:]}, not {given}'


def _signature(parameters: Mapping[str, Any]) -> str:
    """`It takes number: integer, unit?: string`; optional arguments have a `?`."""
    required = set(parameters.get("required", ()))
    parts = []
    for key, schema in parameters.get("properties", {}).items():
        types = schema.get("type", "any")
        kind = types if isinstance(types, str) else " or ".join(types)
        parts.append(f"{key}{'' if key in required else '?'}: {kind}")
    return f"It takes {', '.join(parts) or 'no arguments'}"


class UnusableError(Exception):
    """A function that cannot be a tool, or an environment that cannot be used; `problems` are sentences without a subject ("has no
    docstring; ...")."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """The description of one tool; shared by all instances of an environment."""

    name: str
    schema: Mapping[str, Any]  # {"type": "function", "function": {...}}
    validator: Validator

    @property
    def parameters(self) -> Mapping[str, Any]:
        parameters: Mapping[str, Any] = self.schema["function"]["parameters"]
        return parameters


def build_spec(function: Callable[..., Any], *, name: str | None = None, hidden: Collection[str] = ()) -> ToolSpec:
    """The spec of `function`. `name` = None uses its own; the model does not see the `hidden` arguments.

    def add(a: int, b: int) -> int:
        '''Adds.

        Args:
            a: One number.
            b: The other.
        '''

    hidden=["b"] -> {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type":
    "object", "properties": {"a": {"type": "integer", "description": "One number."}}, "required": ["a"]}, ...}}
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    name = name or own_name(function)
    names = getattr(_signed(function), "__globals__", {})
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise UnusableError([NO_SIGNATURE]) from error
    hidden = {*hidden, *(name for partial in partials_of(function) for name in partial.keywords)}
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name not in hidden]
    problems = _problems_of(parameters)
    if problems:
        raise UnusableError(problems)
    hints = {
        parameter.name: parameter.annotation for parameter in parameters if parameter.annotation is not parameter.empty
    }
    view = _view(name, _documentation(function), signature.replace(parameters=parameters), hints)
    try:
        resolved = typing.get_type_hints(view, globalns=names)
        if unknown := [key for key, hint in resolved.items() if not _is_known(hint)]:
            raise TypeError(f"the types of {unknown} are none of JSON's; take text, numbers, lists, dicts or a Literal")
        view.__annotations__ = resolved | _return_hint(signature, names)
        try:
            schema = get_json_schema(view)
        except TypeHintParsingException:  # of what it returns, perhaps, which need not be described
            view.__annotations__.pop("return", None)
            schema = get_json_schema(view)
        required = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
        validator = validator_of(name, resolved, required)
    except (NameError, AttributeError, SyntaxError) as error:
        raise UnusableError([f"has a type hint that cannot be resolved: {error}"]) from error
    except (DocstringParsingException, TypeHintParsingException, ValueError, TypeError) as error:
        raise UnusableError([f"cannot be described to the model: {' '.join(str(error).split())}"]) from error
    if not schema["function"]["description"]:
        raise UnusableError(["has a docstring that does not say what it is for; begin it with one sentence"])
    return ToolSpec(name, schema, validator)


def _signed(function: Callable[..., Any]) -> Any:
    """The plain function whose module the type hints belong to."""
    inner = unwrap_partial(function)
    if not inspect.isroutine(inner):
        inner = type(inner).__call__
    return inspect.unwrap(getattr(inner, "__func__", inner))


def _documentation(function: Callable[..., Any]) -> str:
    """Docstring of a function or method, or of a callable object's `__call__` or class."""
    inner = unwrap_partial(function)
    if inspect.isroutine(inner):
        return (inspect.getdoc(inner) or "").strip()
    own = type(inner).__call__.__doc__ or type(inner).__doc__  # inspect.getdoc would inherit the docstring of `type`
    return inspect.cleandoc(own or "").strip()


def _problems_of(parameters: list[inspect.Parameter]) -> list[str]:
    problems = []
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            problems.append(f"takes `{parameter.name}` by position only; tools are called by name: remove the `/`")
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            problems.append(f"takes `{stars}{parameter.name}`; name every argument, the model has to know them")
    return problems


def _view(name: str, documentation: str, signature: inspect.Signature, hints: dict[str, Any]) -> Callable[..., Any]:
    """A stand-in that looks as the model should see the function: Transformers handles partials and callable objects wrongly, and
    cannot omit arguments."""

    def view() -> None: ...

    view.__name__ = view.__qualname__ = name
    view.__doc__ = documentation
    view.__signature__ = signature  # type: ignore[attr-defined]
    view.__annotations__ = hints
    return view


def _return_hint(signature: inspect.Signature, names: dict[str, Any]) -> dict[str, Any]:
    """The return hint if it resolves; one that is imported only for type checkers must not make the tool fail."""
    if signature.return_annotation is signature.empty:
        return {}
    view = _view("returns", "", signature, {"return": signature.return_annotation})
    try:
        return typing.get_type_hints(view, globalns=names)
    except (NameError, AttributeError, SyntaxError, TypeError):
        return {}


def _is_known(hint: Any) -> bool:
    """Whether Transformers describes a type hint, with all that is inside it, as TRL shows it to the model."""
    kind = typing.get_origin(hint)
    if kind in (Union, types.UnionType, list, dict, tuple):
        return all(map(_is_known, typing.get_args(hint)))
    return kind is typing.Literal or hint in (int, float, str, bool, list, dict, tuple, Any, None, types.NoneType)
