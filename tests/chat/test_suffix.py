"""The suffix rule over the template families: what follows a turn, without rendering the conversation again."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from grpo_async.chat import ChatError, ChatRenderer
from grpo_async.chat.template import ChatTemplate
from tests.chat.helpers import TOOLS, assistant, call, rendered, renderer_of, tokens, user
from tests.support.chat_families import family, template_source

PRESERVING = ("qwen2_5", "llama3", "mistral", "mistral_args")


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("qwen2_5", '<tool_call>\n{"name": "search", "arguments": {"query": "', '"}}\n</tool_call><|im_end|>'),
        ("llama3", '{"name": "search", "parameters": {"query": "', '"}}<|eom_id|>'),
        ("gpt_oss", '<|channel|>commentary to=functions.search json<|message|>{"query": "', '"}<|call|>'),
        ("mistral_args", '[TOOL_CALLS]search[ARGS]{"query": "', '"}</s>'),
    ],
)
def test_sampled_tokens_are_never_tokenized_again(name: str, before: str, after: str) -> None:
    """R4.5: "he" + "llo", sampled as two tokens, are read as "hello" and stay two tokens in the next prompt."""
    renderer = renderer_of(name)
    spelled = tokens(name, "he") + tokens(name, "llo")
    sampled = tokens(name, before) + spelled + tokens(name, after)
    assert len(spelled) == 2
    assert tokens(name, before + "hello" + after) != sampled  # what tokenizing again would give
    prompt = renderer.prompt_ids([user("what is the answer?")], tools=TOOLS)
    turn = renderer.parse(sampled, turn=0)
    assert [(made.name, dict(made.arguments)) for made in turn.tool_calls] == [("search", {"query": "hello"})]
    suffix = renderer.suffix_ids(turn.tool_calls, [turn.tool_calls[0].result_message("42")])
    following = prompt + sampled + suffix
    assert following[len(prompt) : len(prompt) + len(sampled)] == sampled
    assert "42" in family(name).decode(suffix)
    assert "hello" not in family(name).decode(suffix)  # nothing of the turn itself


@pytest.mark.parametrize("name", PRESERVING)
def test_five_turns_by_suffixes_equal_one_rendering_of_all(name: str) -> None:
    """R4.6: with a template that keeps earlier turns, prompt + outputs + suffixes = the whole conversation rendered at once."""
    renderer = renderer_of(name)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what is the weather in Paris?"}]
    ids = renderer.prompt_ids([user(messages[0]["content"])], tools=TOOLS)
    for turn in range(5):
        made = call("search", turn=turn)
        before = rendered(name, messages, generation=True, tools=TOOLS)
        messages.append(assistant("", [made]))
        after = rendered(name, messages, generation=False, tools=TOOLS)
        assert after.startswith(before)
        ids += tokens(name, after[len(before) :].rstrip("\n"))  # as a policy samples it: up to the end-of-turn token
        answer = made.result_message(f"hello {turn} degrees")
        messages.append(answer.as_dict())
        ids += renderer.suffix_ids([made], [answer])
    assert ids == tokens(name, rendered(name, messages, generation=True, tools=TOOLS))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "qwen3",  # results of one turn share a block
            "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "llama3",  # the template refuses two calls in one message
            '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|>'
            '<|start_header_id|>ipython<|end_header_id|>\n\n"4"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
        ),
        (
            "gpt_oss",  # the template takes the first call of a message only
            '<|start|>functions.search to=assistant<|channel|>commentary<|message|>"3"<|end|>'
            '<|start|>functions.calculate to=assistant<|channel|>commentary<|message|>"4"<|end|><|start|>assistant',
        ),
        (
            "mistral",  # each result names the id of its call
            '[TOOL_RESULTS] {"content": 3, "call_id": "c00070000"}[/TOOL_RESULTS]'
            '[TOOL_RESULTS] {"content": 4, "call_id": "c00070001"}[/TOOL_RESULTS]',
        ),
        (
            "deepseek",  # results are closed once, after the last
            "<|outputs_begin|><|output_begin|>3<|output_end|><|output_begin|>4<|output_end|><|outputs_end|>",
        ),
    ],
)
def test_several_results_of_one_turn(name: str, expected: str) -> None:
    """R1.9: the newline that Qwen3 writes after <|im_end|> was not sampled, so it belongs to the suffix."""
    renderer = renderer_of(name)
    calls = [call("search", 0, turn=7), call("calculate", 1, turn=7)]
    ids = renderer.suffix_ids(calls, [calls[0].result_message("3"), calls[1].result_message("4")])
    assert family(name).decode(ids) == expected


def test_a_turn_may_be_ended_by_the_first_token_of_the_next_message() -> None:
    """GLM: the policy samples <|observation|>, which the template writes before the result."""
    tokenizer = copy.deepcopy(family("chatml"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|observation|>"]})
    template = (
        "{% for m in messages %}"
        "{{ {'user': '<|user|>', 'assistant': '<|assistant|>', 'tool': '<|observation|>'}[m.role] + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + '</tool_call>' }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    renderer = ChatRenderer(tokenizer, chat_template=template, end_of_turn_tokens=["<|user|>", "<|observation|>"])
    made = call()
    assert tokenizer.decode(renderer.suffix_ids([made], [made.result_message("hello")])) == "hello<|assistant|>"


def test_further_messages_may_follow_the_results() -> None:
    made = call()
    suffix = renderer_of("qwen2_5").suffix_ids([made], [made.result_message("1"), user("go on")])
    following = "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    assert family("qwen2_5").decode(suffix).endswith(f"</tool_response><|im_end|>{following}")
    alone = renderer_of("qwen2_5").suffix_ids([], [user("go on")])
    assert family("qwen2_5").decode(alone) == following


def test_the_cost_of_a_suffix_does_not_grow_with_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """R4.5: no history is rendered: 100 turns, and every suffix renders as many characters as the third."""
    renderer = renderer_of("qwen3")
    lengths: list[int] = []
    render = ChatTemplate.render

    def counted(self: ChatTemplate, *args: Any, **kwargs: Any) -> str:
        text = render(self, *args, **kwargs)
        lengths.append(len(text))
        return text

    monkeypatch.setattr(ChatTemplate, "render", counted)
    per_turn = []
    for turn in range(100):
        made = call(turn=turn % 2)  # what another rollout asked before is cached
        lengths.clear()
        renderer.suffix_ids([made], [made.result_message("hello")])
        per_turn.append(list(lengths))
    # the dummy without results comes from the cache
    assert per_turn[2:] == [per_turn[2]] * 98
    assert sum(per_turn[2]) < 400


def test_a_date_in_the_template_may_change_during_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-OSS writes the date into its system message: from midnight on, what was cached the day before is rendered anew."""
    renderer = renderer_of("gpt_oss")
    made = call()
    before = renderer.suffix_ids([made], [made.result_message("hello")])
    render = ChatTemplate.render

    def next_day(self: ChatTemplate, *args: Any, **kwargs: Any) -> str:
        text = render(self, *args, **kwargs)
        return text.replace("Current date: ", "Current date: 9")

    monkeypatch.setattr(ChatTemplate, "render", next_day)
    assert renderer.suffix_ids([made], [made.result_message("hello")]) == before


def test_tokens_that_do_not_line_up_are_an_error_that_says_so() -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + loop.length | string + '<|im_end|>\n' }}"
        "{% endfor %}"
    )
    renderer = renderer_of("chatml", chat_template=template)
    made = call()
    with pytest.raises(
        ChatError, match=r"renders a turn in another way once tool results follow it.*model.chat_template"
    ):
        renderer.suffix_ids([made], [made.result_message("hello")])


def test_results_that_are_rendered_one_by_one_join_without_doubling_what_ends_a_turn() -> None:
    """One newline is between <|im_end|> and each result: the first one follows the policy's token, the second the first."""
    several = "messages | selectattr('tool_calls', 'defined') | map(attribute='tool_calls') | map('length') | max > 1"
    template = f"{{% if {several} %}}{{{{ raise_exception('one call') }}}}{{% endif %}}{template_source('qwen2_5')}"
    calls = [call(number=0), call(number=1)]
    results = [calls[0].result_message("3"), calls[1].result_message("4")]
    ids = renderer_of("qwen2_5", chat_template=template).suffix_ids(calls, results)
    one = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>"
    assert family("qwen2_5").decode(ids) == one.format(3) + one.format(4) + "\n<|im_start|>assistant\n"
