"""What is said of this machine, and what is refused on it."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable

import pytest

from grpo_async.errors import ConfigError
from grpo_async.sandbox import REQUIRED, Sandbox, SandboxError, capabilities, restrictions, startup_notes
from grpo_async.sandbox.inside import seccomp
from grpo_async.sandbox.restrictions import NAMES, ProbeResult

Find = Callable[[frozenset[str]], ProbeResult]
_ALL = frozenset({"cpu", "memory", "file", "connect", "read", "write", "processes", "signal", "totals"})
_NOTHING = ProbeResult(mechanisms=frozenset(), passed=_ALL, refused={"seccomp": "no such call"})


def _has_user_namespaces() -> bool:
    return sys.platform == "linux" and os.system("unshare -rn true 2>/dev/null") == 0


@pytest.mark.skipif(not _has_user_namespaces(), reason="this system refuses user namespaces")
def test_with_user_namespaces_everything_holds(probe_result_of: Find) -> None:
    found = probe_result_of(frozenset())
    assert (found.mechanisms, found.passed) == ({"namespaces", "seccomp"}, frozenset())


@pytest.mark.parametrize(
    ("without", "held"),
    [
        ({"namespaces"}, {"limits", "network", "filesystem", "processes", "signals"}),
        ({"namespaces", "landlock"}, {"limits", "network", "processes", "signals"}),
        ({"namespaces", "landlock", "seccomp", "user"}, {"limits"}),
        ({"seccomp", "landlock", "user"}, set(NAMES)),
    ],
)
def test_each_restriction_that_is_missing_is_stated(
    probe_result_of: Find, monkeypatch: pytest.MonkeyPatch, without: set[str], held: set[str]
) -> None:
    """The attacks are real: what nothing holds goes through, and is said to."""
    found = probe_result_of(frozenset(without))
    for mechanism in ({"namespaces"} if "seccomp" in without and "namespaces" not in without else set()) | (
        {"seccomp"} - without
    ):
        if mechanism not in found.mechanisms:
            pytest.skip(f"this system refuses {mechanism}: {found.refused[mechanism]}")
    monkeypatch.setattr("grpo_async.sandbox.restrictions._probed", found)
    assert {c.name for c in capabilities() if c.is_available} == held
    first, *others = startup_notes(require=())
    assert first.startswith("sandbox enforces: limits (resource limits)")
    assert [line.partition(":")[0] for line in others] == [
        f"sandbox does NOT enforce {name}" for name in NAMES if name not in held
    ]


def test_what_is_missing_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_async.sandbox.restrictions._probed", _NOTHING)
    with pytest.raises(ConfigError) as caught:
        Sandbox()
    message = str(caught.value)
    for name in REQUIRED:
        assert f"\n  {name}: " in message
    assert "tried: seccomp: no such call" in message
    assert "user namespaces" in message
    assert "`require: []`" in message
    Sandbox(require=[])


def test_only_what_is_required_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    partly = ProbeResult(mechanisms=frozenset({"seccomp"}), passed=frozenset({"read"}), refused={})
    monkeypatch.setattr("grpo_async.sandbox.restrictions._probed", partly)
    Sandbox()
    with pytest.raises(ConfigError, match="filesystem: model-written code can read and change"):
        Sandbox(require=["filesystem", "network"])


def test_a_limit_that_only_seems_to_hold_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """RLIMIT_NPROC stops a trial where this user runs many processes just then, and the next run where it does not."""
    seems = ProbeResult(mechanisms=frozenset(), passed=frozenset(), refused={})
    monkeypatch.setattr("grpo_async.sandbox.restrictions._probed", seems)
    assert [c.name for c in capabilities() if not c.is_available] == ["processes"]


def test_a_refused_mechanism_is_replaced_by_the_next_and_its_answer_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[set[str]] = []

    def attack(mechanisms: frozenset[str]) -> frozenset[str]:
        tried.append(set(mechanisms))
        if "namespaces" in mechanisms:
            error = SandboxError("unshare: Operation not permitted")
            error.mechanism = "namespaces"
            raise error
        if "user" in mechanisms:
            raise SandboxError("a trial run gave no result")
        return frozenset()

    monkeypatch.setattr(restrictions, "_attack", attack)
    monkeypatch.setattr(restrictions, "_candidates", lambda: frozenset({"namespaces", "seccomp", "landlock", "user"}))
    found = restrictions.probe_restrictions()
    assert tried == [{"namespaces", "seccomp"}, {"seccomp", "landlock", "user"}, {"seccomp", "landlock"}]
    assert found.refused["namespaces"] == "unshare: Operation not permitted"


def _verdict(program: bytes, machine: int, number: int, argument: int = 0) -> int:
    """Runs the filter as the kernel does: 0 = allowed, else the errno."""
    data = struct.pack("<IIQQ", number, machine, 0, argument)
    lines, at, value = list(struct.iter_unpack("HBBI", program)), 0, 0
    while True:
        code, if_true, if_false, operand = lines[at]
        at += 1
        if code == 0x06:
            return 0 if operand == 0x7FFF0000 else operand & 0xFFFF
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
@pytest.mark.parametrize("with_namespaces", [True, False])
def test_the_filter_allows_what_it_lists_on_either_machine(machine: str, column: int, with_namespaces: bool) -> None:
    audit = seccomp._AUDIT[machine]
    program = seccomp._program(machine, with_namespaces=with_namespaces, with_threads=False)

    def verdict(x86: int, arm: int, argument: int = 0) -> int:
        return _verdict(program, audit, (x86, arm)[column], argument)

    # write, mmap, openat, execve, exit_group, newfstatat
    allowed = [(1, 64), (9, 222), (257, 56), (59, 221), (231, 94), (262, 79)]
    # socket, ptrace, memfd_create, unshare, io_uring_setup, mount_setattr
    denied = [(41, 198), (101, 117), (319, 279), (272, 97), (425, 425), (442, 442)]
    newer = [(435, 435), (463, 463), (1000, 1000)]  # clone3, and what is newer than the list
    for numbers, expected in ((allowed, 0), (denied, 1), (newer, 38)):
        assert {verdict(*each) for each in numbers} == {expected}
    assert (verdict(53, 199, 1), verdict(53, 199, 2)) == (0, 1)  # socketpair: unix, internet
    assert (verdict(302, 261, 0), verdict(302, 261, 1)) == (0, 1)  # prlimit: of itself, of another
    others = [verdict(188, 5), verdict(91, 52), verdict(62, 129, 1), verdict(56, 220, 17)]  # setxattr fchmod kill fork
    assert others == [0 if with_namespaces else 1] * 4
    assert _verdict(program, 0x40000003, 1) == 1  # 32 bits
    assert (_verdict(program, audit, 0x40000001) == 0) is False  # x32
