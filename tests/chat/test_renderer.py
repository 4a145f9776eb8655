"""Prompts, end-of-turn tokens, loading; and the startup check of tools."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from grpo_async.chat import ChatRenderer
from grpo_async.config.sections import ModelSection
from grpo_async.errors import ConfigError
from grpo_async.records import Origin, TaggedMessage
from tests.chat.helpers import TOOLS, rendered, renderer_of, tokens, user
from tests.support.chat_families import FAMILIES, family, template_source


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"chatml", "no_tool_role"}))
def test_a_prompt_is_what_the_template_makes_of_it(name: str) -> None:
    messages = [user("hello world")]
    plain = rendered(name, [message.as_dict() for message in messages], generation=True, tools=TOOLS)
    assert renderer_of(name).prompt_ids(messages, tools=TOOLS) == tokens(name, plain)
    assert "search" in plain


@pytest.mark.parametrize(
    "text", ["the answer is", "the answer is ", "", "<think>\nlet me", "<think>\na\n</think>\n\nthe"]
)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_last_message_of_the_assistant_is_continued_as_trl_does(name: str, text: str) -> None:
    trl = pytest.importorskip("trl.data_utils")
    given = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": text}]
    theirs = trl.apply_chat_template({"prompt": given}, family(name))["prompt"]
    messages = [TaggedMessage.from_dict(message, Origin.PROMPT) for message in given]
    assert renderer_of(name).prompt_ids(messages) == tokens(name, theirs)


def test_plain_text_is_not_templated_and_gets_the_tokenizers_own_bos() -> None:
    tokenizer = copy.deepcopy(family("llama3"))
    from tokenizers import processors

    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    renderer = ChatRenderer(tokenizer)
    assert renderer.prompt_ids([user("hello")], is_conversational=False) == [bos, *tokens("llama3", "hello")]
    assert renderer.prompt_ids([user("hello")]).count(bos) == 1  # the template writes it, the tokenizer not once more
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"no chat template.*model\.chat_template"):
        ChatRenderer(tokenizer).prompt_ids([user("hello")])
    rendered = "<|begin_of_text|>hello"  # by whoever made the data
    assert renderer.prompt_ids([user(rendered)], is_conversational=False) == [bos, *tokens("llama3", "hello")]


# --- where a turn ends


def _load(folder: Path, **settings: Any) -> ChatRenderer:
    return ChatRenderer.load(ModelSection(path=str(folder), **settings))


def test_end_of_turn_ids_come_from_tokenizer_generation_config_and_settings(tmp_path: Path) -> None:
    tokenizer = family("gpt_oss")
    tokenizer.save_pretrained(tmp_path)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in ("<|return|>", "<|call|>", "<|end|>")}
    assert _load(tmp_path).end_of_turn_ids == [ids["<|return|>"]]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "eos_token_id": ids["<|end|>"]}))
    assert _load(tmp_path).end_of_turn_ids == [
        ids["<|return|>"],
        ids["<|end|>"],
    ]  # as servers do without the other file
    config = {"eos_token_id": [ids["<|return|>"], ids["<|call|>"]]}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert _load(tmp_path).end_of_turn_ids == [ids["<|return|>"], ids["<|call|>"]]
    loaded = _load(tmp_path, end_of_turn_tokens=["<|end|>"])
    assert loaded.end_of_turn_ids == list(ids.values())


def test_load_takes_template_and_arguments(tmp_path: Path) -> None:
    """R1.14: the configured tokenizer and chat template are those of the rollouts."""
    family("chatml").save_pretrained(tmp_path)
    file = tmp_path / "own.jinja"
    file.write_text("{{ mood }}{{ messages[0].content }}", encoding="utf-8")
    renderer = _load(tmp_path, chat_template=file, chat_template_kwargs={"mood": "kind "})
    assert renderer.completion_text(renderer.prompt_ids([user("hello")])) == "kind hello"
    assert renderer.tokenizer.chat_template == "{{ mood }}{{ messages[0].content }}"  # what the export will carry


def test_a_row_has_its_own_arguments_of_the_template_unless_they_open_its_thinking_unlike_others(
    tmp_path: Path,
) -> None:
    family("chatml").save_pretrained(tmp_path)
    file = tmp_path / "own.jinja"
    file.write_text(
        "{{ mood }}{{ who is defined }}{{ messages[0].content }}"
        "{% if add_generation_prompt and think is defined %}<think>{% endif %}",
        encoding="utf-8",
    )
    renderer = _load(tmp_path, chat_template=file, chat_template_kwargs={"mood": "kind "})

    def text(**own: Any) -> str:
        row = renderer.for_row({"chat_template_kwargs": own})
        return row.completion_text(row.prompt_ids([user("hello")]))

    assert [text(), text(mood="odd "), text(who="me")] == ["kind Falsehello", "odd Falsehello", "kind Truehello"]
    with pytest.raises(ConfigError, match="chat_template_kwargs"):
        text(think=True)


# --- the startup check


@pytest.mark.parametrize(
    ("name", "old", "new", "error"),
    [
        ("chatml", "", "", r"`search` of the tool `search` is not in the prompt; set model\.chat_template"),
        ("qwen3", "tool | tojson", "tool.function.name", "`expression` of the tool `calculate` is not in the prompt"),
        ("no_tool_role", "", "", r"tool results cannot be rendered: .*Only system, user.*set model\.chat_template"),
        ("qwen3", 'message.role == "tool"', 'message.role == "result"', "it leaves out a message of a tool"),
        # GPT-OSS without <|call|>: the policy would go on and write the tool's result itself
        ("gpt_oss", "", "", r'with <\|call\|>, but generation stops at <\|return\|> only; .*: \["<\|call\|>"\]'),
    ],
)
def test_a_template_that_tools_cannot_work_with_is_refused(name: str, old: str, new: str, error: str) -> None:
    renderer = renderer_of(name, chat_template=template_source(name).replace(old, new), end_of_turn_tokens=())
    with pytest.raises(ConfigError, match=error):
        renderer.check_tools(TOOLS)


def test_an_unknown_way_of_calling_is_refused_and_a_users_own_parser_helps() -> None:
    with pytest.raises(ConfigError, match=r"set tool_calling\.parser to `hermes`"):
        renderer_of("deepseek").check_tools(TOOLS)
    notes = renderer_of("deepseek", parser="tests.chat.own_parsers:brackets").check_tools(TOOLS)
    assert "does not read a call as this chat template writes it" in notes[1]
