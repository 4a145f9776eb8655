"""The directory of a run, where it is on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_async.sandbox.remove import remove_tree


def test_removing_a_tree_copes_with_depth_locks_links_and_odd_names(deep_path: Path) -> None:
    outside = deep_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    top = deep_path / "top"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    os.symlink(outside, "link", dir_fd=here)
    os.mkdir(b"\xff odd\n", dir_fd=here)
    os.mkdir("locked", dir_fd=here)
    (top / "locked" / "file").touch()
    (top / "locked").chmod(0)
    for depth in range(1100):  # deeper than the longest path and than a recursion goes
        os.mkdir("deep", dir_fd=here)
        below = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.symlink("/", "root", dir_fd=below)
        if depth % 500 == 499:
            os.fchmod(here, 0)
        os.close(here)
        here = below
    os.close(here)
    remove_tree(str(top))
    assert not top.exists()
    assert (outside / "kept").exists()


def test_a_link_in_place_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "kept").touch()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="link"):
        remove_tree(str(tmp_path / "link"))
    assert (tmp_path / "real" / "kept").exists()
