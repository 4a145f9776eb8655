"""Main function of the process that starts an agent's command and ends with it all that the command has started.

    python -I -S subreaper.py OWNER MEMORY_MB COMMAND...

The three streams are the command's. On SIGTERM, when its owner dies, and when the command has ended, everything below this process
is killed: it adopts the orphans of its descendants (PR_SET_CHILD_SUBREAPER), so none gets away, whatever session it is in. Then it
ends as the command did: with its exit code, or by the same signal. MEMORY_MB 0: no limit.

Standard library only, and little of it: every rollout starts one. Linux; elsewhere daemons of the command are not found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

CANNOT_START = 126
"""Exit code when the command cannot be started; the reason is on stderr."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_IS_LINUX = sys.platform == "linux"
_AWAITED = {signal.SIGCHLD, signal.SIGTERM}


def main(owner: int, memory_mb: int, command: list[str]) -> NoReturn:
    """Run the command and end as it did."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    for number in _AWAITED:  # the owner may ignore them, and that is inherited
        signal.signal(number, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        _exec_command(command, memory_mb)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # their other ends are to see what the command does with them
        os.dup2(nothing, stream)
    status = _wait(child, owner)
    if _IS_LINUX:
        _kill_the_rest()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    _end_as(status)


def _wait(child: int, owner: int) -> int:
    """The wait status of the child when it has ended; SIGTERM's when the owner says so, or is gone."""
    while os.getppid() == owner:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)  # orphans, too
            if pid == child:
                return status
            if pid == 0:
                break
        if signal.sigwait(_AWAITED) == signal.SIGTERM:
            break
    return int(signal.SIGTERM)


def _kill_the_rest() -> None:
    """Kill the children, and the orphans that become children thereby, until there are none."""
    while True:
        for pid in _children():
            with contextlib.suppress(PermissionError):  # it changed its user
                os.kill(pid, signal.SIGKILL)  # nobody else reaps it, so the number is still its own
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    own = os.getpid()
    try:
        with open(f"/proc/self/task/{own}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent_of(pid) == own]


def _parent_of(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])  # the name before it may hold anything
    except OSError:
        return None  # ended meanwhile


def _exec_command(command: list[str], memory_mb: int) -> NoReturn:
    try:
        os.setpgid(0, 0)  # what it sends to its process group does not reach this process; the session tells its kin
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if memory_mb:
            # not the address space: runtimes such as V8 reserve more of it than they ever use
            resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))
        if _IS_LINUX:
            with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
                file.write("1000")  # when the machine runs out of memory, agents go first and not the trainer
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except (OSError, ValueError) as error:
        os.write(2, f"{command[0]} cannot be started: {error}\n".encode(errors="replace"))
    os._exit(CANNOT_START)


def _end_as(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _prctl(option: int, value: int) -> None:
    if _IS_LINUX and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
