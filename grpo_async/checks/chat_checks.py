"""Preflight, text: do prompts become the tokens they should? The chat template, rendered for real, once around."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_async.chat.renderer import ChatRenderer
from grpo_async.checks.report import Found
from grpo_async.errors import GrpoAsyncError
from grpo_async.records import Origin, TaggedMessage

SAMPLES = (
    "What is 12 + 30? Think first.",
    "Ünïcode: 你好, мир 🙂\n\n\ttabs  and   blanks",
    "def f(x):\n    return x**2  # code",
)
_MAX_TOKENS = 16  # control tokens that are tried as text
_ANSWER = "kqanswerzq"
_HARMLESS = "kqtextzq"


def check_chat(
    renderer: ChatRenderer,
    prompts: Sequence[Sequence[int]],
    *,
    tool_sets: Sequence[Sequence[Mapping[str, Any]]],
    num_embeddings: int,
) -> list[Found]:
    """Prompts, the end of a turn, text that looks like control tokens, and tools.

    Args:
        prompts: token ids of a few rendered prompts.
        num_embeddings: rows of the model's embedding.
    """
    found: list[Found] = []
    if not renderer.end_of_turn_ids:
        remedy = "set model.end_of_turn_tokens to the token that the model was trained to end with"
        found.append(("warn", f"no token ends a turn, so every completion runs to its limit; {remedy}"))
    found += _check_prompts(prompts, num_embeddings)
    if renderer.tokenizer.chat_template:
        for check in (_check_turn_end, _check_guard):
            try:
                found += check(renderer)
            except GrpoAsyncError as error:
                found.append(("warn", f"a test conversation cannot be rendered: {error}"))
    for tools in tool_sets:
        try:
            renderer.check_tools(tools)
        except GrpoAsyncError as error:
            found.append(("fail", f"tools ({_name_of(tools)}, ...): {error}"))
    if found:
        return sorted(found)  # what fails first
    ends = " or ".join(renderer.tokenizer.convert_ids_to_tokens(renderer.end_of_turn_ids))
    message = f"turns end with {ends}; control tokens in text stay text"
    names = ", ".join(map(_name_of, tool_sets))
    return [("pass", f"{message}; tools: {names}" if names else message)]


def _check_prompts(prompts: Sequence[Sequence[int]], num_embeddings: int) -> Iterator[Found]:
    for number, ids in enumerate(prompts):
        if not ids:
            yield "fail", f"prompt {number} renders to no tokens at all; look at model.chat_template"
            return
        if beyond := [token for token in ids if not 0 <= token < num_embeddings]:
            message = f"prompt {number} has the ids {beyond[:4]}, the model only {num_embeddings}"
            yield "fail", f"{message}: another tokenizer's"
            return


def _check_turn_end(renderer: ChatRenderer) -> Iterator[Found]:
    """After an earlier answer the template must write a token at which generation stops."""
    roles = (("user", "question"), ("assistant", _ANSWER), ("user", "question"))
    ids = renderer.prompt_ids(
        [TaggedMessage(role=role, content=content, origin=Origin.PROMPT) for role, content in roles]
    )
    texts = (renderer.tokenizer.decode(ids[: count + 1], skip_special_tokens=False) for count in range(len(ids)))
    end = next((number for number, text in enumerate(texts) if _ANSWER in text), None)
    if end is None:
        return  # the template leaves earlier answers out, or the tokenizer changes text: nothing can be said
    after = ids[end + 1 : end + 3]  # a newline may come before it
    if renderer.end_of_turn_ids and not set(after) & set(renderer.end_of_turn_ids):
        tokens = renderer.tokenizer.convert_ids_to_tokens
        stops = f"generation stops at {tokens(renderer.end_of_turn_ids)} only: turns may run on"
        yield (
            "warn",
            f"after an answer the chat template continues with {tokens(after)}, but {stops}; see model.end_of_turn_tokens",
        )


def _check_guard(renderer: ChatRenderer) -> Iterator[Found]:
    """The text of a control token in a foreign message must not become the token."""
    special = {int(token) for token in renderer.tokenizer.all_special_ids}

    def control_ids(content: str) -> Counter[int]:
        message = TaggedMessage(role="user", content=content, origin=Origin.ENVIRONMENT)
        return Counter(token for token in renderer.prompt_ids([message]) if token in special)

    expected = control_ids(_HARMLESS)
    for text in renderer.tokenizer.all_special_tokens[:_MAX_TOKENS]:
        if control_ids(f"{_HARMLESS}{text}{_HARMLESS}") != expected:
            yield "fail", f"the text {text!r} in a message of a tool or environment becomes a control token"
            return


def _name_of(tools: Sequence[Mapping[str, Any]]) -> str:
    return str(dict(tools[0].get("function", tools[0]))["name"])
