"""What the sections of the configuration have in common: the strict base, and the kinds of values that many of them hold."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from grpo_async.utils.network import check_host
from grpo_async.utils.text import clipped
from grpo_async.utils.validation import problems_of

Settings = TypeVar("Settings", bound=BaseModel)
MAX_TOP_LOGPROBS = 128
"""The most tokens whose log-probabilities a server reports at each position."""


class StrictModel(BaseModel):
    """Frozen, refuses unknown keys, and takes the docstring under a field as its help text."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,  # built once, inside the whole configuration, and not once more for every section
    )


class StructuredOutputs(StrictModel):
    """Exactly one of these. As vLLM's `structured_outputs`."""

    json_schema: dict[str, Any] | None = None
    """JSON that fits this schema."""
    regex: str | None = Field(default=None, min_length=1)
    """Text that this regular expression describes, from its beginning to its end."""
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    """One of these texts."""
    grammar: str | None = Field(default=None, min_length=1)
    """Text of a context-free grammar, in the EBNF of xgrammar."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        exactly_one(self, *type(self).model_fields, what="what may be sampled")
        return self

    def as_vllm(self) -> dict[str, Any]:
        """Under vLLM's names: {json_schema: {...}} -> {"json": {...}}."""
        ((name, value),) = self.model_dump(exclude_none=True).items()
        return {"json" if name == "json_schema" else name: value}


def exactly_one(section: BaseModel, *names: str, what: str) -> None:
    """Raises ValueError unless one of the fields is set, and the others are not."""
    named = [name for name in names if getattr(section, name) is not None]
    if len(named) != 1:
        given = f"{' and '.join(named)} are set" if named else "none of them is set"
        raise ValueError(f"{what} is one of {', '.join(names)}; {given}")


def read_arguments(settings: type[Settings], arguments: Mapping[str, Any]) -> Settings:
    """The free-form `arguments` of a section as a model; ValueError("NAME: what is wrong")."""
    try:
        return settings.model_validate(dict(arguments))
    except ValidationError as error:
        unknown = [each["loc"][0] for each in error.errors(include_url=False) if each["type"] == "extra_forbidden"]
        if unknown:
            raise ValueError(
                f"{unknown[0]}: there is no such setting; the settings are {sorted(settings.model_fields)}"
            ) from error
        raise ValueError(problems_of(error)) from error


def default_type(name: str) -> BeforeValidator:
    """A validator for a union on `type`: where the key is left out, it is `name`."""
    return BeforeValidator(lambda value: {"type": name, **value} if isinstance(value, dict) else value)


_REFERENCE = re.compile(r"\w+(\.\w+)*:\w+(\.\w+)*")


def _check_reference(text: str) -> str:
    if _REFERENCE.fullmatch(text):
        return text
    module, _, attribute = text.rpartition(".")
    example = f"{module}:{attribute}"
    hint = f"; did you mean '{example}'?" if _REFERENCE.fullmatch(example) else ", such as my_rewards:length_reward"
    raise ValueError(f"{clipped(text, 80)!r} is not written module:attribute, with a colon{hint}")


def _check_path(text: str) -> str:
    """`~/x` with the home folder filled in; a hub name stays what it is."""
    full = os.path.expanduser(text)
    if full.startswith("~"):
        raise ValueError(f"there is no home folder for {full.split('/')[0]}; write the whole path")
    return full


def _check_server_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and url == f"{parts.scheme}://{parts.netloc}"
        is_whole = (
            is_whole and bool(check_host(parts.hostname or "")) and parts.port != 0 and not re.search("@|:$", url)
        )
    except ValueError:  # brackets that do not close, a port beyond 65535, no name of a host
        is_whole = False
    if not is_whole:
        shown = "an address with a password" if "@" in url else repr(clipped(url, 80))
        raise ValueError(f"{shown} is not http://host:port or https://host:port, without a path")
    return url


Dtype = Literal["float32", "bfloat16"]
ComputeDtype = Literal["float32", "bfloat16", "float16"]
EngineName = Literal["vllm", "embedded"]
AttentionName = Literal["mask", "varlen"]
TransportKind = Literal["gloo", "nccl", "ipc"]
PushMode = Literal["recompute", "keep_kv", "abort"]
Reference = Annotated[
    str, AfterValidator(_check_reference), WithJsonSchema({"type": "string", "pattern": f"^{_REFERENCE.pattern}$"})
]
"""`module:attribute`; the working directory is importable."""
FilePath = Annotated[Path, AfterValidator(lambda path: Path(_check_path(str(path))))]
"""A file or folder; `~` is the home folder."""
ModelName = Annotated[str, AfterValidator(_check_path)]
"""A folder, or a name on a hub."""
Host = Annotated[str, Field(pattern=r"^[^\s/@]+$", max_length=253), AfterValidator(check_host)]
"""Name or address of a machine."""
ServerUrl = Annotated[
    str, AfterValidator(_check_server_url), WithJsonSchema({"type": "string", "pattern": r"^https?://[^/]+$"})
]
Seconds = Annotated[float, Field(gt=0.0, le=2e6)]
"""A timeout in seconds, at most 2e6 (23 days): about the longest wait that poll accepts, 2^31 ms."""
Count = Annotated[int, Field(ge=1, le=1_000_000)]
"""How many of something are made or held at once."""
SmallCount = Annotated[int, Field(ge=1, le=1024)]
"""How many processes, threads or GPUs on one machine."""
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
"""What every generator of random numbers takes."""
TopP = Annotated[float, Field(ge=0.01, le=1.0)]
TopK = Annotated[int, Field(ge=0, le=1_000_000)]
MinP = Annotated[float, Field(ge=0.0, le=1.0)]
RepetitionPenalty = Annotated[float, Field(ge=0.1, le=10.0)]
StopStrings = Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=16)]
"""Texts at which a generation ends."""
Weight = Annotated[float, Field(ge=-1e6, le=1e6)]
"""Factor of a reward or of a part of the loss."""
