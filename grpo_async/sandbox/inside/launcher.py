"""Main function of the child process.

Reads a plan (marshal: both ends are the same Python version), sets up the restrictions it names, runs the code, and reports lines:
`note SUBJECT TEXT`, `started`, `ended STATUS CPU_S`, `memory`, or `problem MECHANISM TEXT` if a restriction cannot be set up, or
`problem start TEXT` if anything else fails.
The code never gets the report's descriptor. When the code has ended, on SIGTERM, and when the owner dies, everything below the
launcher is killed. Namespaces ensure that; without them the launcher adopts the orphans of its descendants
(PR_SET_CHILD_SUBREAPER), so none escapes, whatever session it is in. (On systems other than Linux, daemons of the code are not
found.)
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
from grpo_async.sandbox.inside import LANDLOCK, NAMESPACES, SECCOMP, USER, landlock, namespaces, seccomp
from grpo_async.utils.kernel import (
    PR_CAPBSET_DROP,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
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
_MEMORY_INTERVAL_S = 0.05
_PAGE_KB = os.sysconf("SC_PAGE_SIZE") // 1024


def main(plan_descriptor: int, report_descriptor: int) -> NoReturn:
    """Run one plan."""
    report = _Report(report_descriptor)
    with report.problems("start"), open(plan_descriptor, "rb") as file:
        plan: Plan = marshal.loads(file.read())
        _die_with(plan["owner"], signal.SIGKILL)
        _raise_oom_score()
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        # The owner may ignore these signals, and that is inherited.
        for number in (*_AWAITED, signal.SIGXCPU, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
    if NAMESPACES in plan["mechanisms"]:
        with report.problems(NAMESPACES):
            has_other_user = namespaces.enter()
            _die_with(plan["owner"], signal.SIGKILL)  # a change of credentials clears the setting
            if plan["loopback"] is not None:
                from grpo_async.sandbox.inside import loopback  # imported here, because few runs need it

                loopback.listen(plan["loopback"])
        child = _fork(report, lambda: _init(plan, report, has_other_user))
        _release_streams(plan)
        _wait_or_kill(child, plan, os.kill)
    else:
        with report.problems("start"):
            if _IS_LINUX:
                _die_with(plan["owner"], signal.SIGTERM)  # its descendants must die, too
                prctl("child subreaper", PR_SET_CHILD_SUBREAPER, 1)
        child = _fork(report, lambda: _code(plan, report, plan["base"], has_other_user=False))
        _release_streams(plan)
        status, cpu_s = _wait_or_kill(child, plan, os.killpg)
        if _IS_LINUX:
            _kill_the_rest()
        report.line(f"ended {status} {cpu_s:.3f}")
    os._exit(0)


def _init(plan: Plan, report: _Report, has_other_user: bool) -> None:
    """Run pid 1 of the sandbox: when it ends, for whatever reason, the kernel kills all other processes in the sandbox."""
    with report.problems(NAMESPACES):
        prctl("parent-death signal", PR_SET_PDEATHSIG, signal.SIGKILL)
        namespaces.build_root(plan["read_paths"], plan["mount_point"], plan["directory_mb"])
        prctl("dumpable", PR_SET_DUMPABLE, 0)  # the code may not look in here; its own exec undoes it for the code
    child = _fork(report, lambda: _code(plan, report, namespaces.BASE, has_other_user=has_other_user))
    with report.problems("start"):
        _release_streams(plan)
        memory_mb = plan["memory_mb"] if os.path.exists("/proc/self") else None
        if memory_mb is None:
            report.line("note proc /proc cannot be mounted")
        status, cpu_s, is_over = _wait_watching(child, memory_mb=memory_mb)
        report.line("memory" if is_over else f"ended {status} {cpu_s:.3f}")


def _code(plan: Plan, report: _Report, base: str, *, has_other_user: bool) -> None:
    """Set up the restrictions and become the code by exec."""
    mechanisms = plan["mechanisms"]
    in_namespaces = NAMESPACES in mechanisms
    with report.problems("start"):
        os.setpgid(0, 0)  # its signals to its own group do not reach the launcher; the owner finds it by its session
        if _IS_LINUX and not in_namespaces:
            prctl("parent-death signal", PR_SET_PDEATHSIG, signal.SIGKILL)
        user = _prepare(plan, base, has_other_user) if plan["is_confined"] else None
    with report.problems(USER):
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            if not in_namespaces:
                prctl("parent-death signal", PR_SET_PDEATHSIG, signal.SIGKILL)
    with report.problems("start"):
        # Without another user, the kernel counts the launcher and init together with the code.
        extra = 2 if in_namespaces and not has_other_user else 0
        for name in _set_limits(plan["resources"], extra_processes=extra):
            report.line(f"note limits {name}")
        if plan["is_confined"]:
            if _IS_LINUX:
                _drop_privileges()
            os.chdir(f"{base}/work")
            os.umask(0o077)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if LANDLOCK in mechanisms:
        with report.problems(LANDLOCK):
            landlock.restrict(plan["read_paths"], base)
    if SECCOMP in mechanisms:
        with report.problems(SECCOMP):
            # Outside namespaces the kernel counts all processes of the user, and does not limit root at all: only a
            # separate user can be limited to a number of threads.
            with_threads = in_namespaces or user is not None
            seccomp.install(
                with_namespaces=in_namespaces,
                with_threads=with_threads,
                with_sockets=in_namespaces and plan["loopback"] is not None,
            )
    with report.problems(USER if USER in mechanisms else "start"):  # another user may lack access to the interpreter
        for descriptor in plan["keep_descriptors"]:
            os.set_inheritable(descriptor, True)
        report.line("started")
        os.execvpe(plan["command"][0], plan["command"], plan["environment"])


def _prepare(plan: Plan, base: str, has_other_user: bool) -> int | None:
    """Write the files of the run; returns the user id under which the code must run, None = the current one."""
    user = None
    if NAMESPACES in plan["mechanisms"]:
        user = namespaces.CODE_ID if has_other_user else None
    elif USER in plan["mechanisms"]:
        user = namespaces.free_user_id()
    made = [f"{base}/work", f"{base}/tmp"]
    for directory in made:
        os.mkdir(directory, 0o700)
    if os.path.isdir(f"{base}/shm"):
        made.append(f"{base}/shm")
    for name, content in plan["files"].items():
        path = f"{base}/work/{name}"
        directory = f"{base}/work"
        for part in name.split("/")[:-1]:
            directory = f"{directory}/{part}"
            if not os.path.isdir(directory):
                os.mkdir(directory, 0o700)
                made.append(directory)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
        made.append(path)
    if user is not None:
        for path in [*made, *([] if NAMESPACES in plan["mechanisms"] else [base])]:
            os.chown(path, user, user)
    return user


def _set_limits(wanted: dict[str, tuple[int, int]], *, extra_processes: int) -> list[str]:
    """Apply the resource limits to this process; its children inherit them.

    Args:
        wanted: soft and hard limit by name.
        extra_processes: our own processes that the kernel counts together with those of the code.

    Returns:
        Names of limits that this system does not have.
    """
    missing = []
    for name, (soft, hard) in wanted.items():
        if name == "RLIMIT_NPROC":
            soft, hard = soft + extra_processes, hard + extra_processes
        try:
            kind = getattr(resource, name)
            present = resource.getrlimit(kind)[1]
            if present != resource.RLIM_INFINITY:  # the owner's own limits may be lower
                soft, hard = min(soft, present), min(hard, present)
            resource.setrlimit(kind, (soft, hard))
        except (AttributeError, OSError, ValueError):  # ValueError: macOS refuses RLIMIT_AS
            missing.append(name)
    return missing


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


def _wait_watching(child: int, *, memory_mb: int | None) -> tuple[int, float, bool]:
    """Wait until `child` has ended, and watch the total memory of the sandbox's processes; SIGCHLD must be blocked.

    RLIMIT_AS limits each process alone. The sum is checked 20 times per second: what a process tree can allocate in between is
    small compared with the memory of a machine, and exact means (control groups) need rights that containers rarely grant.
    This process is pid 1 and inherits orphans.

    Args:
        child: a child of this process.
        memory_mb: maximum memory of all visible processes together, in MiB; None = do not check.

    Returns:
        Wait status, CPU seconds of the child and its reaped children, and whether the memory was exceeded.
    """
    while (ended := _reap(child)) is None:
        if memory_mb is None:
            signal.sigwait({signal.SIGCHLD})  # ends at the latest when the code is killed after wall_s
        elif signal.sigtimedwait({signal.SIGCHLD}, _MEMORY_INTERVAL_S) is None and _exceeds(memory_mb * 1024):
            return 0, 0.0, True
    return *ended, False


def _reap(child: int) -> tuple[int, float] | None:
    """Reap ended processes, orphans too; returns the status and CPU seconds of the child, once it has ended."""
    while True:
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        if pid == child:
            return status, usage.ru_utime + usage.ru_stime
        if pid == 0:
            return None


def _exceeds(limit_kb: int) -> bool:
    pids = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    if sum(map(_resident_kb, pids)) <= limit_kb:
        return False
    return sum(map(_proportional_kb, pids)) > limit_kb  # a forked child shares pages with its parent


def _resident_kb(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_KB
    except OSError:
        return 0  # ended meanwhile


def _proportional_kb(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1])
    except OSError:
        pass  # it is not readable, or has ended meanwhile
    return _resident_kb(pid)


def _fork(report: _Report, run: Callable[[], None]) -> int:
    with report.problems("start"):
        pid = os.fork()
    if pid == 0:
        with report.problems("start"):
            run()
            os._exit(0)
    return pid


def _wait_or_kill(child: int, plan: Plan, kill: Callable[[int, int], None]) -> tuple[int, float]:
    """Wait for the child; kill it on SIGTERM, or if the owner does not send that in time. Returns its status and CPU seconds."""
    signal.setitimer(signal.ITIMER_REAL, plan["timeout_s"] + _OWNER_MARGIN_S)
    while (ended := _reap(child)) is None:
        if signal.sigwait(_AWAITED) != signal.SIGCHLD:  # ends at the latest by the timer above
            for end in (kill, os.kill):  # the child may not have its process group yet
                with contextlib.suppress(OSError):
                    end(child, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)  # the rest of its process group
    return ended


def _kill_the_rest() -> None:
    """Kill the children, and the orphans that become children as a result, until there are none."""
    while True:
        for pid in _children():
            with contextlib.suppress(PermissionError):  # it runs as another user
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


def _die_with(owner: int, by_signal: int) -> None:
    if _IS_LINUX:
        prctl("parent-death signal", PR_SET_PDEATHSIG, by_signal)
    if os.getppid() != owner:  # the owner ended while this process was starting
        os._exit(1)


def _raise_oom_score() -> None:
    """Make the kernel kill the sandbox before the trainer when the machine runs out of memory."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


class _Report:
    """Lines to the owner, from the launcher and its two forks."""

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
