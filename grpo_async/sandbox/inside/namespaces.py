"""Namespaces of the launcher, and who the code is in them.

The code runs as user 1000 of a user namespace, with no capability. For a launcher that is root this is another user
outside too, since the kernel does not hold root to RLIMIT_NPROC: ids 0 -> 0 (to read an interpreter under /root while the
private root is built) and 1000 -> an id that nobody has. For others it is 1000 -> themselves: they may map nothing else.
"""

from __future__ import annotations

import os

from grpo_async.sandbox.inside.kernel import set_host_name, unshare

CODE_ID = 1000
"""User and group of the code, inside."""

_NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEW: mount, cgroup, uts, ipc, user, pid, net."""
_FIRST_FREE_ID = 1 << 30
_NOBODY = 65534


def enter() -> bool:
    """Move this process into namespaces of its own; its next child is pid 1 of the new pid namespace. OSError if the
    kernel refuses.

    Returns:
        Whether the code gets another user than this process.
    """
    other = _other_id() if os.geteuid() == 0 else None
    if other is None:
        _map_self()
    else:
        os.setgroups([])  # inherited groups would still open files to the code
        _map_by_helper(f"0 0 1\n{CODE_ID} {other} 1\n")
    set_host_name(b"sandbox")
    return other is not None


def _map_self() -> None:
    user, group = os.geteuid(), os.getegid()
    unshare(_NEW_NAMESPACES)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{CODE_ID} {user} 1\n")
    _write("/proc/self/gid_map", f"{CODE_ID} {group} 1\n")


def _map_by_helper(id_map: str) -> None:
    """More than one id may only be mapped from outside the new namespace: a helper stays there and does it."""
    launcher = os.getpid()
    ready, tell = os.pipe()
    helper = os.fork()
    if helper == 0:
        code = 1
        try:
            os.close(tell)
            if os.read(ready, 1):  # the pipe closes with the launcher
                _write(f"/proc/{launcher}/uid_map", id_map)
                _write(f"/proc/{launcher}/gid_map", id_map)
                code = 0
        finally:
            os._exit(code)
    os.close(ready)
    try:
        unshare(_NEW_NAMESPACES)
        os.write(tell, b"1")
    finally:
        os.close(tell)  # also the helper's sign that there is nothing to do
        _, status = os.waitpid(helper, 0)
    if status != 0:
        raise OSError("the id map of the user namespace cannot be written")


def _other_id() -> int | None:
    """A user and group id outside that this process may hand out: one of its own that no account has; None if its own user
    namespace has no second id."""
    for candidate in (_FIRST_FREE_ID + os.getpid(), _NOBODY):
        if _is_mapped("/proc/self/uid_map", candidate) and _is_mapped("/proc/self/gid_map", candidate):
            return candidate
    return None


def free_user_id() -> int:
    """As `_other_id`, for a process that becomes that user itself."""
    other = _other_id()
    if other is None:
        raise OSError("there is no user id to change to")
    return other


def _is_mapped(path: str, number: int) -> bool:
    with open(path, encoding="ascii") as file:
        ranges = [[int(word) for word in line.split()] for line in file]
    return any(start <= number < start + count for start, _, count in ranges)


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode("ascii"))
    finally:
        os.close(descriptor)
