"""A folder that takes the place of another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_async.utils.files import put_in_place


def _folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


def test_whenever_it_ends_one_of_the_two_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, aside = _folder(tmp_path / "folder", "old"), tmp_path / "aside"
    made = _folder(tmp_path / "made", "new")
    replace = os.replace

    def killed_at_the_second(source: Path, target: Path) -> None:
        if source == made:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            put_in_place(made, folder, aside=aside)
    assert (aside / "file").read_text() == "old"
    put_in_place(made, folder, aside=aside)
    assert (folder / "file").read_text() == "new"
    _folder(aside, "of a call that was killed at the end")
    put_in_place(_folder(made, "newest"), folder, aside=aside)
    assert (folder / "file").read_text() == "newest"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
