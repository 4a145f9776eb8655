"""The system call filter: what no run needs and an attacker would like. A denied call fails with "operation not permitted".

Always: sockets (`socketpair` works), namespaces and mounts, looking into other processes, kernel modules and the like,
io_uring (it would go round this filter), and memory that no limit counts (memfd, System V, message queues).
Without namespaces also what they would have made harmless: new processes, signals to others, changes to others' files.
"""

from __future__ import annotations

import ctypes
import os
import struct

from grpo_async.sandbox.inside.kernel import PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, prctl

_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER_AT, _MACHINE_AT, _ARGUMENT_AT = 0, 4, 16
_UNIX = 1
_NEW_NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEW*: net, pid, user, ipc, uts, cgroup, mount
_THREAD = 0x00010000
_X32 = 0x40000000  # on x86-64: the numbers of a second, forgotten ABI
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# name: (x86-64, ARM64); None = the machine does not have it.
_Numbers = dict[str, tuple[int | None, int | None]]
_DENIED: _Numbers = {
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "syslog": (103, 116),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "quotactl": (179, 60),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
}
_DENIED_WITHOUT_NAMESPACES: _Numbers = {
    "fork": (57, None),
    "vfork": (58, None),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "process_madvise": (440, 440),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),  # also of a file that is open for reading, such as the interpreter's
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
_SOCKETPAIR, _CLONE, _CLONE3, _PRCTL = (53, 199), (56, 220), (435, 435), (157, 167)
_KILL, _TGKILL, _PRLIMIT = (62, 129), (234, 131), (302, 261)


def install(*, with_namespaces: bool, with_threads: bool) -> None:
    """Filter the system calls of this process and of what it starts. OSError if refused."""
    machine = os.uname().machine
    if machine not in _AUDIT:
        raise OSError(f"the system call numbers of {machine} are not known")
    program = _program(machine, with_namespaces=with_namespaces, with_threads=with_threads)
    prctl("no_new_privs", PR_SET_NO_NEW_PRIVS, 1)
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))  # struct sock_fprog
    prctl("seccomp", PR_SET_SECCOMP, 2, ctypes.create_string_buffer(head, len(head)), 0, 0)


def _program(machine: str, *, with_namespaces: bool, with_threads: bool) -> bytes:
    column = 0 if machine == "x86_64" else 1
    lines = [_line(_LOAD, _MACHINE_AT), _line(_EQUAL, _AUDIT[machine], 1, 0), _fail(_EPERM)]
    lines.append(_line(_LOAD, _NUMBER_AT))
    if machine == "x86_64":
        lines += [_line(_AT_LEAST, _X32, 0, 1), _fail(_EPERM)]
    denied = _DENIED if with_namespaces else {**_DENIED, **_DENIED_WITHOUT_NAMESPACES}
    for numbers in denied.values():
        number = numbers[column]
        if number is not None:
            lines += [_line(_EQUAL, number, 0, 1), _fail(_EPERM)]
    lines += [_line(_EQUAL, _CLONE3[column], 0, 1), _fail(_ENOSYS)]  # its flags are out of reach; libc then uses clone
    lines += _if_argument(_SOCKETPAIR[column], [_line(_EQUAL, _UNIX, 1, 0), _fail(_EPERM)])
    limits = [_line(_EQUAL, 0, 1, 0), _fail(_EPERM)]  # 0: of itself; init may run as the same user
    if with_namespaces:
        lines += _if_argument(_CLONE[column], [_line(_ANY_BIT, _NEW_NAMESPACE_FLAGS, 0, 1), _fail(_EPERM)])
    else:
        clone = [_line(_ANY_BIT, _THREAD, 1, 0), _fail(_EPERM)] if with_threads else [_fail(_EPERM)]
        lines += _if_argument(_CLONE[column], clone)
        own = os.getpid()
        for numbers in (_KILL, _TGKILL):
            lines += _if_argument(numbers[column], [_line(_EQUAL, own, 1, 0), _fail(_EPERM)])
        # The parent-death signal is what ends this process with its owner.
        lines += _if_argument(_PRCTL[column], [_line(_EQUAL, 1, 0, 1), _fail(_EPERM)])
    lines += _if_argument(_PRLIMIT[column], limits)
    lines.append(_line(_RETURN, _ALLOW))
    return b"".join(lines)


def _if_argument(number: int, checks: list[bytes]) -> list[bytes]:
    """Run `checks` on the low half of the first argument of one system call, then allow it."""
    inside = [_line(_LOAD, _ARGUMENT_AT), *checks, _line(_RETURN, _ALLOW)]
    return [_line(_EQUAL, number, 0, len(inside)), *inside]


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _fail(number: int) -> bytes:
    return _line(_RETURN, _FAIL | number)
