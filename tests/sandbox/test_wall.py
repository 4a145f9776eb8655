"""What is refused on a machine that lacks a part of the wall, and the system call filter by itself."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest

from grpo_async.errors import ConfigError
from grpo_async.sandbox import Sandbox, problem, startup_notes
from grpo_async.sandbox.inside import seccomp
from grpo_async.sandbox.sandbox import MECHANISMS, attack


def test_what_a_part_of_the_wall_does_not_hold_gets_through_without_it() -> None:
    """The attacks are real."""
    assert attack(frozenset()) == {"landlock", "seccomp"}
    assert attack(frozenset({"seccomp"})) == {"landlock"}
    assert attack(frozenset(MECHANISMS)) == frozenset()


@pytest.fixture
def fresh() -> Iterator[None]:
    problem.cache_clear()
    yield
    problem.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_a_wall_that_cannot_be_set_up_is_refused_with_the_systems_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_async.sandbox.execution.BOOT", _WITHOUT_LANDLOCK)
    with pytest.raises(ConfigError, match="lacks them: landlock: the sandbox cannot start: Function not implemented"):
        Sandbox()


@pytest.mark.usefixtures("fresh")
def test_a_wall_that_a_trial_run_gets_through_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_async.sandbox.sandbox.attack", lambda mechanisms: frozenset({"seccomp"}))
    with pytest.raises(ConfigError, match="lacks them: seccomp: it was set up, and a trial run got through it"):
        startup_notes()


_WITHOUT_LANDLOCK = """
import errno, os, sys
for name, path in (("grpo_async", sys.argv[1]), ("grpo_async.sandbox", sys.argv[1] + "/sandbox")):
    sys.modules[name] = package = type(sys)(name)
    package.__path__ = [path]
from grpo_async.sandbox.inside import landlock
from grpo_async.sandbox.inside.launcher import main
def restrict(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
landlock.restrict = restrict
main(int(sys.argv[2]), int(sys.argv[3]))
"""


def _verdict(program: bytes, machine: int, number: int, argument: int = 0, second: int = 1) -> int:
    """Runs the filter as the kernel does: 0 = allowed, else the errno."""
    data = struct.pack("<IIQQQ", number, machine, 0, argument, second)
    lines, at, value = list(struct.iter_unpack("HBBI", program)), 0, 0
    while True:
        code, if_true, if_false, operand = lines[at]
        at += 1
        if code == 0x06:
            return 0 if operand == 0x7FFF0000 else operand & 0xFFFF
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
        elif code == 0x54:
            value &= operand
        else:
            holds = {0x15: value == operand, 0x35: value >= operand}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_the_filter_allows_what_it_lists_on_either_machine(machine: str, column: int) -> None:
    audit = seccomp._AUDIT[machine]
    program = seccomp._program(machine)

    def verdict(x86: int, arm: int, *arguments: int) -> int:
        return _verdict(program, audit, (x86, arm)[column], *arguments)

    # write, mmap, openat, execve, exit_group, newfstatat
    allowed = [(1, 64), (9, 222), (257, 56), (59, 221), (231, 94), (262, 79)]
    # socket, ptrace, memfd_create, unshare, io_uring_setup, mount_setattr, setxattr, fchmod, clone, clone3
    denied = [
        (41, 198),
        (101, 117),
        (319, 279),
        (272, 97),
        (425, 425),
        (442, 442),
        (188, 5),
        (91, 52),
        (56, 220),
        (435, 435),
    ]
    newer = [(463, 463), (1000, 1000)]  # than the list
    for numbers, expected in ((allowed, 0), (denied, 1), (newer, 38)):
        assert {verdict(*each) for each in numbers} == {expected}
    assert (verdict(53, 199, 1), verdict(53, 199, 2)) == (0, 1)  # socketpair: unix, internet
    kinds = [verdict(53, 199, 1, kind) for kind in (1, 1 | 0x80800, 2, 3, 2 | 0x80000)]
    assert kinds == [0, 0, 1, 1, 1]  # stream, with flags; datagram, raw, datagram with a flag
    assert (verdict(302, 261, 0), verdict(302, 261, 1)) == (0, 1)  # prlimit: of itself, of another
    assert (verdict(62, 129, os.getpid()), verdict(62, 129, 1)) == (0, 1)  # kill: itself, another
    assert (verdict(157, 167, 15), verdict(157, 167, 1)) == (0, 1)  # prctl: its name, the parent-death signal
    assert _verdict(program, 0x40000003, 1) == 1  # 32 bits
    assert (_verdict(program, audit, 0x40000001) == 0) is False  # x32
