"""The prompt stream: its order, its ids, what it gives back after a resume."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest

from grpo_async.data.rows import Rows
from grpo_async.data.stream import PromptStream, SourceRows, make_prompt, shuffled_order
from grpo_async.errors import ConfigError
from grpo_async.records import Origin, Prompt, TaggedMessage


def _rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {index}", "answer": index} for index in range(count)]


def _stream(rows: list[dict[str, Any]], **arguments: Any) -> PromptStream:
    return PromptStream([_source(rows)], **arguments)


def _source(rows: list[dict[str, Any]], label: str | None = None, **more: Any) -> SourceRows:
    return SourceRows(rows=Rows(rows, locations=[""] * len(rows)), label=label, **more)


def _take(stream: PromptStream, count: int) -> list[Prompt]:
    return list(islice(iter(stream.next, None), count))


def test_a_text_prompt_becomes_one_user_message_and_stays_text_for_rewards() -> None:
    prompt = make_prompt({"prompt": "1+1", "answer": 2, "level": "x"}, 7, None)
    assert prompt == Prompt(
        prompt_id=7,
        messages=(TaggedMessage(role="user", content="1+1", origin=Origin.PROMPT),),
        columns={"answer": 2, "level": "x"},
        is_conversational=False,
    )


def test_messages_become_tagged_messages_behind_the_system_prompt_with_their_calls_and_names() -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "name": "add", "tool_call_id": "abcdefghi"},
    ]
    prompt = make_prompt({"prompt": messages}, 0, "Be brief.")
    assert prompt.is_conversational
    assert prompt.as_given() == [{"role": "system", "content": "Be brief."}, *messages]
    assert {m.origin for m in prompt.messages} == {Origin.PROMPT}
    assert prompt.messages[2].tool_calls == (call,)
    assert (prompt.messages[3].name, prompt.messages[3].tool_call_id) == ("add", "abcdefghi")


def test_without_shuffling_ids_count_on_over_the_epochs() -> None:
    prompts = _take(_stream(_rows(3), seed=0, shuffle=False), 7)
    assert [p.prompt_id for p in prompts] == [0, 1, 2, 3, 4, 5, 6]
    assert [p.columns["answer"] for p in prompts] == [0, 1, 2, 0, 1, 2, 0]


def test_every_epoch_holds_every_row_once_in_an_order_of_its_own() -> None:
    prompts = _take(_stream(_rows(20), seed=3, shuffle=True), 60)
    epochs = [[p.columns["answer"] for p in prompts[start : start + 20]] for start in (0, 20, 40)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != list(range(20))


def test_the_order_depends_on_the_seed_and_on_nothing_else() -> None:
    assert shuffled_order(50, seed=1, epoch=0) == shuffled_order(50, seed=1, epoch=0)
    assert shuffled_order(50, seed=1, epoch=0) != shuffled_order(50, seed=2, epoch=0)
    # (seed 1, epoch 11) and (seed 11, epoch 1) must not meet, as they would if the two were merely joined or added
    assert shuffled_order(50, seed=1, epoch=11) != shuffled_order(50, seed=11, epoch=1)
    # pinned: a checkpoint made on another machine or Python version must continue in the same order
    assert shuffled_order(8, seed=0, epoch=0) == [5, 7, 2, 4, 0, 6, 3, 1]
    assert shuffled_order(8, seed=0, epoch=1) == [6, 4, 5, 1, 7, 0, 3, 2]


def test_any_prompt_can_be_made_again_without_moving_the_stream() -> None:
    stream = _stream(_rows(5), seed=0, shuffle=True)
    seen = _take(stream, 23)
    again = [stream.prompt(prompt_id) for prompt_id in (22, 0, 11, 4, 5)]
    assert again == [seen[22], seen[0], seen[11], seen[4], seen[5]]
    assert stream.next().prompt_id == 23


@pytest.mark.parametrize(
    "changed",
    [_rows(6), [*_rows(4), {"prompt": "question 4", "answer": 99}], list(reversed(_rows(5)))],
    ids=["a row more", "another answer", "another order"],
)
def test_changed_data_is_refused_after_a_checkpoint(changed: list[dict[str, Any]]) -> None:
    state = _stream(_rows(5), seed=0, shuffle=True).state()
    with pytest.raises(ConfigError, match="the data changed since the checkpoint"):
        _stream(changed, seed=0, shuffle=True, state=state)


def test_a_stream_of_some_prompts_ends_and_says_how_far_it_is() -> None:
    stream = _stream(_rows(4), seed=0, shuffle=True, num_prompts=6)
    seen = []
    while not stream.is_at_end:
        seen.append(stream.next().prompt_id)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert (stream.epoch(0), stream.epoch(2)) == (1.5, 1.0)
    more = _stream(_rows(4), seed=0, shuffle=True, num_prompts=7, state=stream.state())  # epochs were raised
    assert not more.is_at_end
    assert not _stream(_rows(4), seed=0, shuffle=True).is_at_end


def _mixture(state: Any = None, first: str = "a", **arguments: Any) -> PromptStream:
    """5 rows with weight 3 and 4 rows with weight 1."""
    sources = [
        _source(_rows(5), first, weight=3.0, rewards=["exact"], system_prompt="Be brief."),
        _source([{"prompt": f"other {index}", "answer": index} for index in range(4)], "b"),
    ]
    return PromptStream(sources, **{"seed": 0, "shuffle": True, "state": state, **arguments})


def test_a_mixture_keeps_the_shares_at_every_moment_and_goes_through_each_source_in_epochs() -> None:
    prompts = _take(_mixture(), 80)
    labels = "".join(str(prompt.source) for prompt in prompts)
    assert labels[:8] == "aabaaaba"
    for length in range(1, 81):
        assert abs(labels[:length].count("a") - 0.75 * length) < 1
    of_a, of_b = ([p.columns["answer"] for p in prompts if p.source == label] for label in "ab")
    assert all(sorted(of_a[start : start + 5]) == [0, 1, 2, 3, 4] for start in range(0, 60, 5))
    assert all(sorted(of_b[start : start + 4]) == [0, 1, 2, 3] for start in range(0, 20, 4))
    assert of_a[:5] != of_a[5:10]
    assert {(p.source, p.messages[0].content == "Be brief.", p.rewards is None) for p in prompts} == {
        ("a", True, False),
        ("b", False, True),
    }
    assert _take(_mixture(), 80) == prompts
    assert [_mixture(seed=1).prompt(number) for number in range(80)] != prompts


def test_a_mixture_goes_on_where_it_stopped_and_gives_any_prompt_again() -> None:
    whole = _take(_mixture(), 60)
    first = _mixture()
    _take(first, 23)
    resumed = _mixture(json.loads(json.dumps(first.state())))
    assert [resumed.prompt(number) for number in (22, 3, 11)] == [whole[22], whole[3], whole[11]]  # those in flight
    assert _take(resumed, 37) == whole[23:]
    # a file may be moved, and then has another label
    assert [each.columns for each in _take(_mixture(first="moved"), 60)] == [each.columns for each in whole]


def test_a_source_of_weight_0_is_never_drawn() -> None:
    sources = [_source(_rows(3), "a", weight=0.0), _source(_rows(3), "b"), _source(_rows(2), "c", weight=0.1)]
    prompts = _take(PromptStream(sources, seed=0, shuffle=False), 110)
    assert [sum(p.source == label for p in prompts) for label in "abc"] == [0, 100, 10]
