"""Linux system calls that Python 3.11 does not offer; every failure is an OSError that names the call. Standard library only:
the sandbox's launcher imports this at each start."""

from __future__ import annotations

import ctypes
import os

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 22, 24, 36
PR_SET_NO_NEW_PRIVS = 38

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


def _checked(what: str, result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
