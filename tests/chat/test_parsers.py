"""How tool calls are read: the formats of the families on good and bad texts, and parsers of the user's own."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from grpo_async.chat.formats import FORMATS
from grpo_async.chat.turn import SampledTurn
from grpo_async.errors import ConfigError
from tests.chat.helpers import renderer_of, tokens
from tests.support.chat_families import family

OWN = "tests.chat.own_parsers"


def _read(name: str, text: str, **options: Any) -> tuple[str, list[tuple[str, dict[str, Any]]], list[str]]:
    """Content, readable calls, errors of a turn that a model of the family samples."""
    turn = renderer_of(name, **options).parse(tokens(name, text), turn=0)
    assert turn.parse_error is None
    good = [(call.name, dict(call.arguments)) for call in turn.tool_calls if call.error is None]
    return turn.content, good, [call.error for call in turn.tool_calls if call.error is not None]


@pytest.mark.parametrize(
    ("name", "opening", "text", "content", "calls"),
    [
        ("qwen2_5", '<tool_call>\n{"name": "f", ', '"arguments": {"a": 1}}\n</tool_call>', "", [("f", {"a": 1})]),
        ("qwen2_5", "I look", ' up.\n<tool_call>{"name": "f"}</tool_call>', " up.", [("f", {})]),
        ("qwen3", "<think>\nlet me", ' <tool_call>{"name": "f"}', ' <tool_call>{"name": "f"}', []),
    ],
)
def test_what_a_prompt_has_opened_belongs_to_the_calls_and_not_to_the_content(
    name: str, opening: str, text: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    turn = renderer_of(name).parse(tokens(name, text), turn=0, opening=opening)
    assert (turn.content, [(call.name, dict(call.arguments)) for call in turn.tool_calls]) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        # what is pondered is not called
        (
            "qwen3",
            '<think>\n<tool_call>{"name": "f"}</tool_call>\n</think>\n\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
            '<think>\n<tool_call>{"name": "f"}</tool_call>\n</think>',
            [("g", {})],
        ),
        ("qwen3", '<think>\n<tool_call>{"name": "f"}</tool_call>', '<think>\n<tool_call>{"name": "f"}</tool_call>', []),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}<|eom_id|>', "", [("f", {"a": 1})]),
        ("mistral_args", 'I look.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}</s>', "I look.", [("f", {"a": 1}), ("g", {})]),
        (
            "gpt_oss",
            "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>commentary to=functions.f "
            '<|constrain|>json<|message|>{"a": 1}<|call|>',
            "think",
            [("f", {"a": 1})],
        ),
        ("gpt_oss", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', "", [("f", {"a": 1})]),
        ("gpt_oss", "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>final<|message|>42", "42", []),
    ],
)  # fmt: skip
def test_good_turns(name: str, text: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert _read(name, text) == (content, calls, [])


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("qwen2_5", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', "inside"),
        ("qwen2_5", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be a JSON object, not a list"),
        ("qwen2_5", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', "'a' is given twice"),
        ("qwen2_5", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is not a number of JSON"),
        ("qwen2_5", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "too large"),
        ("qwen2_5", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "surrogate"),
        (
            "qwen2_5",
            f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 100 + "]" * 100}}}}}</tool_call>',
            "nested deeper",
        ),
        ("qwen2_5", '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "not valid JSON"),
        ("gpt_oss", '<|channel|>commentary to=functions.f json<|message|>{"a"', "<|call|> is missing"),
        ("gpt_oss", "<|channel|>commentary to=functions.f json", "it has no <|message|>"),
    ],
)
def test_a_call_that_cannot_be_read_says_what_is_wrong_and_how_to_write_it(name: str, text: str, error: str) -> None:
    _, good, errors = _read(name, text)
    assert good == []
    assert len(errors) == 1
    assert error in errors[0]
    assert "write" in errors[0]
    assert len(errors[0]) < 400


def test_a_good_call_beside_a_bad_one_is_kept() -> None:
    good = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    text = f'<tool_call>{{"name": "f", oh}}</tool_call>\n{good}\n<tool_call>{{"name": "h"'
    turn = renderer_of("qwen3").parse(tokens("qwen3", text), turn=0)
    assert [(call.name, call.error is None) for call in turn.tool_calls] == [("f", False), ("g", True), ("h", False)]
    assert turn.text == text  # all of it, whatever could be read


def test_a_call_that_is_not_closed_does_not_swallow_the_next() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    turn = renderer_of("qwen3").parse(tokens("qwen3", text), turn=0)
    assert [(call.name, call.error is None) for call in turn.tool_calls] == [("f", False), ("g", True)]


def test_mistrals_own_ids_are_kept_where_they_can_be() -> None:
    text = '[TOOL_CALLS] [{"name": "f", "id": "VvvODy9mT"}, {"name": "g", "id": "VvvODy9mT"}, {"name": "h", "id": "x"}]</s>'
    turn = renderer_of("mistral").parse(tokens("mistral", text), turn=2)
    assert [call.tool_call_id for call in turn.tool_calls] == ["VvvODy9mT", "c00020001", "c00020002"]


def test_thinking_that_the_generation_prompt_opened_is_not_searched_for_calls() -> None:
    template = family("qwen3").chat_template.replace("'<|im_start|>assistant\\n' }}\n    {%- if enable", "'<|im_start|>assistant\\n<think>\\n' }}\n    {%- if enable")  # fmt: skip # noqa: E501
    renderer = renderer_of("qwen3", chat_template=template)
    pondered = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert renderer.parse(tokens("qwen3", pondered), turn=0).tool_calls == []
    (made,) = renderer.parse(tokens("qwen3", pondered + "\n</think>\n\n" + pondered), turn=0).tool_calls
    assert made.name == "f"


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (
            "hermes",
            'I look.\n<tool_call>\n{"name": "f", "arguments": {"a": [1, "b"]}}\n</tool_call><tool_call>{"name": "g"}</tool_call>',
        ),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; [{"name": "g", "arguments": "{}"}]'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "id": "123456789"}][TOOL_CALLS]g[CALL_ID]x[ARGS]{"a": {}}'),
        (
            "harmony",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
            '<|message|>{"a": 1}<|call|>',
        ),
    ],
)
def test_no_mutation_of_a_good_text_raises(parser: str, text: str) -> None:
    """R6.7: 1000 random cuts, swaps and repetitions: each gives content and calls."""
    chance = random.Random(0)
    read = FORMATS[parser]()
    pieces = [*read.special_tokens, *'"{}[],:\\', "null", "NaN", "\n", "é", "\ud83d", "to=functions."]
    for _ in range(1000):
        mutated = text
        for _ in range(chance.randint(1, 4)):
            at, until = sorted((chance.randrange(len(mutated) + 1), chance.randrange(len(mutated) + 1)))
            mutated = chance.choice(
                [
                    mutated[:at] + mutated[until:],
                    mutated[:at] + chance.choice(pieces) + mutated[at:],
                    mutated[:until] + mutated[at:],
                ]
            )[:2000]
        reading = read.read(SampledTurn(text=mutated, marked_text=mutated))
        for call in reading.calls:
            assert call.name or call.error
            json.dumps(dict(call.arguments), allow_nan=False)


@pytest.mark.clock
@pytest.mark.parametrize("parser", sorted(FORMATS))
def test_a_hostile_text_is_read_in_linear_time(parser: str) -> None:
    read = FORMATS[parser]()
    for mark in read.special_tokens:
        for filler in ("", '{"name": "f"}', '"', "[" * 20, "to=functions.f"):
            text = (mark + filler) * 2000
            began = time.monotonic()
            read.read(SampledTurn(text=text, marked_text=text))
            assert time.monotonic() - began < 2  # takes some hundredths


# --- which parser


def test_an_unknown_format_reads_no_calls_and_needs_no_parser() -> None:
    turn = renderer_of("chatml").parse(tokens("chatml", "the answer is 42<|im_end|>"), turn=0)
    assert (turn.text, turn.content, turn.tool_calls, turn.parse_error) == ("the answer is 42",) * 2 + ((), None)


def test_an_unknown_parser_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="there is no parser 'hermess'; did you mean 'hermes'"):
        renderer_of("qwen3", parser="hermess")


# --- the user's own


def test_a_users_own_parser() -> None:
    read = _read("chatml", "I look. CALL[f] CALL[g]<|im_end|>", parser=f"{OWN}:brackets")
    assert read == ("I look.", [("f", {}), ("g", {})], [])


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("raises", "RuntimeError: no such luck"),
        ("returns_text", "returned a string ('search()') as tool calls; return a list"),
        ("breaks_the_rules", "NaN is not a number of JSON"),
    ],
)
def test_whatever_a_parser_raises_leaves_the_text_as_the_message(name: str, error: str) -> None:
    """R6.7: a parse error does not kill the rollout."""
    turn = renderer_of("chatml", parser=f"{OWN}:{name}").parse(tokens("chatml", "hello<|im_end|>"), turn=0)
    assert (turn.text, turn.content, turn.tool_calls) == ("hello", "hello", ())
    assert turn.parse_error is not None
    assert error in turn.parse_error


def test_a_parser_that_cannot_be_called_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"tool_calling\.parser: .*does not take \(text\)"):
        renderer_of("chatml", parser=f"{OWN}:takes_two")
