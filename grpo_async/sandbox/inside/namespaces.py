"""The launcher's namespaces, the code's user ids in them, and the file system that the code sees.

The code runs as user 1000 of a user namespace, without capabilities. For a root launcher this is another user
outside too, because the kernel does not apply RLIMIT_NPROC to root: ids 0 -> 0 (to read an interpreter under /root while the
private root is built) and 1000 -> an id without an account. For other users it is 1000 -> their own id: they may map nothing else.

It sees system libraries and the interpreter, read-only; a few devices; its own /proc; and one directory in memory that disappears
with the sandbox, so that the owner never handles files that the code left behind.

    /usr /lib ... INTERPRETER   from outside, read-only
    /dev/{null,zero,full,random,urandom}, /proc (its own processes only)
    /sandbox/work (the working directory), /sandbox/tmp = /tmp, /sandbox/shm = /dev/shm     one tmpfs of limited size
"""

from __future__ import annotations

import contextlib
import os

from grpo_async.sandbox.inside import DEVICES
from grpo_async.utils.kernel import (
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    detach,
    mount,
    pivot_root,
    set_host_name,
    set_mount_flags,
    unshare,
)

CODE_ID = 1000
"""User and group id of the code inside."""

_NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEW: mount, cgroup, uts, ipc, user, pid, net."""
_FIRST_FREE_ID = 1 << 30
_NOBODY = 65534

BASE = "/sandbox"
MAX_FILES = 4096
"""Files and directories in the sandbox's directory; each costs the kernel about 1 KiB besides its content."""

_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}


def enter() -> bool:
    """Move this process into its own namespaces; its next child is pid 1 of the new pid namespace. OSError if the
    kernel refuses.

    Returns:
        Whether the code runs under another user id than this process.
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
    """Map several ids. This is only allowed from outside the new namespace, so a helper process stays there and does it."""
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
        os.close(tell)  # also tells the helper that there is nothing to do
        _, status = os.waitpid(helper, 0)
    if status != 0:
        raise OSError("the id map of the user namespace cannot be written")


def _other_id() -> int | None:
    """A user and group id outside that this process may assign: one that no account has; None if its own user
    namespace has no second id."""
    for candidate in (_FIRST_FREE_ID + os.getpid(), _NOBODY):
        if _is_mapped("/proc/self/uid_map", candidate) and _is_mapped("/proc/self/gid_map", candidate):
            return candidate
    return None


def free_user_id() -> int:
    """Like `_other_id`, for a process that takes that id itself."""
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


def build_root(read_paths: list[str], mount_point: str, directory_mb: int) -> None:
    """Replace this process's root; it must be pid 1 of its pid namespace. OSError if the kernel refuses.

    Args:
        read_paths: absolute paths without links in their parents; links themselves are copied.
        mount_point: any directory that exists.
        directory_mb: size of the directory in memory, in MiB.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", mount_point, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=1024,mode=0755")
    os.chdir(mount_point)
    os.mkdir("old")
    pivot_root(".", "old")
    os.chdir("/")
    for path in read_paths:
        _show(path)
    os.mkdir("/dev")
    for device in DEVICES:
        _bind(f"/old{device}", device, MS_RDONLY | MS_NOSUID | MS_NOEXEC)
    os.mkdir("/proc")
    _mount_proc()
    detach("/old")
    os.rmdir("/old")

    os.mkdir(BASE)
    options = f"size={directory_mb}m,nr_inodes={MAX_FILES},mode=0755"
    mount("tmpfs", BASE, "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.mkdir(f"{BASE}/shm")
    os.symlink(f"{BASE}/shm", "/dev/shm")
    for name, target in _LINKS.items():
        os.symlink(target, f"/dev/{name}")
    if not os.path.lexists("/tmp"):  # an interpreter may live below it
        os.symlink(f"{BASE}/tmp", "/tmp")
    set_mount_flags("/", MS_RDONLY, recursive=False)


def _mount_proc() -> None:
    """Mount /proc. A container may forbid it; then /proc is empty."""
    for options in ("hidepid=2,subset=pid", "hidepid=2"):  # the first since Linux 5.8
        with contextlib.suppress(OSError):
            mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
            return


def _show(path: str) -> None:
    source = f"/old{path}"
    if not os.path.lexists(source) or os.path.lexists(path):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
    else:
        _bind(source, path, MS_RDONLY | MS_NOSUID | MS_NODEV)


def _bind(source: str, target: str, flags: int) -> None:
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    mount(source, target, None, MS_BIND | MS_REC)
    set_mount_flags(target, flags, recursive=True)
