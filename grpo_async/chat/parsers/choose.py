"""Which parser reads the policy's calls (`tool_calling.parser`)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_async.chat.parsers.formats import FORMATS, Format
from grpo_async.chat.parsers.response_template import ResponseTemplate
from grpo_async.chat.parsers.user import UserParser
from grpo_async.errors import ConfigError

AUTO = "auto"
RESPONSE_TEMPLATE = "response_template"
_SIGNS = {
    "<|call|>": "harmony",
    "[TOOL_CALLS]": "mistral",
    "<tool_call>": "hermes",
    "<|start_header_id|>ipython": "llama3_json",
    "<|python_tag|>": "llama3_json",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenParser:
    """`format` is None where `auto` recognised nothing; `reason` says why it is this one, or what to do."""

    name: str
    format: Format | None
    reason: str


def choose_parser(
    setting: str, tokenizer: Any, *, template_source: str, vocabulary: Mapping[str, int], generation_prompt: str
) -> ChosenParser:
    """The parser that `setting` names. `auto`: the format whose marks the chat template writes, then the one whose marks are
    tokens, then the tokenizer's own `response_template`; that comes last because it cannot say which call is wrong, and why.

    Raises:
        ConfigError: there is no such parser.
    """
    if ":" in setting:
        decode = _decoder(tokenizer)
        return ChosenParser(name=setting, format=UserParser(setting, decode), reason="set in tool_calling.parser")
    if setting in FORMATS:
        return ChosenParser(name=setting, format=FORMATS[setting](), reason="set in tool_calling.parser")
    has_own = getattr(tokenizer, "response_template", None) is not None
    if setting == RESPONSE_TEMPLATE and not has_own:
        raise ConfigError("tool_calling.parser: the tokenizer has no `response_template`; set another parser")
    if setting not in (AUTO, RESPONSE_TEMPLATE):
        names = [AUTO, *FORMATS, RESPONSE_TEMPLATE]
        nearest = difflib.get_close_matches(setting, names, n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else "it is one of " + ", ".join(f"`{n}`" for n in names)
        raise ConfigError(
            f"tool_calling.parser: there is no parser {setting!r}; {hint}, or `module:attribute` of your own"
        )
    found = _recognise(template_source, vocabulary) if setting == AUTO else None
    if found is not None:
        name, reason = found
        return ChosenParser(name=name, format=FORMATS[name](), reason=reason)
    if has_own:
        reader = ResponseTemplate(tokenizer, generation_prompt)
        return ChosenParser(name=RESPONSE_TEMPLATE, format=reader, reason="the tokenizer describes its own format")
    return ChosenParser(
        name=AUTO,
        format=None,
        reason=(
            "neither the chat template nor the vocabulary shows how the model writes tool calls; set tool_calling.parser to "
            + ", ".join(f"`{name}`" for name in FORMATS)
            + ", or to `module:attribute` of your own"
        ),
    )


def _recognise(template_source: str, vocabulary: Mapping[str, int]) -> tuple[str, str] | None:
    """The name of the format, and the sign of it."""

    if any(mark in template_source for mark in ("<function=", "<arg_key>")):
        return None  # Qwen3-Coder and GLM write no JSON inside <tool_call>
    for mark, name in _SIGNS.items():
        if mark in template_source:
            return name, f"the chat template writes {mark}"
    return next(
        ((name, f"{mark} is a token of the tokenizer") for mark, name in _SIGNS.items() if mark in vocabulary), None
    )


def _decoder(tokenizer: Any) -> Any:
    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=False))

    return decode
