"""What `inspect-rollouts` finds and prints: every page, and nothing that a terminal would obey."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from grpo_async.errors import ConfigError
from grpo_async.records import GroupStatus
from grpo_async.run_directory import RunDir
from grpo_async.store.table import RolloutTable
from grpo_async.utils.safe_text import visible, visible_line
from grpo_async.viewer.printing import group_page, group_table, rollout_page
from grpo_async.viewer.runs import find_evaluation
from tests.store.builders import append, append_simple, build_branched_rollout, build_failed_rollout, build_group
from tests.support.stored import LineStore, read_groups
from tests.viewer.web.serving import tool_rollout


def _render(renderable: RenderableType, width: int = 200) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(renderable)
    output = console.file
    assert isinstance(output, StringIO)
    return output.getvalue()


def test_control_characters_are_shown_not_obeyed() -> None:
    assert visible("a\x1b[31mb\x07\x7f\r\nc\td\x9b") == "a␛[31mb␇␡\nc\td\\x9b"
    for mark in "\u061c\u200e\u200f\u202e\u2066":
        assert visible(f"ab{mark}cd") == f"ab\\u{ord(mark):04x}cd"
    assert visible_line("  a\n\n b\tc  ", 10) == "a b c"
    assert visible_line("abcdef", 4) == "abc…"


def test_markup_and_escapes_of_a_model_reach_no_view(tmp_path: Path) -> None:
    """Groups of rollouts without tools, with one, with branches, and one that failed."""
    hostile = "[red]x[/] \x1b]0;title\x07 [bold"
    with LineStore(tmp_path) as store:
        append_simple(store, 0, text=hostile, answer=hostile)
        append(store, build_group(1, [build_failed_rollout("1-\x1b[2J", hostile)]), [], GroupStatus.FAILED, None)
        append(store, build_group(2, [tool_rollout("2-0", hostile)], text=hostile), [], GroupStatus.FILTERED, 3)
        branched = build_group(3, [build_branched_rollout("3-0")], text=hostile)
        append(store, branched, [], GroupStatus.FILTERED, 3)
    rows = list(read_groups(tmp_path))
    with RolloutTable(tmp_path) as table:
        pages = [group_table(table.group_page(sort="seq"), 4, 4), *(group_page(row) for row in rows)]
    pages += [rollout_page(row, rollout) for row in rows for rollout in row.rollouts]
    assert len(pages) == 10
    for page in pages:
        text = _render(page)
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "[red]x[/]" in text
    assert "3-0.b2 · 1 call · 2 tokens" in text


def test_an_evaluation_is_found_by_its_step_or_as_the_last_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    for name in ("step_5", "step_40", "step_x", "other"):
        (run.evaluations / name).mkdir(parents=True)
    assert find_evaluation(run, "5").rollouts == run.evaluations / "step_5"
    last = find_evaluation(run, "latest")
    assert last.rollouts == run.evaluations / "step_40"
    assert last.config == run.config  # where the tokenizer is named
    with pytest.raises(ConfigError, match=r"--evaluation 6: .* it has: 5, 40"):
        find_evaluation(run, "6")
