"""Differences by words."""

from __future__ import annotations

import pytest

from grpo_async.viewer.text_diff import Piece, differences

LONG = " ".join(f"w{number}" for number in range(4000))
CASES: list[tuple[str, str, list[Piece]]] = [
    ("a b c", "a x c", [("same", "a "), ("left", "b"), ("right", "x"), ("same", " c")]),
    ("one two three", "1 2 three", [("left", "one two"), ("right", "1 2"), ("same", " three")]),
    ("same", "same", [("same", "same")]),
    ("", "new", [("right", "new")]),
    ("x=1;", "x=12;", [("same", "x="), ("left", "1"), ("right", "12"), ("same", ";")]),
    (f"a {LONG} b", f"c {LONG} d", [("left", f"a {LONG} b"), ("right", f"c {LONG} d")]),  # too long to be compared
]  # fmt: skip


@pytest.mark.parametrize(("left", "right", "pieces"), CASES, ids=lambda value: str(value)[:20])
def test_differences_are_by_words_and_give_both_texts_back(left: str, right: str, pieces: list[Piece]) -> None:
    assert differences(left, right) == pieces
    for side, text in (("left", left), ("right", right)):
        assert "".join(said for kind, said in differences(left, right) if kind in ("same", side)) == text
