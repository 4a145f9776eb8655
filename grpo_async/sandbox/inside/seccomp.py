"""The system call filter: a list of what Python programs need. All other calls fail with "operation not permitted",
and calls newer than this list with "no such call", for which libraries have fallbacks. Not on the list: sockets,
new processes and threads, signals to others, changes to files that Landlock does not cover, namespaces, io_uring,
and memory or disk that no limit counts."""

from __future__ import annotations

import ctypes
import os
import struct

from grpo_async.utils.kernel import PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, prctl

_EPERM, _ENOSYS, _EOPNOTSUPP = 1, 38, 95
_LOAD, _EQUAL, _AT_LEAST, _RETURN, _AND = 0x20, 0x15, 0x35, 0x06, 0x54
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER_AT, _MACHINE_AT, _ARGUMENT_AT, _SECOND_AT = 0, 4, 16, 24
_UNIX, _STREAM, _TYPE_MASK, _WHOLE = 1, 1, 0xF, 0xFFFFFFFF
_X32 = 0x40000000  # on x86-64: bit of the numbers of the x32 ABI
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_NEWEST = 462  # the newest call considered for this list
# In each table: name, number on x86-64, number on ARM64; "-" = the machine does not have it.
_READING_AND_WRITING = """
    read 0 63                 write 1 64                readv 19 65               writev 20 66
    pread64 17 67             pwrite64 18 68            preadv 295 69             pwritev 296 70
    preadv2 327 286           pwritev2 328 287          lseek 8 62                close 3 57
    close_range 436 436       dup 32 23                 dup2 33 -                 dup3 292 24
    fcntl 72 25               flock 73 32               ioctl 16 29               fsync 74 82
    fdatasync 75 83           sync_file_range 277 84    ftruncate 77 46
    fadvise64 221 223         readahead 187 213         sendfile 40 71            splice 275 76
    tee 276 77                copy_file_range 326 285   pipe 22 -                 pipe2 293 59
    poll 7 -                  ppoll 271 73              select 23 -               pselect6 270 72
    eventfd 284 -             eventfd2 290 19           epoll_create 213 -        epoll_create1 291 20
    epoll_ctl 233 21          epoll_wait 232 -          epoll_pwait 281 22        epoll_pwait2 441 441
    timerfd_create 283 85     timerfd_settime 286 86    timerfd_gettime 287 87    signalfd 282 -
    signalfd4 289 74          sendto 44 206             recvfrom 45 207           sendmsg 46 211
    recvmsg 47 212            sendmmsg 307 269          recvmmsg 299 243          shutdown 48 210
    getsockname 51 204        getpeername 52 205        getsockopt 55 209         setsockopt 54 208
"""
_FILES = """
    open 2 -             openat 257 56        openat2 437 437      creat 85 -           stat 4 -
    lstat 6 -            fstat 5 80           newfstatat 262 79    statx 332 291        access 21 -
    faccessat 269 48     faccessat2 439 439   getdents 78 -        getdents64 217 61    getcwd 79 17
    chdir 80 49          fchdir 81 50         mkdir 83 -           mkdirat 258 34       rmdir 84 -
    unlink 87 -          unlinkat 263 35      rename 82 -          renameat 264 38      renameat2 316 276
    link 86 -            linkat 265 37        symlink 88 -         symlinkat 266 36     readlink 89 -
    readlinkat 267 78    mknod 133 -          mknodat 259 33       umask 95 166         statfs 137 43
    fstatfs 138 44       getxattr 191 8       lgetxattr 192 9      fgetxattr 193 10     listxattr 194 11
    llistxattr 195 12    flistxattr 196 13
"""
_MEMORY = """
    mmap 9 222              munmap 11 215           mprotect 10 226         mremap 25 216
    brk 12 214              madvise 28 233          mincore 27 232          msync 26 227
    mseal 462 462           pkey_alloc 330 289      pkey_free 331 290       pkey_mprotect 329 288
    get_mempolicy 239 236   membarrier 324 283
"""
_ITSELF = """
    execve 59 221                    exit 60 93                       exit_group 231 94
    wait4 61 260                     waitid 247 95                    getpid 39 172
    gettid 186 178                   getppid 110 173                  getpgid 121 155
    getpgrp 111 -                    getsid 124 156                   getuid 102 174
    geteuid 107 175                  getgid 104 176                   getegid 108 177
    getgroups 115 158                getresuid 118 148                getresgid 120 150
    capget 125 90                    getrlimit 97 163                 setrlimit 160 164
    getrusage 98 165                 getpriority 140 141              times 100 153
    uname 63 160                     sysinfo 99 179                   arch_prctl 158 -
    set_tid_address 218 96           set_robust_list 273 99           get_robust_list 274 100
    rseq 334 293                     futex 202 98                     futex_waitv 449 449
    futex_wake 454 454               futex_wait 455 455               futex_requeue 456 456
    restart_syscall 219 128          getrandom 318 278                getcpu 309 168
    sched_yield 24 124               sched_getaffinity 204 123        sched_getparam 143 121
    sched_getscheduler 145 120       sched_getattr 315 275            sched_get_priority_max 146 125
    sched_get_priority_min 147 126   sched_rr_get_interval 148 127    ioprio_get 252 31
"""
_TIME_AND_SIGNALS = """
    time 201 -                 gettimeofday 96 169        clock_gettime 228 113      clock_getres 229 114
    clock_nanosleep 230 115    nanosleep 35 101           alarm 37 -                 pause 34 -
    getitimer 36 102           setitimer 38 103           timer_create 222 107       timer_settime 223 110
    timer_gettime 224 108      timer_getoverrun 225 109   timer_delete 226 111       rt_sigaction 13 134
    rt_sigprocmask 14 135      rt_sigreturn 15 139        rt_sigpending 127 136      rt_sigsuspend 130 133
    rt_sigtimedwait 128 137    sigaltstack 131 132
"""
_SOCKETPAIR, _PRCTL, _KILL, _TGKILL = (53, 199), (157, 167), (62, 129), (234, 131)
_PRLIMIT, _FALLOCATE = (302, 261), (285, 47)
_PR_SET_PDEATHSIG = 1


def install() -> None:
    """Filter the system calls of this process. OSError if the kernel refuses."""
    machine = os.uname().machine
    if machine not in _AUDIT:
        raise OSError(f"the system call numbers of {machine} are not known")
    program = _program(machine)
    prctl("no_new_privs", PR_SET_NO_NEW_PRIVS, 1)
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))  # struct sock_fprog
    prctl("seccomp", PR_SET_SECCOMP, 2, ctypes.create_string_buffer(head, len(head)), 0, 0)


def _program(machine: str) -> bytes:
    column = 0 if machine == "x86_64" else 1
    lines = [_line(_LOAD, _MACHINE_AT), _line(_EQUAL, _AUDIT[machine], 1, 0), _fail(_EPERM)]
    lines.append(_line(_LOAD, _NUMBER_AT))
    if machine == "x86_64":
        lines += [_line(_AT_LEAST, _X32, 0, 1), _fail(_EPERM)]
    lines += [_line(_AT_LEAST, _NEWEST + 1, 0, 1), _fail(_ENOSYS)]
    words = "".join([_READING_AND_WRITING, _FILES, _MEMORY, _ITSELF, _TIME_AND_SIGNALS]).split()
    for number in words[1 + column :: 3]:
        if number != "-":
            lines += [_line(_EQUAL, int(number), 0, 1), _line(_RETURN, _ALLOW)]
    # A pair of datagram sockets (SOCK_RAW makes them too) sends to every path and name of a Unix socket.
    lines += _allow_if(_SOCKETPAIR[column], (_ARGUMENT_AT, _WHOLE, _UNIX), (_SECOND_AT, _TYPE_MASK, _STREAM))
    for call, value in ((_KILL, os.getpid()), (_TGKILL, os.getpid()), (_PRLIMIT, 0)):  # 0: the process itself
        lines += _allow_if(call[column], (_ARGUMENT_AT, _WHOLE, value))
    # The parent-death signal ends this process with its owner.
    forbidden = [
        _line(_LOAD, _ARGUMENT_AT),
        _line(_EQUAL, _PR_SET_PDEATHSIG, 1, 0),
        _line(_RETURN, _ALLOW),
        _fail(_EPERM),
    ]
    lines += [_line(_EQUAL, _PRCTL[column], 0, len(forbidden)), *forbidden]
    lines += [_line(_EQUAL, _FALLOCATE[column], 0, 1), _fail(_EOPNOTSUPP)]  # libc then writes
    lines.append(_fail(_EPERM))
    return b"".join(lines)


def _allow_if(number: int, *conditions: tuple[int, int, int]) -> list[bytes]:
    """Allow one system call if each argument has its value: (offset, mask of its low half, value)."""
    inside = []
    for left, (offset, mask, value) in zip(range(len(conditions) - 1, -1, -1), conditions, strict=True):
        inside += [_line(_LOAD, offset), _line(_AND, mask), _line(_EQUAL, value, 0, 3 * left + 1)]
    inside += [_line(_RETURN, _ALLOW), _fail(_EPERM)]
    return [_line(_EQUAL, number, 0, len(inside)), *inside]


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _fail(number: int) -> bytes:
    return _line(_RETURN, _FAIL | number)
