"""The file system that the code sees: system libraries and the interpreter, read-only; a few devices; its own /proc; and
one directory in memory that ends with the sandbox, so that the owner never touches what the code left behind.

    /usr /lib ... INTERPRETER   from outside, read-only
    /dev/{null,zero,full,random,urandom}, /proc (its own processes only)
    /sandbox/work (the working directory), /sandbox/tmp = /tmp, /sandbox/shm = /dev/shm     one tmpfs of limited size
"""

from __future__ import annotations

import contextlib
import os

from grpo_async.sandbox.inside.kernel import (
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
    set_mount_flags,
)

BASE = "/sandbox"
MAX_FILES = 4096
"""Files and directories in the sandbox's directory; each costs the kernel about 1 KiB beside its content."""

_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}


def build(read_paths: list[str], mount_point: str, directory_mb: int) -> None:
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
    for device in _DEVICES:
        _bind(f"/old/dev/{device}", f"/dev/{device}", MS_RDONLY | MS_NOSUID | MS_NOEXEC)
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
    """A container may forbid it; then /proc is empty."""
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
