"""Linux system calls that Python 3.11 does not offer; every failure is an OSError that names the call. Standard library only:
the sandbox's launcher imports this at each start."""

from __future__ import annotations

import ctypes
import os

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 4, 22, 24, 36
PR_SET_NO_NEW_PRIVS = 38

# The same on x86-64 and on ARM64, as every call since Linux 5.1.
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def syscall(what: str, number: int, *arguments: object) -> int:
    """Make a raw system call; an OSError names `what`. Integers are passed as 64 bits."""
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _checked(what, int(_libc.syscall(ctypes.c_long(number), *converted)))


def prctl(what: str, option: int, *arguments: object) -> int:
    """Set an option of this process; an OSError names `what`."""
    converted = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    converted += [ctypes.c_ulong(0)] * (4 - len(converted))
    return _checked(what, int(_libc.prctl(option, *converted)))


def unshare(flags: int) -> None:
    _checked("unshare", int(_libc.unshare(flags)))


def set_host_name(name: bytes) -> None:
    _checked("sethostname", int(_libc.sethostname(name, len(name))))


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), options.encode()
    )
    _checked(f"mount of {kind or source} at {target}", int(result))


def set_mount_flags(target: str, flags: int, *, recursive: bool) -> None:
    """Add flags to a mount and, if `recursive`, to all mounts below it (Linux 5.12 and later)."""
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)  # struct mount_attr: set, clear, propagation, user namespace
    size = ctypes.sizeof(attributes)
    at = AT_RECURSIVE if recursive else 0
    syscall(f"mount_setattr {target}", _SYS_MOUNT_SETATTR, AT_FDCWD, target.encode(), at, attributes, size)


def detach(target: str) -> None:
    _checked(f"umount of {target}", int(_libc.umount2(target.encode(), MNT_DETACH)))


def pivot_root(new_root: str, old_root: str) -> None:
    number = _SYS_PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root is not known for {os.uname().machine}")
    syscall("pivot_root", number, new_root.encode(), old_root.encode())


def _checked(what: str, result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
