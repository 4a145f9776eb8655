"""One run as its owner sees it: what it may take, which interpreter it gets, and its way from start to end.

The launcher is started, fed and read through pipes that are never waited for, and ended in time. Ends when the launcher has ended,
and with it everything it started. Waits for: the streams, the launcher's report, `cancel`; each under a deadline. Output past its
limit ends the run, so that neither memory nor CPU is spent on what nobody reads.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import marshal
import os
import selectors
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path

from grpo_async.errors import ConfigError, GrpoAsyncError


class SandboxError(GrpoAsyncError):
    """The sandbox itself failed; says nothing about the code. The message carries the system's answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Most that one run may take.

    Raises:
        ConfigError: a value that cannot be a limit.
    """

    wall_s: float = 10.0  # from the start of the code
    cpu_s: float = 10.0  # CPU seconds of each process, in whole seconds (at least 1)
    memory_mb: int = 512  # address space of each process, and what all of them hold together
    file_mb: int = 16  # size of each file
    directory_mb: int = 64  # all files of the run together
    max_processes: int = 32  # processes and threads at once, the code's first one included
    max_output_chars: int = 65536  # of stdout, and again of stderr

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not value > 0 or value == float("inf"):
                raise ConfigError(f"sandbox limit `{each.name}` is {value!r}; it must be a number above 0")
            if not each.name.endswith("_s") and not isinstance(value, int):
                raise ConfigError(f"sandbox limit `{each.name}` is {value!r}; it must be a whole number")


class SandboxStatus(StrEnum):
    """How a run ended. What the code did is seldom certain: MEMORY is also an uncaught MemoryError."""

    OK = "ok"  # exit code 0
    ERROR = "error"  # another exit code: an uncaught exception, mostly
    TIMEOUT = "timeout"  # longer than `wall_s`; killed
    CPU = "cpu"  # more CPU time than `cpu_s`; killed
    MEMORY = "memory"  # more memory than `memory_mb`
    OUTPUT = "output"  # more output than `max_output_chars`; killed, and what came before is kept
    KILLED = "killed"  # by another signal: a crash, or a kill of its own

    @property
    def is_ok(self) -> bool:
        return self is SandboxStatus.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """One run. The streams are decoded as UTF-8, with a mark where that is impossible, and cut at `max_output_chars`.

    Example: `print(1); 1 / 0` -> status ERROR, stdout "1\\n", stderr a traceback, exit_code 1.
    """

    status: SandboxStatus
    stdout: str
    stderr: str
    exit_code: int | None  # negative: the signal that ended it; None: the owner ended it
    duration_s: float  # wall-clock, from the start of the code
    cpu_s: float = 0.0  # of the code and of its children that have ended; 0.0 when the owner ended it

    @property
    def last_error_line(self) -> str:
        """The last line of stderr that is not empty, "" without one: of a traceback the one that says what it was."""
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""


_SYSTEM_PATHS = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/alternatives",
)
FLAGS = ("-s", "-S", "-P", "-B", "-X", "utf8")
"""No user site, no site-packages, no script directory on the path, no bytecode files, UTF-8 everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """Python as the code gets it. `read_paths` holds directories and files, parents before what they contain."""

    executable: str
    read_paths: tuple[str, ...]
    module_paths: tuple[str, ...]  # on the path after the working directory
    library_path: str = ""  # where its shared library is, if it has one: the environment that said so is not passed on


@functools.cache
def find_interpreter(*, with_site_packages: bool = False) -> Interpreter:
    """The interpreter below this process's virtual environment.

    Args:
        with_site_packages: whether the packages of this process can be imported. Those that are installed as a link to
            their sources (`pip install -e`) cannot.
    """
    executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    packages: list[str] = []
    if with_site_packages:
        packages = [os.path.realpath(path) for path in site.getsitepackages() if os.path.isdir(path)]
    prefixes = (sys.base_prefix, sys.base_exec_prefix, sysconfig.get_path("stdlib"))
    library_path = _library_path()
    needed = {executable, *map(os.path.realpath, prefixes), *packages}
    if library_path:
        needed.add(library_path)
    paths = [path for path in _SYSTEM_PATHS if os.path.lexists(path)]
    for path in sorted(needed):
        if path != "/" and not any(path == shown or path.startswith(f"{shown}/") for shown in paths):
            paths.append(path)
    return Interpreter(
        executable=executable,
        read_paths=tuple(paths),
        module_paths=tuple(packages),
        library_path=library_path,
    )


def _library_path() -> str:
    directory = sysconfig.get_config_var("LIBDIR") or ""
    name = sysconfig.get_config_var("INSTSONAME") or ""
    is_shared = bool(sysconfig.get_config_var("Py_ENABLE_SHARED")) and sys.platform == "linux"
    return os.path.realpath(directory) if is_shared and os.path.exists(os.path.join(directory, name)) else ""


def launcher_environment_of(interpreter: Interpreter) -> dict[str, str]:
    """All of the launcher's environment: what the interpreter needs to start."""
    return {"LD_LIBRARY_PATH": interpreter.library_path} if interpreter.library_path else {}


def environment_of(interpreter: Interpreter) -> dict[str, str]:
    """All of the code's environment; `{base}` stands for the sandbox's directory.

    The hash seed is fixed: the same code gives the same result, the order of sets included.
    """
    return {
        **launcher_environment_of(interpreter),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": "{base}/work",
        "TMPDIR": "{base}/tmp",
        "LANG": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join(["{base}/work", *interpreter.module_paths]),
        "PYTHONHASHSEED": "0",
        # Libraries that start a thread for every CPU would meet the limit of processes.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


START_TIMEOUT_S = 60.0
"""From the start of the launcher to that of the code; some 50 ms on an idle machine."""
END_TIMEOUT_S = 10.0
"""From the order to end until everything is dead; then the launcher is killed too."""

_CHUNK = 65536
_PACKAGE = Path(__file__).parents[1]
# The packages stand there without running their __init__: the launcher starts in the time of its few imports.
BOOT = """
import sys
for name, path in (("grpo_async", sys.argv[1]), ("grpo_async.sandbox", sys.argv[1] + "/sandbox")):
    sys.modules[name] = package = type(sys)(name)
    package.__path__ = [path]
from grpo_async.sandbox.inside.launcher import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""


class MechanismError(SandboxError):
    """A restriction cannot be set up on this system.

    Args:
        mechanism: which.
        problem: the system's answer.
    """

    def __init__(self, mechanism: str, problem: str) -> None:
        self.mechanism, self.problem = mechanism, problem
        super().__init__(f"the sandbox cannot start ({mechanism}): {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run and under which restrictions."""

    code: str
    stdin: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)  # relative path -> content
    limits: SandboxLimits
    interpreter: Interpreter
    mechanisms: frozenset[str]
    pass_descriptors: Sequence[int] = ()


class Execution:
    """One run. `run` once, in any thread; `cancel` from any thread. The thread must not end before `run` does."""

    def __init__(self, job: Job) -> None:
        self.notes: list[str] = []  # what the launcher noticed: "MECHANISM TEXT"
        self._job = job
        self._cancel_seen, self._cancel_told = os.pipe()
        os.set_blocking(self._cancel_told, False)
        self._is_closed = False
        self._lock = threading.Lock()  # a closed descriptor's number is soon somebody else's
        self._is_cancelled = False

    def cancel(self) -> None:
        """End the run; `run` then returns a result that means nothing."""
        self._is_cancelled = True
        with self._lock:
            if not self._is_closed:
                with contextlib.suppress(BlockingIOError):  # told often enough
                    os.write(self._cancel_told, b"1")

    def run(self) -> SandboxResult:
        """Run the code.

        Raises:
            SandboxError: the sandbox failed, not the code.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            base = ""  # with namespaces its directory is in memory and ends with it
            if "namespaces" not in self._job.mechanisms:
                base = tempfile.mkdtemp(prefix="grpo-async-sandbox-")
                stack.callback(remove_tree, base)
            return self._run(stack, base)

    def _run(self, stack: contextlib.ExitStack, base: str) -> SandboxResult:
        limits = self._job.limits
        pipes = _Pipes(stack)
        plan_out, report_in = pipes.read_end_for_child(self._plan(base)), pipes.write_end_for_child(report := _Report())
        stdout, stderr = _Stream(limits.max_output_chars), _Stream(limits.max_output_chars)
        child_in = pipes.read_end_for_child(self._job.stdin.encode("utf-8", "replace"))
        child_out, child_err = pipes.write_end_for_child(stdout), pipes.write_end_for_child(stderr)
        command = [self._job.interpreter.executable, "-I", "-S", "-c", BOOT]
        command += [str(_PACKAGE), str(plan_out), str(report_in)]
        try:
            process = subprocess.Popen(
                command,
                stdin=child_in,
                stdout=child_out,
                stderr=child_err,
                env=launcher_environment_of(self._job.interpreter),
                cwd="/",
                pass_fds=[plan_out, report_in, *self._job.pass_descriptors],
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"the sandbox cannot start a process: {error}") from error
        stack.callback(_end, process)
        pipes.close_child_ends()
        pipes.watch_cancel(self._cancel_seen)

        started_at, status = time.monotonic(), None
        deadline = started_at + START_TIMEOUT_S
        while not report.is_closed:
            if report.started_at is not None and started_at != report.started_at:
                started_at = report.started_at
                deadline = started_at + limits.wall_s
            if not pipes.exchange(deadline):
                status = SandboxStatus.TIMEOUT
            elif stdout.is_over or stderr.is_over:
                status = SandboxStatus.OUTPUT
            if status is not None or self._is_cancelled:
                break
        duration_s = time.monotonic() - started_at
        _end(process)
        pipes.drain()
        self.notes = report.notes
        if report.problem is not None:
            raise MechanismError(*report.problem)
        if report.started_at is None and not self._is_cancelled:
            what = f"took over {START_TIMEOUT_S:.0f} s to start" if status else "ended before it had started the code"
            raise SandboxError(f"the sandbox {what}; is the machine overloaded? {stderr.text[-500:]}".rstrip())
        if status is None and (stdout.is_over or stderr.is_over):  # found in the last drain
            status = SandboxStatus.OUTPUT
        return _result(status, report, limits, stdout.text, stderr.text, duration_s, self._is_cancelled)

    def _plan(self, base: str) -> bytes:
        job = self._job
        return marshal.dumps(
            {
                "owner": os.getpid(),
                "mechanisms": sorted(job.mechanisms),
                "limits": asdict(job.limits),
                "start_timeout_s": START_TIMEOUT_S,
                "python": job.interpreter.executable,
                "flags": list(FLAGS),
                "environment": environment_of(job.interpreter),
                "read_paths": list(job.interpreter.read_paths),
                "base": base,
                "mount_point": tempfile.gettempdir(),
                "code": job.code.encode("utf-8", "replace"),
                "files": dict(job.files),
                "keep_descriptors": list(job.pass_descriptors),
            }
        )

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self._cancel_seen)
            os.close(self._cancel_told)


class _Stream:
    """Text that the code writes, up to a limit."""

    def __init__(self, max_chars: int) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parts: list[str] = []
        self._num_left = max_chars
        self.is_over = False

    def feed(self, data: bytes) -> None:
        text = self._decoder.decode(data, final=not data)
        if len(text) > self._num_left:
            self.is_over = True
        if text:
            self._parts.append(text[: self._num_left])
            self._num_left -= len(self._parts[-1])

    @property
    def text(self) -> str:
        return "".join(self._parts)


class _Report:
    """The launcher's lines."""

    def __init__(self) -> None:
        self._rest = b""
        self.is_closed = False
        self.started_at: float | None = None
        self.problem: tuple[str, str] | None = None
        self.notes: list[str] = []
        self.ended: tuple[int, float] | None = None  # wait status, CPU seconds
        self.is_out_of_memory = False

    def feed(self, data: bytes) -> None:
        if not data:
            self.is_closed = True
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            word, _, rest = line.decode("utf-8", "replace").partition(" ")
            if word == "started":
                self.started_at = time.monotonic()
            elif word == "ended":
                status, cpu_s = rest.split()
                self.ended = int(status), float(cpu_s)
            elif word == "memory":
                self.is_out_of_memory = True
            elif word == "note":
                self.notes.append(rest)
            elif word == "problem" and self.problem is None:
                mechanism, _, problem = rest.partition(" ")
                self.problem = (mechanism, problem)


class _Pipes:
    """The owner's ends of all pipes, none of which ever blocks."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._child_ends: list[int] = []
        self._open: set[int] = set()
        stack.callback(self._close)

    def read_end_for_child(self, content: bytes) -> int:
        theirs, ours = os.pipe()
        self._child_ends.append(theirs)
        self._open.add(ours)
        os.set_blocking(ours, False)
        if content:
            self._selector.register(ours, selectors.EVENT_WRITE, memoryview(content))
        else:
            self._forget(ours, is_watched=False)
        return theirs

    def write_end_for_child(self, sink: _Stream | _Report) -> int:
        ours, theirs = os.pipe()
        self._child_ends.append(theirs)
        self._open.add(ours)
        os.set_blocking(ours, False)
        self._selector.register(ours, selectors.EVENT_READ, sink)
        return theirs

    def watch_cancel(self, descriptor: int) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, None)

    def close_child_ends(self) -> None:
        while self._child_ends:
            os.close(self._child_ends.pop())

    def exchange(self, deadline: float) -> bool:
        """Wait until something moves and move it; False when the deadline has passed."""
        ready = self._selector.select(max(0.0, deadline - time.monotonic()))
        for key, _ in ready:
            if isinstance(key.data, memoryview):
                self._write(key.fd, key.data)
            elif key.data is not None:
                self._read(key.fd, key.data)
        return time.monotonic() < deadline

    def drain(self) -> None:
        """Read what is left once nobody writes any more; never waits."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Stream | _Report):
                while key.fd in self._open and not getattr(key.data, "is_over", False):
                    if not self._read(key.fd, key.data):
                        break

    def _read(self, descriptor: int, sink: _Stream | _Report) -> bool:
        try:
            data = os.read(descriptor, _CHUNK)  # does not block
        except BlockingIOError:
            return False
        sink.feed(data)
        if not data:
            self._forget(descriptor)
        return True

    def _write(self, descriptor: int, rest: memoryview) -> None:
        try:
            rest = rest[os.write(descriptor, rest[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the code closed its stdin
            rest = rest[:0]
        if rest:
            self._selector.modify(descriptor, selectors.EVENT_WRITE, rest)
        else:
            self._forget(descriptor)

    def _forget(self, descriptor: int, *, is_watched: bool = True) -> None:
        if is_watched:
            self._selector.unregister(descriptor)
        self._open.discard(descriptor)
        os.close(descriptor)

    def _close(self) -> None:
        self.close_child_ends()
        while self._open:
            os.close(self._open.pop())


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and with it the run; does nothing to one that has ended."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_TIMEOUT_S)


def _result(
    status: SandboxStatus | None,
    report: _Report,
    limits: SandboxLimits,
    stdout: str,
    stderr: str,
    duration_s: float,
    is_cancelled: bool,
) -> SandboxResult:
    exit_code, cpu_s = None, 0.0
    if report.ended is not None and status is None:
        exit_code, cpu_s = os.waitstatus_to_exitcode(report.ended[0]), report.ended[1]
    if status is None and (report.is_out_of_memory or is_cancelled):
        status = SandboxStatus.MEMORY if report.is_out_of_memory else SandboxStatus.KILLED
    if status is None:
        if exit_code is None:
            raise SandboxError("the sandbox's launcher was killed; did the machine run out of memory?")
        status = _status_of(exit_code, cpu_s, limits, stderr)
    return SandboxResult(
        status=status, stdout=stdout, stderr=stderr, exit_code=exit_code, duration_s=duration_s, cpu_s=cpu_s
    )


def _status_of(exit_code: int, cpu_s: float, limits: SandboxLimits, stderr: str) -> SandboxStatus:
    if exit_code == 0:
        return SandboxStatus.OK
    if exit_code == -signal.SIGXCPU or (exit_code == -signal.SIGKILL and cpu_s >= limits.cpu_s / 2):
        return SandboxStatus.CPU
    if exit_code < 0:
        return SandboxStatus.KILLED
    last = stderr.rstrip().rpartition("\n")[2]
    return SandboxStatus.MEMORY if last.startswith("MemoryError") else SandboxStatus.ERROR


def remove_tree(path: str) -> None:
    """Remove the directory `path` and what the code left in it, however deep or locked; follows no link. The code and all its
    processes are dead by then. (Not shutil.rmtree, which goes as deep as Python's recursion.)

    Raises:
        SandboxError: it cannot be removed.
    """
    command = ["rm", "-rf", "--", path]
    if subprocess.run(command, capture_output=True, timeout=END_TIMEOUT_S).returncode != 0:
        subprocess.run(["chmod", "-R", "u+rwx", "--", path], capture_output=True, timeout=END_TIMEOUT_S)
        done = subprocess.run(command, capture_output=True, text=True, timeout=END_TIMEOUT_S)
        if done.returncode != 0:
            raise SandboxError(f"the directory of a sandbox cannot be removed: {done.stderr.strip()[:500]}")
