"""Main function of the child process.

Reads a plan (marshal: both ends are the same interpreter), builds the walls it names, runs the code, and reports lines:
`note MECHANISM TEXT`, `started`, `ended STATUS CPU_S`, `memory`, or `problem MECHANISM TEXT` when a wall cannot be built.
The code never gets the report's descriptor. SIGTERM to the launcher ends the run: it kills what it started and reaps it.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import sys
from collections.abc import Callable

# All of it at once: behind the walls there is nothing to import from.
from grpo_async.sandbox.inside import landlock, namespaces, private_root, seccomp
from grpo_async.sandbox.inside.confine import drop_privileges, set_limits
from grpo_async.sandbox.inside.kernel import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, prctl
from grpo_async.sandbox.inside.watch import wait_for

TYPE_CHECKING = False  # importing `typing` would be a fifth of the launcher's start
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Plan = dict[str, Any]

_IS_LINUX = sys.platform == "linux"
_OWNER_IS_GONE_S = 30.0  # the owner ends a run that takes too long; this much later the launcher does it
_AWAITED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGALRM}


def main(plan_descriptor: int, report_descriptor: int) -> NoReturn:
    """Run one plan."""
    report = _Report(report_descriptor)
    with report.problems("start"), open(plan_descriptor, "rb") as file:
        plan: Plan = marshal.loads(file.read())
        _die_with(plan["owner"])
        _offer_to_the_memory_killer()
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        for number in (*_AWAITED, signal.SIGXCPU):  # the owner may ignore them, and that is inherited
            signal.signal(number, signal.SIG_DFL)
    if "namespaces" in plan["mechanisms"]:
        with report.problems("namespaces"):
            has_other_user = namespaces.enter()
            _die_with(plan["owner"])  # a change of credentials clears it
        child = _fork(report, lambda: _init(plan, report, has_other_user))
        _release_streams(plan)
        _wait_or_kill(child, plan, os.kill)
    else:
        child = _fork(report, lambda: _code(plan, report, plan["base"], has_other_user=False))
        _release_streams(plan)
        status, cpu_s = _wait_or_kill(child, plan, os.killpg)
        report.line(f"ended {status} {cpu_s:.3f}")
    os._exit(0)


def _init(plan: Plan, report: _Report, has_other_user: bool) -> None:
    """Pid 1 of the sandbox: when it ends, for whatever reason, the kernel ends all other processes in it."""
    with report.problems("namespaces"):
        prctl("parent-death signal", PR_SET_PDEATHSIG, signal.SIGKILL)
        private_root.build(plan["read_paths"], plan["mount_point"], plan["limits"]["directory_mb"])
        prctl("dumpable", PR_SET_DUMPABLE, 0)  # the code may not look in here; its own exec undoes it for the code
    child = _fork(report, lambda: _code(plan, report, private_root.BASE, has_other_user=has_other_user))
    with report.problems("start"):
        _release_streams(plan)
        memory_mb = plan["limits"]["memory_mb"] if os.path.exists("/proc/self") else None
        if memory_mb is None:
            report.line("note proc /proc cannot be mounted")
        status, cpu_s, is_over = wait_for(child, memory_mb=memory_mb, reap_others=True)
        report.line("memory" if is_over else f"ended {status} {cpu_s:.3f}")


def _code(plan: Plan, report: _Report, base: str, *, has_other_user: bool) -> None:
    """Become the code."""
    mechanisms = plan["mechanisms"]
    in_namespaces = "namespaces" in mechanisms
    with report.problems("start"):
        os.setsid()
        if _IS_LINUX and not in_namespaces:
            prctl("parent-death signal", PR_SET_PDEATHSIG, signal.SIGKILL)
        user = _prepare(plan, base, has_other_user)
    with report.problems("user"):
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            if not in_namespaces:
                prctl("parent-death signal", PR_SET_PDEATHSIG, signal.SIGKILL)
    with report.problems("start"):
        # Without another user, the kernel counts the launcher and init with the code.
        extra = 2 if in_namespaces and not has_other_user else 0
        for name in set_limits(plan["limits"], extra_processes=extra):
            report.line(f"note limits {name}")
        if _IS_LINUX:
            drop_privileges()
        os.chdir(f"{base}/work")
        os.umask(0o077)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if "landlock" in mechanisms:
        with report.problems("landlock"):
            landlock.restrict(plan["read_paths"], base)
    if "seccomp" in mechanisms:
        with report.problems("seccomp"):
            # Outside namespaces the kernel counts all that the user runs, and root not at all: only a user of its own can
            # be held to a number of threads.
            with_threads = in_namespaces or user is not None
            seccomp.install(with_namespaces=in_namespaces, with_threads=with_threads)
    with report.problems("user" if "user" in mechanisms else "start"):  # another user may not reach the interpreter
        for descriptor in plan["keep_descriptors"]:
            os.set_inheritable(descriptor, True)
        report.line("started")
        environment = {name: value.format(base=base) for name, value in plan["environment"].items()}
        os.execve(plan["python"], [plan["python"], *plan["flags"], f"{base}/main.py"], environment)


def _prepare(plan: Plan, base: str, has_other_user: bool) -> int | None:
    """Write the files of the run; returns the user that the code is to run as, None = this one."""
    user = None
    if "namespaces" in plan["mechanisms"]:
        user = namespaces.CODE_ID if has_other_user else None
    elif "user" in plan["mechanisms"]:
        user = namespaces.free_user_id()
    made = [f"{base}/work", f"{base}/tmp"]
    for directory in made:
        os.mkdir(directory, 0o700)
    if os.path.isdir(f"{base}/shm"):
        made.append(f"{base}/shm")
    for name, content in {"../main.py": plan["code"], **plan["files"]}.items():
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
        for path in [*made, *([] if "namespaces" in plan["mechanisms"] else [base])]:
            os.chown(path, user, user)
    return user


def _fork(report: _Report, run: Callable[[], None]) -> int:
    with report.problems("start"):
        pid = os.fork()
    if pid == 0:
        with report.problems("start"):
            run()
            os._exit(0)
    return pid


def _wait_or_kill(child: int, plan: Plan, kill: Callable[[int, int], None]) -> tuple[int, float]:
    """Wait for the child; on SIGTERM, and when the owner forgets to send it, kill it. Returns its status and CPU seconds."""
    signal.setitimer(signal.ITIMER_REAL, plan["limits"]["wall_s"] + plan["start_timeout_s"] + _OWNER_IS_GONE_S)
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid == child:
            with contextlib.suppress(OSError):
                os.killpg(child, signal.SIGKILL)  # what it left behind in its process group
            return status, usage.ru_utime + usage.ru_stime
        if signal.sigwait(_AWAITED) != signal.SIGCHLD:  # the timer above ends it
            for end in (kill, os.kill):  # it may not have its process group yet
                with contextlib.suppress(OSError):
                    end(child, signal.SIGKILL)


def _release_streams(plan: Plan) -> None:
    """Only the code keeps its streams open: their other ends then see what it does with them."""
    for descriptor in (0, 1, 2, *plan["keep_descriptors"]):
        os.close(descriptor)


def _die_with(owner: int) -> None:
    if _IS_LINUX:
        prctl("parent-death signal", PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:  # it ended while this interpreter was starting
        os._exit(1)


def _offer_to_the_memory_killer() -> None:
    """When the machine runs out of memory, the sandbox goes first and not the trainer."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


class _Report:
    """Lines to the owner, from the launcher and its two forks."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._descriptor = descriptor

    def line(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the owner is gone, and so will this process be
            os.write(self._descriptor, f"{text}\n".encode(errors="replace"))  # one write of a short line is not torn

    @contextlib.contextmanager
    def problems(self, mechanism: str) -> Any:
        """Report what goes wrong inside and end this process."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - reported, then the process ends
            problem = (
                (error.strerror or str(error)) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            )
            self.line(f"problem {mechanism} {' '.join(problem.split())[:500]}")
            os._exit(1)
