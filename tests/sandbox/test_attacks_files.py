"""Code that reads, writes or leaves behind what it should not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_async.sandbox import SandboxStatus
from tests.sandbox.support import TRIAL, run


def test_files_and_directories_outside_are_not_read(tmp_path: Path) -> None:
    key = tmp_path / ".ssh" / "id_ed25519"
    key.parent.mkdir()
    key.write_text("private", encoding="utf-8")
    for path in (tmp_path, key.parent):
        path.chmod(0o755)
    paths = [str(key), "/etc/shadow", "/etc/passwd", __file__, os.path.expanduser("~/.bashrc"), "/proc/1/environ"]
    folders = [str(tmp_path), os.getcwd(), "/home", "/var"]
    code = f"{TRIAL}\nimport os\nfor path in {paths}:\n    trial(lambda: open(path).read(1))\n"
    code += f"for path in {folders}:\n    trial(lambda: os.listdir(path))"
    assert "went through" not in run(code).stdout
    assert run("import grpo_async").last_error_line == "ModuleNotFoundError: No module named 'grpo_async'"


def test_nothing_outside_is_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "kept").write_text("whole", encoding="utf-8")
    code = f"""{TRIAL}
import os
kept = {str(tmp_path / "kept")!r}
trial(lambda: open(kept, "w"))
trial(lambda: open(kept + ".new", "x"))
trial(lambda: os.truncate(kept, 0))
trial(lambda: os.remove(kept))
trial(lambda: os.rename(kept, "mine"))
trial(lambda: os.mkdir(kept + ".dir"))
trial(lambda: os.chmod(kept, 0o000))
trial(lambda: os.utime(kept, (0, 0)))
trial(lambda: os.chown(kept, 1, 1))
trial(lambda: os.setxattr(kept, "user.a", b"1"))
"""
    before = os.stat(tmp_path / "kept")
    assert "went through" not in run(code).stdout
    assert os.stat(tmp_path / "kept") == before
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_the_interpreter_and_the_system_are_not_changed() -> None:
    code = f"""{TRIAL}
import os, sys
for path in (os.__file__, sys.executable, "/usr/bin/env"):
    trial(lambda: open(path, "a"))
    trial(lambda: os.chmod(path, 0o777))
    with open(path, "rb") as file:
        trial(lambda: os.fchmod(file.fileno(), 0o777))
trial(lambda: open(os.path.dirname(os.__file__) + "/made.py", "x"))
trial(lambda: open("/usr/made", "x"))
trial(lambda: open("/made", "x"))
"""
    assert "went through" not in run(code).stdout


def test_devices_other_than_the_harmless_ones_are_not_there() -> None:
    code = f"""{TRIAL}
import os
for name in ("null", "zero", "urandom"):
    open("/dev/" + name, "rb").read(1)
open("/dev/null", "w").write("x")
for name in ("mem", "kmsg", "tty", "ptmx", "vda", "sda", "kvm", "fuse"):
    trial(lambda: open("/dev/" + name))
trial(lambda: os.mknod("disk", 0o60666, os.makedev(8, 0)))
"""
    result = run(code)
    assert result.status is SandboxStatus.OK
    assert "went through" not in result.stdout


_LITTER = """
import os
os.symlink("/", "root")
os.symlink({outside!r}, "outside")
os.mkdir("locked")
open("locked/a", "w").close()
os.mkdir("locked/b")
descriptor = os.open("locked", os.O_RDONLY)
try:
    os.fchmod(descriptor, 0)
except OSError:
    pass
os.mkfifo("fifo")
deep = os.getcwd()
for _ in range(3000):  # deeper than the longest path, and than `rm -rf` goes in time
    os.mkdir("deep")
    os.chdir("deep")
print("left")
"""


def test_what_is_left_behind_is_removed_without_following_it(deep_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = deep_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("whole", encoding="utf-8")
    own = deep_path / "tmp"
    own.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(own))
    assert run(_LITTER.format(outside=str(outside))).stdout == "left\n"
    assert list(own.iterdir()) == []
    assert (outside / "kept").read_text(encoding="utf-8") == "whole"


def test_a_hostile_file_given_to_a_run_stays_inside() -> None:
    files: dict[str, str | bytes] = {"sitecustomize.py": "print('hijacked')", "os.py": "print('hijacked')"}
    result = run("print('mine')", files=files)
    assert result.stdout.endswith("mine\n")
