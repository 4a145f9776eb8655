"""Preflight, text: do prompts become the tokens they should, on both sides?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from grpo_async.checks.preflight_context import CheckedServer, PreflightContext
from grpo_async.checks.preflight_http import ProbeClient
from grpo_async.checks.report import Check, failed, passed, warned
from grpo_async.errors import BadResponseError, ConfigError, GrpoAsyncError, RequestRejectedError
from grpo_async.records import Origin, TaggedMessage, ToolCall

_MOST_TOKENS = 16  # control tokens that are tried as text
_ANSWER = "kqanswerzq"
_HARMLESS = "kqtextzq"
_SAMPLES = (
    "What is 12 + 30? Think first.",
    "Ünïcode: 你好, мир 🙂\n\n\ttabs  and   blanks",
    "def f(x):\n    return x**2  # code",
)


def check_tokenizer(context: PreflightContext) -> list[Check]:
    """The trainer's tokenizer, which fits its model (families.check_tokenizer_size), fits the servers', too."""
    return [_tokenizer_of(context, server, len(context.renderer.tokenizer)) for server in context.servers]


def _tokenizer_of(context: PreflightContext, server: CheckedServer, num_ids: int) -> Check:
    name = "tokenizer"
    info = server.info
    assert info is not None  # what serves has said what it is
    sizes = (
        f"{num_ids} ids, {context.num_embeddings} rows in the trainer's embedding, {info.vocab_size} in the server's"
    )
    if info.vocab_size == 0:
        return warned(name, f"{server.name} does not say how many ids it knows ({num_ids} here)")
    if info.vocab_size < num_ids or info.vocab_size != context.num_embeddings:
        return failed(name, f"{server.name} serves a model of another vocabulary: {sizes}; start it with this config")
    if info.engine != "vllm":
        return passed(name, f"{server.name}: {sizes}; it takes and gives ids only")
    texts = [*_SAMPLES, *(message.content for prompt in context.prompts for message in prompt.messages)]
    with ProbeClient(
        server.url, token=context.token, timeout_s=context.config.weights.timeout_s, authority=context.authority
    ) as client:
        try:
            problem = _differing_text(context.renderer.tokenizer, client.tokenize, texts)
        except (RequestRejectedError, BadResponseError) as error:
            return warned(name, f"{server.name}: {sizes}; its own tokenizer could not be asked ({error})")
    if problem:
        return failed(
            name, f"{server.name} has another tokenizer than model.path: {problem}; start it with this config"
        )
    return passed(name, f"{server.name}: {sizes}; {len(texts)} texts have the same ids on both sides")


def _differing_text(tokenizer: Any, tokenize: Callable[[str], list[int]], texts: Sequence[str]) -> str:
    for text in texts:
        ours = [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
        theirs = tokenize(text)
        if ours != theirs:
            return f"{text[:60]!r} is {ours[:12]} here and {theirs[:12]} there"
    return ""


def check_chat(context: PreflightContext) -> list[Check]:
    """The chat template, round trip: prompts, the end of a turn, tools, and text that looks like control tokens."""
    name = "chat template"
    problems: list[str] = []
    warnings: list[str] = []
    if not context.renderer.end_of_turn_ids:
        warnings.append(
            "no token ends a turn, so every completion runs to its limit; set model.end_of_turn_tokens to what the model "
            "was trained to end with"
        )
    _check_prompts(context, problems, warnings)
    if context.renderer.tokenizer.chat_template:
        for check in (_check_turn_end, _check_guard):
            try:
                check(context, warnings, problems)
            except GrpoAsyncError as error:
                warnings.append(f"a test conversation cannot be rendered: {error}")
    notes = _check_tools(context, problems)
    checks = [failed(name, problem) for problem in problems] + [warned(name, warning) for warning in warnings]
    if checks:
        return checks
    ends = context.renderer.tokenizer.convert_ids_to_tokens(context.renderer.end_of_turn_ids)
    return [
        passed(
            name,
            f"{len(context.rendered_prompts)} prompts decode and encode to the same ids; turns end with "
            f"{' or '.join(ends)}; control tokens in foreign text stay text{f'; tools: {notes}' if notes else ''}",
        )
    ]


def _check_prompts(context: PreflightContext, problems: list[str], warnings: list[str]) -> None:
    tokenizer = context.renderer.tokenizer
    for number, ids in enumerate(context.rendered_prompts):
        where = f"prompt {number}"
        if not ids:
            problems.append(f"{where} renders to no tokens at all; look at model.chat_template")
            return
        beyond = [token for token in ids if not 0 <= token < context.num_embeddings]
        if beyond:
            problems.append(
                f"{where} has the ids {beyond[:4]}, the model only {context.num_embeddings}: another tokenizer's"
            )
            return
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        again = [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
        if again != ids:
            place = next(
                (i for i, (a, b) in enumerate(zip(ids, again, strict=False)) if a != b), min(len(ids), len(again))
            )
            warnings.append(
                f"{where} as text encodes to other ids from token {place} on ({ids[place : place + 4]} becomes "
                f"{again[place : place + 4]}): harmless here, where ids are never made from text again, but a rollout "
                "function or reward that tokenizes text gets other ids"
            )
            return


def _check_turn_end(context: PreflightContext, warnings: list[str], _: list[str]) -> None:
    """After an earlier answer the template must write a token at which generation stops."""
    renderer = context.renderer
    messages = [_message("user", "question"), _message("assistant", _ANSWER), _message("user", "question")]
    ids = renderer.prompt_ids(messages)
    texts = (renderer.tokenizer.decode(ids[: count + 1], skip_special_tokens=False) for count in range(len(ids)))
    end = next((number for number, text in enumerate(texts) if _ANSWER in text), None)
    if end is None:
        return  # the template leaves earlier answers out, or the tokenizer changes text: nothing can be said
    after = ids[end + 1 : end + 3]  # a newline may come before it
    if renderer.end_of_turn_ids and not set(after) & set(renderer.end_of_turn_ids):
        tokens = renderer.tokenizer.convert_ids_to_tokens
        warnings.append(
            f"the chat template goes on after an answer with {tokens(after)}, but generation stops at "
            f"{tokens(renderer.end_of_turn_ids)} only: turns may run on; see model.end_of_turn_tokens"
        )


def _check_guard(context: PreflightContext, _: list[str], problems: list[str]) -> None:
    """The text of a control token in a foreign message must not become the token."""
    renderer = context.renderer
    tokenizer = renderer.tokenizer
    special = {int(token) for token in tokenizer.all_special_ids}

    def control_ids(content: str) -> Counter[int]:
        message = TaggedMessage(role="user", content=content, origin=Origin.ENVIRONMENT)
        return Counter(token for token in renderer.prompt_ids([message]) if token in special)

    expected = control_ids(_HARMLESS)
    for text in tokenizer.all_special_tokens[:_MOST_TOKENS]:
        if control_ids(f"{_HARMLESS}{text}{_HARMLESS}") != expected:
            problems.append(f"the text {text!r} in a message of a tool or environment becomes a control token")
            return


def _check_tools(context: PreflightContext, problems: list[str]) -> str:
    """Every set of tools renders, and its results follow a turn; returns a few words for the table."""
    renderer = context.renderer
    names: list[str] = []
    for tools in context.tool_sets:
        first = str(dict(tools[0].get("function", tools[0]))["name"])
        call = ToolCall(tool_call_id="kqcall000", name=first)
        result = TaggedMessage(
            role="tool", content=_HARMLESS, origin=Origin.TOOL, name=first, tool_call_id=call.tool_call_id
        )
        try:
            renderer.check_tools(tools)
            suffix = renderer.suffix_ids([call], [result])
        except (ConfigError, GrpoAsyncError) as error:
            problems.append(f"tools ({first}, ...): {error}")
            continue
        if _HARMLESS not in renderer.tokenizer.decode(suffix, skip_special_tokens=False):
            problems.append(
                f"the result of the tool `{first}` is not in the tokens that follow a call; see model.chat_template"
            )
        names.append(first)
    return ", ".join(names)


def _message(role: str, content: str) -> TaggedMessage:
    return TaggedMessage(role=role, content=content, origin=Origin.PROMPT)
