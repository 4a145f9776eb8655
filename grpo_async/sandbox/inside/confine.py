"""The last steps before the code runs: limits, and no way back to privileges."""

from __future__ import annotations

import ctypes
import os
import resource

from grpo_async.sandbox.inside.kernel import PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, prctl, syscall

TYPE_CHECKING = False  # see `launcher`
if TYPE_CHECKING:
    from typing import Any

_MIB = 1 << 20
_MAX_OPEN_FILES = 256
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION = 0x20080522


def set_limits(limits: dict[str, Any], *, extra_processes: int) -> list[str]:
    """Apply the resource limits to this process; what it starts inherits them.

    Args:
        limits: the fields of SandboxLimits.
        extra_processes: processes of ours that the kernel counts with those of the code.

    Returns:
        Names of limits that this system does not have.
    """
    cpu_s = max(1, round(limits["cpu_s"]))
    wanted = {
        "RLIMIT_CPU": (cpu_s, cpu_s + 1),  # SIGXCPU, and a second later SIGKILL
        "RLIMIT_AS": limits["memory_mb"] * _MIB,
        "RLIMIT_FSIZE": limits["file_mb"] * _MIB,
        "RLIMIT_NPROC": limits["max_processes"] + extra_processes,
        "RLIMIT_NOFILE": _MAX_OPEN_FILES,
        "RLIMIT_CORE": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_MEMLOCK": 0,
    }
    missing = []
    for name, value in wanted.items():
        soft, hard = value if isinstance(value, tuple) else (value, value)
        try:
            kind = getattr(resource, name)
            present = resource.getrlimit(kind)[1]
            if present != resource.RLIM_INFINITY:  # the owner's own limits may be lower
                soft, hard = min(soft, present), min(hard, present)
            resource.setrlimit(kind, (soft, hard))
        except (AttributeError, OSError, ValueError):  # ValueError: macOS refuses RLIMIT_AS
            missing.append(name)
    return missing


def drop_privileges() -> None:
    """Give up every capability for good; a set-user-id program gives none back."""
    prctl("no_new_privs", PR_SET_NO_NEW_PRIVS, 1)
    if os.geteuid() == 0:
        for capability in range(64):
            try:
                prctl("drop capability", PR_CAPBSET_DROP, capability)
            except OSError:
                break  # past the last one that this kernel knows
    number = _CAPSET.get(os.uname().machine)
    if number is not None:
        head = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
        syscall("capset", number, head, (ctypes.c_uint32 * 6)())
