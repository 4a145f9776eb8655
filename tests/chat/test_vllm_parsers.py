"""Tool calls as vLLM reads them: our parsers beside vLLM's own on the same texts, and the chat templates of 25 families."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from grpo_async.chat import ChatRenderer
from grpo_async.chat.formats import FORMATS
from grpo_async.chat.turn import ParsedTurn, SampledTurn
from grpo_async.errors import ConfigError
from tests.chat.helpers import TOOLS
from tests.support.chat_families import template_source

pytest.importorskip("vllm")

FUNCTIONS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {"type": kind}}}},
    }
    for name, kind in (("f", "integer"), ("g", "string"))
]
_NAMED = re.compile(
    r"<[|｜][^|｜<>\n{}'\" ]{1,40}[|｜]>|</?[a-zA-Z][\w:]{1,30}>|\[/?[A-Z][A-Z_]+\]|<\|[a-z_]+>|<[a-z_]+\|>|</?s>"
)


@cache
def _tokenizer(source: str, *, eos: str) -> Any:
    """One of bytes, with the tokens that a template writes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, chat_template=source)
    found = dict.fromkeys([*_NAMED.findall(source), eos])
    made.add_tokens(
        [AddedToken(text, special=text[:2] in ("<|", "<｜") or text[0] == "[", normalized=False) for text in found]
    )
    return made


def _is_call(turn: ParsedTurn) -> list[Any]:
    return [(call.name, dict(call.arguments)) if call.error is None else "unreadable" for call in turn.calls]


def _hermes(arguments: str, *, name: str = "f", end: str = "</tool_call>") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n{end}'


SAME = {
    "hermes": [
        "the answer is 42", "</tool_call>", _hermes("{}"), _hermes('{"a": 1}'), _hermes('{"a": 1}', end=""),
        "I look.\n" + _hermes("{}"), _hermes("{}") + "\n" + _hermes('{"a": "b"}', name="g"),
        _hermes("{}") + _hermes("{}", name="g", end=""), "a " + _hermes("{}") + " b " + _hermes("{}", name="g") + " c",
        _hermes("{}") + " and more", _hermes('{"a": {"b": [1, {"c": null}]}}'), _hermes('{"a": "<tool_call>"}'),
        _hermes('{"a": "é\\u00e9 日本 😀"}'), _hermes('{"a": "1", "b": 1, "c": 1.0, "d": true, "e": 1e3}'), _hermes("null"),
        _hermes('{"a": "\\"}"}'), '<tool_call>{"name": "f", "arguments": {}, "id": "x"}</tool_call>', _hermes("{}", name=" f "),
    ],
    "llama3_json": [
        '{"name": "f", "parameters": {"a": 1}}', '<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
        'I look. {"name": "f", "parameters": {"a": 1}}', '{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"a": "1"}}',
        '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}]', '{"name": "f", "parameters": {}} done',
        '{"name": "Ada", "age": 36}', "{ set notation }", 'I look.<|python_tag|>{"name": "f", "parameters": {}}',
        '{"type": "function", "name": "f", "parameters": {"a": {"b": 1}}}', '{"name": "f"}', '{"function": {"name": "f"}}',
        'The set {1, 2} is {"name": "f", "parameters": {}}', '{"name": "f", "parameters": {"a": "{"}}',
        '{"name": "f", "parameters": {}} {"answer": 3}', '{"a": {"name": "f", "parameters": {}}}',
        '{"name": "f", "parameters": {"a": "é 日本"}}',
    ],
    "mistral": [
        '[TOOL_CALLS]f[ARGS]{"a": 1}', 'I look.[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{"a": "b"}', '[TOOL_CALLS]f{"a": 1}',
        "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS]{} and more", "no call",
    ],
    "mistral, before [ARGS]": [
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', 'text [TOOL_CALLS] [{"name": "f", "arguments": {}}]',
        '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]', "no call",
    ],
}  # fmt: skip
UNREADABLE = {
    "hermes": [
        _hermes("{"), _hermes("{}x"), "<tool_call>", "<tool_call></tool_call>", '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"name": "f", "parameters": {}}</tool_call>',
        f"<tool_call>[{json.dumps({'name': 'f', 'arguments': {}})}]</tool_call>", _hermes('{"a": "</tool_call>"}'),
        '<tool_call>{"name": "f", "arguments": {}} and more</tool_call>', _hermes('{"a": "x\ny"}'),
    ],
    "llama3_json": ['{"name": "f", "parameters": {"a": 1', "<|python_tag|>print(1)"],
}  # fmt: skip
_TOKENS = {"hermes": "<tool_call></tool_call>", "llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS][ARGS]"}


def _both(name: str, text: str) -> tuple[ParsedTurn, ParsedTurn]:
    from grpo_async.chat.formats import VllmFormat

    name, _, is_old = name.partition(", ")
    tokens = "[TOOL_CALLS]" if is_old else _TOKENS[name]
    turn = SampledTurn(text=text, marked_text=text, tools=FUNCTIONS)
    return FORMATS[name]().read(turn), VllmFormat(name, _tokenizer(tokens, eos="</s>"), ()).read(turn)


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in SAME.items() for text in texts])
def test_our_parsers_read_what_vllms_read(name: str, text: str) -> None:
    ours, vllms = _both(name, text)
    assert (_is_call(ours), ours.content.strip()) == (_is_call(vllms), vllms.content.strip())


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in UNREADABLE.items() for text in texts])
def test_what_vllm_leaves_as_text_is_told_as_an_error_and_never_called(name: str, text: str) -> None:
    ours, vllms = _both(name, text)
    assert (set(_is_call(ours)), _is_call(vllms)) == ({"unreadable"}, [])


def test_the_differences_that_the_page_names() -> None:
    ours, vllms = _both("hermes", _hermes('{"a": 1, "a": 2}'))
    assert (_is_call(ours), _is_call(vllms)) == (["unreadable"], [("f", {"a": 2})])
    ours, vllms = _both("hermes", _hermes("{") + _hermes("{}", name="g"))
    assert (_is_call(ours), _is_call(vllms)) == (["unreadable", ("g", {})], [])
    ours, vllms = _both("mistral", '[TOOL_CALLS]f[ARGS]{"a": "1"}')
    assert (_is_call(ours), _is_call(vllms)) == ([("f", {"a": "1"})], [("f", {"a": 1})])


# --- templates

END = "<|im_end|>"
PLAIN = """{%- if tools %}<|tools|>{{ tools | tojson }}{{ eos_token }}{% endif %}
{%- for m in messages %}<|role|>{{ m.role }}
{% if m.tool_calls %}CALLS{% else %}{{ m.content }}{% endif %}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}<|role|>assistant
{% endif %}"""
_JSON = "{{ c.function.arguments | tojson }}"
_NAME = "{{ c.function.name }}"


def _each(call: str, before: str = "", after: str = "", between: str = "") -> str:
    return f"{before}{{% for c in m.tool_calls %}}{call}{{{{ '{between}' if not loop.last }}}}{{% endfor %}}{after}"


def _pairs(pair: str, between: str = "") -> str:
    loop = "{% for k, v in c.function.arguments.items() %}"
    return f"{loop}{pair}{{{{ '{between}' if not loop.last }}}}{{% endfor %}}"


_LISTED = f'{{"name": "{_NAME}", "arguments": {_JSON}}}'
_FUNCTION = f"<function={_NAME}>\n" + _pairs("<parameter={{ k }}>\n{{ v }}\n</parameter>\n") + "</function>\n"
_INVOKE = f'<invoke name="{_NAME}">\n' + _pairs('<parameter name="{{ k }}">{{ v }}</parameter>\n') + "</invoke>\n"
_COHERE = f'{{"tool_call_id": "0", "tool_name": "{_NAME}", "parameters": {_JSON}}}'
_DEEPSEEK = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}\n```json\n{_JSON}\n```<｜tool▁call▁end｜>"
_KIMI = f"functions.{_NAME}:{{{{ loop.index0 }}}}<|tool_call_argument_begin|>{_JSON}"
CALLS = {  # the calls of families whose templates TRL does not ship, as their models write them
    "Qwen3-Coder": _each(f"<tool_call>\n{_FUNCTION}</tool_call>"),
    "Cohere Command A": _each(_COHERE, "<|START_ACTION|>[", "]<|END_ACTION|>", ", "),
    "Jamba": _each(_LISTED, "<tool_calls>[", "]</tool_calls>", ", "),
    "Granite 3": _each(_LISTED, "<|tool_call|>[", "]", ", "),
    "Phi-4 mini": _each(_LISTED, "functools[", "]", ", "),
    "Llama 4": _each(
        f"{_NAME}({_pairs('{{ k }}={{ v | tojson }}', ', ')})", "<|python_start|>[", "]<|python_end|>", ", "
    ),
    "DeepSeek V3": _each(_DEEPSEEK, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "DeepSeek V3.1": _each(
        f"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>{_JSON}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "Kimi K2": _each(
        f"<|tool_call_begin|>{_KIMI}<|tool_call_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    ),
    "MiniMax M2": _each(_INVOKE, "<minimax:tool_call>\n", "</minimax:tool_call>"),
    "Seed-OSS": _each(f"<seed:tool_call>\n{_FUNCTION}</seed:tool_call>"),
}
OF_TRL = {
    "Qwen2.5": "qwen2_5", "Qwen3": "qwen3", "Qwen3-Instruct-2507": "qwen3_instruct_2507", "Qwen3-VL": "qwen3_vl",
    "Qwen 3.5": "qwen3_5_think", "Qwen 3.6": "qwen3_6", "GLM-4-MoE": "glm4moe", "Gemma 4": "gemma4", "LFM2.5": "lfm2_2_5",
    "Llama 3.1": "llama3_1", "Llama 3.2": "llama3_2", "Nemotron 3": "nemotron_3_nano", "GPT-OSS": "gptoss",
}  # fmt: skip
OWN = {"Mistral": "mistral"}
ENDS = ("<|observation|>", "<|user|>", "<|eom_id|>", "<|call|>", "<|tool_response>")
PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
LISTED = dict(re.findall(r"^\| (.+?) \| `(\w+)` \| (?:own|vLLM) \|$", PAGE, re.MULTILINE))


def _source(family: str) -> tuple[str, str]:
    """Template and end-of-turn token."""
    if family in CALLS:
        return PLAIN.replace("CALLS", CALLS[family]), END
    if family in OWN:
        return template_source(OWN[family]), "</s>"
    import trl

    folder = Path(trl.__file__).parent / "chat_templates"
    text = (folder / f"{OF_TRL[family]}.jinja").read_text(encoding="utf-8")
    return text, next(end for end in (END, "<|eot_id|>", "<turn|>", "<|return|>", "<|user|>") if end in text)


def test_the_page_lists_the_families() -> None:
    assert set(LISTED) == {*CALLS, *OF_TRL, *OWN}


@pytest.mark.parametrize("family", [*CALLS, *OF_TRL, *OWN])
def test_a_template_with_tools_renders_and_its_calls_are_read(family: str) -> None:
    """All steps of the check at startup: the tools are in the prompt, results follow a turn, and the parser reads a call as the
    template writes it; then a turn of two calls."""
    source, eos = _source(family)
    tokenizer = _tokenizer(source, eos=eos)
    ends = [token for token in ENDS if token in tokenizer.get_added_vocab()]
    renderer = ChatRenderer(tokenizer, end_of_turn_tokens=ends)
    notes = renderer.check_tools(TOOLS)
    assert f"`{LISTED[family]}`" in notes[0]
    assert not [note for note in notes if "does not read" in note]


def test_without_vllm_its_formats_are_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_async.chat.formats.is_vllm_installed", lambda: False)
    source, eos = _source("Qwen3-Coder")
    with pytest.raises(ConfigError, match=r"qwen3_coder.*vLLM is not installed"):
        ChatRenderer(_tokenizer(source, eos=eos)).check_tools(TOOLS)
