"""Main function of the child process: reads a plan (marshal), builds the wall it names, runs the code, and reports
lines: `started`, `ended STATUS CPU_S`, `written` if the code was killed for that, or `problem MECHANISM TEXT`.

When the code has ended, on SIGTERM, and when the owner dies, everything below the launcher is killed; it adopts
orphans (PR_SET_CHILD_SUBREAPER), so none escapes, whatever session it is in. (On systems other than Linux, daemons
are not found.)
"""

from __future__ import annotations

import contextlib
import ctypes
import marshal
import os
import resource
import signal
import sys
from collections.abc import Callable

# Import everything now: once restricted, there is nothing to import from.
from grpo_async.sandbox.inside import LANDLOCK, SECCOMP, landlock, seccomp
from grpo_async.utils.kernel import (
    PR_CAPBSET_DROP,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    prctl,
    syscall,
)

TYPE_CHECKING = False  # importing `typing` would be a fifth of the launcher's start
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Plan = dict[str, Any]

_IS_LINUX = sys.platform == "linux"
_OWNER_MARGIN_S = 30.0  # the owner ends a run that takes too long; after this margin the launcher does it
_AWAITED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGALRM}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION = 0x20080522
_WATCH_INTERVAL_S = 0.05


def main(plan_descriptor: int, report_descriptor: int) -> NoReturn:
    """Run one plan."""
    report = _Report(report_descriptor)
    with report.problems("start"), open(plan_descriptor, "rb") as file:
        plan: Plan = marshal.loads(file.read())
        _raise_oom_score()
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        # The owner may ignore these signals, and that is inherited.
        for number in (*_AWAITED, signal.SIGXCPU, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        if _IS_LINUX:
            prctl("parent-death signal", PR_SET_PDEATHSIG, signal.SIGTERM)  # its descendants must die, too
            prctl("child subreaper", PR_SET_CHILD_SUBREAPER, 1)
        if os.getppid() != plan["owner"]:  # it ended while this process was starting
            os._exit(1)
    child = _fork(report, lambda: _code(plan, report))
    _release_streams(plan)
    status, cpu_s, has_written_too_much = _wait_or_kill(child, plan)
    if _IS_LINUX:
        _kill_the_rest()
    report.line("written" if has_written_too_much else f"ended {status} {cpu_s:.3f}")
    os._exit(0)


def _code(plan: Plan, report: _Report) -> None:
    """Build the wall and become the code by exec."""
    mechanisms, base = plan["mechanisms"], plan["base"]
    with report.problems("start"):
        os.setpgid(0, 0)  # its signals to its own group do not reach the launcher; the owner finds it by its session
        if _IS_LINUX:
            prctl("parent-death signal", PR_SET_PDEATHSIG, signal.SIGKILL)
        if plan["is_confined"]:
            _write_files(plan["files"], base)
            os.chdir(f"{base}/work")
            os.umask(0o077)
            if _IS_LINUX:
                _drop_privileges()
        _set_limits(plan["resources"])
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if LANDLOCK in mechanisms:
        with report.problems(LANDLOCK):
            landlock.restrict(plan["read_paths"], base)
    if SECCOMP in mechanisms:
        with report.problems(SECCOMP):
            seccomp.install()
    with report.problems("start"):
        for descriptor in plan["keep_descriptors"]:
            os.set_inheritable(descriptor, True)
        report.line("started")
        os.execvpe(plan["command"][0], plan["command"], plan["environment"])


def _write_files(files: dict[str, bytes], base: str) -> None:
    for directory in (f"{base}/work", f"{base}/tmp"):
        os.mkdir(directory, 0o700)
    for name, content in files.items():
        path = f"{base}/work/{name}"
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)


def _set_limits(wanted: dict[str, tuple[int, int]]) -> None:
    """Apply the soft and hard resource limits to this process."""
    for name, (soft, hard) in wanted.items():
        if not _IS_LINUX and not hasattr(resource, name):
            continue
        kind = getattr(resource, name)
        present = resource.getrlimit(kind)[1]
        if present != resource.RLIM_INFINITY:  # the owner's own limits may be lower
            soft, hard = min(soft, present), min(hard, present)
        try:
            resource.setrlimit(kind, (soft, hard))
        except ValueError:
            if _IS_LINUX:  # macOS refuses RLIMIT_AS
                raise


def _drop_privileges() -> None:
    """Give up every capability for good; a set-user-id program cannot restore any."""
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


def _reap(child: int) -> tuple[int, float] | None:
    """Reap ended processes, orphans too; returns the status and CPU seconds of the child, once it has ended."""
    while True:
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        if pid == child:
            return status, usage.ru_utime + usage.ru_stime
        if pid == 0:
            return None


def _fork(report: _Report, run: Callable[[], None]) -> int:
    with report.problems("start"):
        pid = os.fork()
    if pid == 0:
        with report.problems("start"):
            run()
            os._exit(0)
    return pid


def _wait_or_kill(child: int, plan: Plan) -> tuple[int, float, bool]:
    """Wait for the child; kill it on SIGTERM, if the owner does not send that in time, and if it writes too much. Returns its
    status, its CPU seconds, and whether it has written too much."""
    signal.setitimer(signal.ITIMER_REAL, plan["timeout_s"] + _OWNER_MARGIN_S)
    is_watched, has_written_too_much = _IS_LINUX and plan["written_mb"] is not None, False
    while (ended := _reap(child)) is None:
        if is_watched:
            has_written_too_much = has_written_too_much or _written(child) > plan["written_mb"] << 20
            found = signal.sigtimedwait(_AWAITED, _WATCH_INTERVAL_S)
            number = found.si_signo if found else signal.SIGCHLD
        else:
            number = signal.sigwait(_AWAITED)  # ends at the latest by the timer above
        if number != signal.SIGCHLD or has_written_too_much:
            for end in (os.killpg, os.kill):  # the child may not have its process group yet
                with contextlib.suppress(OSError):
                    end(child, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)  # the rest of its process group
    return *ended, has_written_too_much


def _written(pid: int) -> int:
    """Bytes that a process has written: by calls, or through the memory of mapped files, whichever is more."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            counts = {name: int(count) for name, count in (line.split(": ") for line in file)}
    except OSError:
        return 0  # ended meanwhile
    return max(counts["wchar"], counts["write_bytes"])


def _kill_the_rest() -> None:
    """Kill the children, and the orphans that become children as a result, until there are none."""
    while True:
        for pid in _children():
            with contextlib.suppress(PermissionError):  # a set-user-id program
                os.kill(pid, signal.SIGKILL)  # nobody else reaps it, so the pid is still its own
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
            return int(file.read().rpartition(")")[2].split()[1])  # the process name before it may contain anything
    except OSError:
        return None  # ended meanwhile


def _release_streams(plan: Plan) -> None:
    """Close our copies of the code's streams, so that their other ends see when the code closes them."""
    for descriptor in (0, 1, 2, *plan["keep_descriptors"]):
        os.close(descriptor)


def _raise_oom_score() -> None:
    """Make the kernel kill the sandbox before the trainer when the machine runs out of memory."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


class _Report:
    """Lines to the owner, from the launcher and its fork."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._descriptor = descriptor

    def line(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the owner is gone, and this process will end as well
            os.write(self._descriptor, f"{text}\n".encode(errors="replace"))  # one write of a short line is not torn

    @contextlib.contextmanager
    def problems(self, mechanism: str) -> Any:
        """A context that reports any error inside it and ends this process."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - reported, then the process ends
            problem = (
                (error.strerror or str(error)) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            )
            self.line(f"problem {mechanism} {' '.join(problem.split())[:500]}")
            os._exit(1)
