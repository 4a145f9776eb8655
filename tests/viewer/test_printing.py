"""What is printed: tables, pages; texts of tokens; and nothing that a terminal would obey."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from grpo_async.errors import RunError
from grpo_async.records import GroupStatus, Origin, RolloutGroup, RolloutSample, ScoredGroup, TaggedMessage, ToolCall
from grpo_async.run_directory import RunDir
from grpo_async.store import GroupRow
from grpo_async.store.table import RolloutTable, Row
from grpo_async.utils.safe_text import visible, visible_line
from grpo_async.viewer.printing import group_page, group_table, rollout_page
from grpo_async.viewer.token_text import TokenTexts, load_token_texts
from tests.store.builders import (
    OpenStore,
    append,
    append_simple,
    build_branched_rollout,
    build_failed_rollout,
    build_group,
    build_rollout,
    build_sample,
    build_tool_rollout,
)
from tests.support.stored import read_groups


def _render(renderable: RenderableType, width: int = 200) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(renderable)
    output = console.file
    assert isinstance(output, StringIO)
    return output.getvalue()


def _summaries(folder: Path) -> list[Row]:
    with RolloutTable(folder) as table:
        return table.group_page(sort="seq")


def _stored(
    folder: Path,
    open_store: OpenStore,
    group: RolloutGroup,
    samples: Sequence[RolloutSample] = (),
    status: GroupStatus = GroupStatus.FILTERED,
    **options: Any,
) -> GroupRow:
    """The group as it is read back from a store of its own."""
    store = open_store(folder)
    append(store, group, samples, status, 3, **options)
    store.flush()
    (row,) = read_groups(folder)
    return row


def test_control_characters_are_shown_not_obeyed() -> None:
    assert visible("a\x1b[31mb\x07\x7f\r\nc\td\x9b") == "a␛[31mb␇␡\nc\td\\x9b"
    for mark in "\u061c\u200e\u200f\u202e\u2066":
        assert visible(f"ab{mark}cd") == f"ab\\u{ord(mark):04x}cd"
    assert visible_line("  a\n\n b\tc  ", 10) == "a b c"
    assert visible_line("abcdef", 4) == "abc…"


def test_markup_and_escapes_of_a_model_reach_no_view(tmp_path: Path, open_store: OpenStore) -> None:
    hostile = "[red]x[/] \x1b]0;title\x07 [bold"
    store = open_store(tmp_path)
    append_simple(store, 0, text=hostile, answer=hostile)
    append(store, build_group(1, [build_failed_rollout("1-\x1b[2J", hostile)]), [], GroupStatus.FAILED, None)
    store.flush()
    rows = list(read_groups(tmp_path))
    pages = [group_table(_summaries(tmp_path), 2, 2), *(group_page(row) for row in rows)]
    pages += [rollout_page(row, rollout) for row in rows for rollout in row.rollouts]
    assert len(pages) == 6
    for page in pages:
        text = _render(page)
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "[red]x[/]" in text


def test_the_group_table_has_a_line_per_group_also_on_a_narrow_terminal(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path)
    append_simple(store, 0, step=12, rewards=(0.0, 0.5), text="a\nlong " + "prompt " * 30)
    append_simple(store, 1, step=None, status=GroupStatus.FILTERED, version=4, truncated=True)
    table = group_table(_summaries(tmp_path), 7, 2)
    lines = _render(table).splitlines()
    assert " ".join(lines[0].split()) == "step group status prompt reward min max length versions trunc"
    assert lines[1].split()[:5] == ["12", "0", "trained", "a", "long"]
    assert lines[1].split()[-6:] == ["0.250", "0.000", "0.500", "3.0", "0", "0%"]
    assert lines[2].split()[:3] == ["-", "1", "filtered"]
    assert lines[2].split()[-2:] == ["4", "100%"]
    assert lines[3].strip() == "2 of 7 matching groups, 2 in the run"
    narrow = _render(table, width=80).splitlines()
    assert len(narrow) == 4  # the prompt is cut, not wrapped
    assert max(map(len, narrow)) <= 80
    assert narrow[1].split()[-6:] == lines[1].split()[-6:]  # the numbers stay


def test_the_group_page_shows_all_rollouts(tmp_path: Path, open_store: OpenStore) -> None:
    good, failed = build_rollout("7-0", text="the answer\nis two"), build_failed_rollout("7-1", "broke")
    group = build_group(7, [good, failed], answer="2")
    row = _stored(tmp_path, open_store, group, [build_sample(7, good, 0.5, 1.5)], GroupStatus.TRAINED)
    text = _render(group_page(row))
    for expected in ("group 7", "step 3", "system: be brief", "user: what is 1 + 1?", "answer = 2", "exact", "format"):
        assert expected in text
    (line,) = [line for line in text.splitlines() if line.startswith("7-0")]
    assert line.split() == ["7-0", "finished", "0.500", "0.500", "-", "1.500", "3", "0", "the", "answer", "is", "two"]
    assert any(line.startswith("7-1") and "broke" in line for line in text.splitlines())


def _byte_tokenizer() -> Tokenizer:
    """Ids are places in the sorted byte alphabet: no merges."""
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


CALL = ToolCall(tool_call_id="abcdefghi", name="add", arguments={"a": 1})


def test_a_page_shows_the_calls_of_messages_the_environments_prompt_and_what_rewards_noted(
    tmp_path: Path, open_store: OpenStore
) -> None:
    rollout = build_tool_rollout("7-0")
    first = replace(
        rollout.turns[0],
        parse_error="no JSON at character 3",
        stop_reason="\nQ:",
        messages=[
            TaggedMessage(role="assistant", content="", origin=Origin.POLICY, tool_calls=[CALL.as_dict()]),
            TaggedMessage(role="tool", content="3", origin=Origin.TOOL, name="add", tool_call_id="abcdefghi"),
        ],
    )
    said = TaggedMessage(role="user", content="count to 3", origin=Origin.ENVIRONMENT)
    rollout = replace(rollout, turns=[first, rollout.turns[1]], prompt_messages=[said])
    group = build_group(7, [rollout])
    scored = ScoredGroup(
        group=group, samples=[], rewards=[1.0], reward_parts=[{"f": 1.0}], extra_columns={"extracted": ["42"]}
    )
    stored = _stored(tmp_path, open_store, group, scored=scored)
    text = _render(rollout_page(stored, stored.rollouts[0]))
    assert "user (environment)\ncount to 3" in text
    assert "what is 1 + 1?" not in text  # the prompt before reset
    assert 'assistant (policy)\ncalls add({"a": 1})' in text
    for part in (
        "reward 1.000  advantage -",
        'add({"a": 1, "b": "{2}"}) failed 0.125 s -> \\ud83d',
        "tool add (tool)\n3",
        "extracted: 42",
        r"stop '\nQ:'",
        "tool calls were not parsed: no JSON at character 3",
    ):
        assert part in text


def test_calls_of_an_agent_stand_as_a_tree_and_each_branch_has_a_page(tmp_path: Path, open_store: OpenStore) -> None:
    row = _stored(tmp_path, open_store, build_group(7, [build_branched_rollout("g7-r0")]))
    with RolloutTable(tmp_path) as table:
        group, branch = table.rollout("g7-r0.b2")
    page = _render(rollout_page(row, row.rollouts[0]))
    tree = page[page.index("calls in all branches") :].splitlines()[1:7]
    assert [line.rstrip() for line in tree] == [
        "  g7-r0 · 1 call · 3 tokens · reward -",
        "    +0.5 s · 0.5 s · 3 tokens · stop · user: what is 1 + 1? → two",
        "    g7-r0.b1 · 1 call · 2 tokens · reward 0.250 · prompt: 3 tokens",
        "      +1.0 s · 0.5 s · 2 tokens · stop · user: ask b1 → one",
        "      g7-r0.b2 · 1 call · 2 tokens · reward - · prompt: 3 tokens",
        "        +2.0 s · 0.5 s · 2 tokens · stop · user: ask b2 → nine",
    ]
    own_page = _render(rollout_page(group, branch))
    assert "rollout g7-r0.b2" in own_page
    assert "ask b2" in own_page
    assert "calls in all branches" not in own_page


def test_token_texts_come_from_the_model_that_the_run_names(tmp_path: Path) -> None:
    tokenizer = _byte_tokenizer()
    (tmp_path / "model ${X}").mkdir()
    tokenizer.save(str(tmp_path / "model ${X}" / "tokenizer.json"))
    run = RunDir(tmp_path / "run")
    run.create(f"model: {{path: '{tmp_path}/model $${{X}}'}}\n")
    texts = load_token_texts(run)
    assert isinstance(texts, TokenTexts)
    # the last: byte 0xC3 alone is no character, so it is as the vocabulary spells it
    for token, text in (("a", "a"), ("Ġ", " "), ("Ã", "Ã")):
        token_id = tokenizer.token_to_id(token)
        assert token_id is not None
        assert texts.of(token_id) == text
    assert texts.of(100_000) == "<no token 100000>"


def test_without_a_tokenizer_there_is_a_sentence_and_a_broken_one_is_an_error(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create(f"model: {{path: '{tmp_path}/gone'}}\n")
    note = load_token_texts(run)
    assert note == f"token texts are left out: no {tmp_path}/gone/tokenizer.json and no {tmp_path}/model/tokenizer.json"
    run.model.mkdir()
    (run.model / "tokenizer.json").write_text("{}")
    with pytest.raises(RunError, match=r"tokenizer\.json is not a tokenizer"):
        load_token_texts(run)
