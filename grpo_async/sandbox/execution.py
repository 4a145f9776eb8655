"""One run from the owner's side: its limits, its interpreter, and its course from start to end. `execute` ends every
process that it started, in time, also when cancelled."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import marshal
import os
import signal
import site
import sys
import sysconfig
import tempfile
import time
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import psutil

from grpo_async.errors import ConfigError, GrpoAsyncError
from grpo_async.utils.text import last_line


class SandboxError(GrpoAsyncError):
    """The sandbox itself failed; this says nothing about the code. The message contains the system's answer.

    Attributes:
        mechanism: the part of the wall that cannot be set up on this system; "start" or None if that is not the cause.
    """

    mechanism: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one run."""

    wall_s: float = 10.0  # from the start of the code
    cpu_s: float = 10.0  # CPU seconds, in whole seconds (at least 1)
    memory_mb: int = 512  # address space
    file_mb: int = 16  # size of each file
    written_mb: int = 1024  # all that it writes, to whatever; checked 20 times per second
    max_output_chars: int = 65536  # for stdout, and again for stderr

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not value > 0 or value == float("inf"):
                raise ConfigError(f"sandbox limit `{each.name}` is {value!r}; it must be a number above 0")
            if not each.name.endswith("_s") and not isinstance(value, int):
                raise ConfigError(f"sandbox limit `{each.name}` is {value!r}; it must be a whole number")


class SandboxStatus(StrEnum):
    """How a run ended. The cause is seldom certain: MEMORY is also an uncaught MemoryError."""

    OK = "ok"  # exit code 0
    ERROR = "error"  # another exit code, mostly from an uncaught exception
    TIMEOUT = "timeout"  # longer than `wall_s`; killed
    CPU = "cpu"  # more CPU time than `cpu_s`; killed
    MEMORY = "memory"  # more memory than `memory_mb`
    OUTPUT = "output"  # more output than `max_output_chars`; killed, but the output until then is kept
    WRITTEN = "written"  # more than `written_mb`; killed
    KILLED = "killed"  # killed by another signal: a crash, or its own kill


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """Result of one run. The streams are decoded as UTF-8, with U+FFFD where that fails, and truncated at `max_output_chars`.

    Example: `print(1); 1 / 0` -> status ERROR, stdout "1\\n", stderr a traceback, exit_code 1.
    """

    status: SandboxStatus
    stdout: str
    stderr: str
    exit_code: int | None  # negative: killed by this signal; None: the owner ended it
    duration_s: float  # wall-clock, from the start of the code
    cpu_s: float = 0.0  # CPU time of the code and its ended children; 0.0 if the owner ended it

    @property
    def last_error_line(self) -> str:
        """The last non-empty line of stderr, or ""; for a traceback, the line with the error."""
        return last_line(self.stderr)


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
    """The Python that the code gets. `read_paths` holds directories and files, parents before their contents."""

    executable: str
    read_paths: tuple[str, ...]
    module_paths: tuple[str, ...]  # on `sys.path` after the working directory
    library_path: str = ""  # where its shared library is, if it has one: the environment that said so is not passed on

    @property
    def launcher_environment(self) -> dict[str, str]:
        """The launcher's whole environment: what the interpreter needs to start."""
        return {"LD_LIBRARY_PATH": self.library_path} if self.library_path else {}

    def code_environment(self, base: str) -> dict[str, str]:
        """The code's whole environment, in the run's directory `base`.

        The hash seed is fixed: the same code gives the same result, the order of sets included.
        """
        return {
            **self.launcher_environment,
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": f"{base}/work",
            "TMPDIR": f"{base}/tmp",
            "LANG": "C.UTF-8",
            "PYTHONPATH": os.pathsep.join([f"{base}/work", *self.module_paths]),
            "PYTHONHASHSEED": "0",
            # There are no threads.
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }


@functools.cache
def find_interpreter(*, with_site_packages: bool = False) -> Interpreter:
    """The Python installation on which this process's virtual environment is based."""
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


START_TIMEOUT_S = 60.0
"""Time from the start of the launcher to that of the code; about 50 ms on an idle machine."""
END_TIMEOUT_S = 10.0
"""Time from the order to end until everything is dead; after that the launcher is killed, too."""

_MAX_OPEN_FILES = 256
_PACKAGE = Path(__file__).parents[1]
# The packages are defined without running their __init__, so the launcher only needs the time of its few imports.
BOOT = """
import sys
for name, path in (("grpo_async", sys.argv[1]), ("grpo_async.sandbox", sys.argv[1] + "/sandbox")):
    sys.modules[name] = package = type(sys)(name)
    package.__path__ = [path]
from grpo_async.sandbox.inside.launcher import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run and under which restrictions."""

    code: str = ""
    command: Sequence[str] = ()  # instead of code: a program and its arguments
    environment: Mapping[str, str] = field(default_factory=dict)  # besides the interpreter's; where not confined, all
    stdin: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)  # relative path -> content
    limits: SandboxLimits
    interpreter: Interpreter
    mechanisms: frozenset[str] = frozenset()
    is_confined: bool = True
    """False: the program has the rights, the files and the working directory of this process. Its only limits are `wall_s`,
    `memory_mb` (its data, not its address space: runtimes such as V8 reserve more than they use) and that of its output."""
    pass_descriptors: Sequence[int] = ()
    stderr_end: int | None = None  # keep this many characters from the end of stderr, and do not limit its length

    def plan(self, base: str) -> bytes:
        """The plan that the launcher reads."""
        main = {} if self.command else {"../main.py": self.code.encode("utf-8", "replace")}
        environment = self.interpreter.code_environment(base) if self.is_confined else {}
        return marshal.dumps(
            {
                "owner": os.getpid(),
                "mechanisms": sorted(self.mechanisms),
                "is_confined": self.is_confined,
                "resources": self._resources(),
                "written_mb": self.limits.written_mb if self.is_confined else None,
                "timeout_s": self.limits.wall_s + START_TIMEOUT_S,
                "command": list(self.command) or [self.interpreter.executable, *FLAGS, f"{base}/main.py"],
                "environment": {**environment, **self.environment},
                "read_paths": list(self.interpreter.read_paths),
                "base": base,
                "files": {**main, **self.files},
                "keep_descriptors": list(self.pass_descriptors),
            }
        )

    def _resources(self) -> dict[str, tuple[int, int]]:
        """Soft and hard limits of each process."""
        limits = self.limits
        cpu_s, memory = max(1, round(limits.cpu_s)), limits.memory_mb << 20
        if not self.is_confined:
            return {"RLIMIT_CORE": (0, 0), "RLIMIT_DATA": (memory, memory)}
        equal = {
            "RLIMIT_AS": memory,
            "RLIMIT_FSIZE": limits.file_mb << 20,
            "RLIMIT_NOFILE": _MAX_OPEN_FILES,
            "RLIMIT_CORE": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_MEMLOCK": 0,
        }
        # SIGXCPU, and a second later SIGKILL
        return {"RLIMIT_CPU": (cpu_s, cpu_s + 1), **{name: (value, value) for name, value in equal.items()}}


async def execute(job: Job) -> SandboxResult:
    """Run the code. The calling thread must outlive the run."""
    if not job.is_confined:
        return await _execute(job, "")
    base = tempfile.mkdtemp(prefix="grpo-async-sandbox-")
    try:
        return await _execute(job, base)
    finally:
        removing = asyncio.ensure_future(asyncio.to_thread(_remove_tree, base))
        await asyncio.wait([removing], timeout=END_TIMEOUT_S)  # it goes on after that, and where this run is cancelled
        if removing.done():
            removing.result()


async def _execute(job: Job, base: str) -> SandboxResult:
    limit = job.limits.max_output_chars
    report, stdout, stderr = _Report(), _Output(limit), _Output(job.stderr_end or limit, keeps_end=bool(job.stderr_end))
    status = None
    async with _launcher(job, base, report, stdout, stderr) as reporting:
        await _wait(START_TIMEOUT_S, reporting, report.started)
        began = time.monotonic()
        if report.started.done():
            await _wait(job.limits.wall_s, reporting, stdout.over, stderr.over)
        if not reporting.done():
            status = SandboxStatus.TIMEOUT
        duration_s = time.monotonic() - began
    if stdout.over.done() or stderr.over.done():
        status = SandboxStatus.OUTPUT
    if report.problem is not None:
        what, problem = report.problem
        failed = SandboxError(f"the sandbox cannot start: {problem}" if job.is_confined else problem)
        failed.mechanism = what
        raise failed
    if not report.started.done():
        what = f"took over {START_TIMEOUT_S:.0f} s to start" if status else "ended before it had started the code"
        raise SandboxError(f"the sandbox {what}; is the machine overloaded? {stderr.text[-500:]}".rstrip())
    if status is None and report.has_written_too_much:
        status = SandboxStatus.WRITTEN
    exit_code, cpu_s = None, 0.0
    if status is None:
        if report.ended is None:
            raise SandboxError("the sandbox's launcher was killed; did the machine run out of memory?")
        exit_code, cpu_s = report.ended
        status = _status_of(exit_code, cpu_s, job.limits, stderr.text)
    return SandboxResult(
        status=status,
        stdout=stdout.text,
        stderr=stderr.text,
        exit_code=exit_code,
        duration_s=duration_s,
        cpu_s=cpu_s,
    )


async def _wait(timeout_s: float, *which: asyncio.Future[None]) -> None:
    """Wait until one of the futures is done, or the time is up."""
    await asyncio.wait(which, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


@asynccontextmanager
async def _launcher(
    job: Job, base: str, report: _Report, stdout: _Output, stderr: _Output
) -> AsyncIterator[asyncio.Task[None]]:
    """The launcher with everything it starts; ended, and read to the end, when the block is left. Yields the task that reads its
    report, which is done when the launcher and its forks are gone."""
    report_out, report_in = os.pipe()
    lines = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(report_out, "rb", buffering=0)
    )
    with contextlib.closing(transport), contextlib.closing(await _start(job, base, report_in)) as process:
        if not process.stdin.is_closing():  # already killed: uvloop then accepts no write
            process.stdin.write(job.stdin.encode("utf-8", "replace"))
            process.stdin.close()  # when all of it is written, or nobody reads it anymore
        reading = [
            asyncio.create_task(reads)
            for reads in (report.read(lines), stdout.read(process.stdout), stderr.read(process.stderr))
        ]
        try:
            yield reading[0]
        finally:
            await process.end(END_TIMEOUT_S)
            await asyncio.wait(reading, timeout=END_TIMEOUT_S)
            for task in reading:
                task.cancel()


async def _start(job: Job, base: str, report_in: int) -> ChildProcess:
    try:
        with tempfile.TemporaryFile() as plan:
            plan.write(job.plan(base))
            plan.seek(0)
            command = [job.interpreter.executable, "-I", "-S", "-c", BOOT]
            command += [str(_PACKAGE), str(plan.fileno()), str(report_in)]
            return await ChildProcess.start(
                *command,
                env=job.interpreter.launcher_environment,
                cwd="/" if job.is_confined else None,
                pass_fds=[plan.fileno(), report_in, *job.pass_descriptors],
            )
    except OSError as error:
        raise SandboxError(f"no process can be started: {error}") from error
    finally:
        os.close(report_in)


class _Output:
    """Text that the code writes, up to a limit, at which it is `over`; the rest is read and dropped. With `keeps_end`, the
    end of the text is kept instead, and there is no limit."""

    def __init__(self, max_chars: int, *, keeps_end: bool = False) -> None:
        self._parts: list[str] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._max_chars, self._keeps_end = max_chars, keeps_end

    @property
    def text(self) -> str:
        return "".join(self._parts)

    async def read(self, stream: asyncio.StreamReader) -> None:
        room = self._max_chars
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        data = b"-"
        while data:
            data = await stream.read(CHUNK)  # until the process is dead, after wall_s at the latest
            text = decoder.decode(data, final=not data)
            if self._keeps_end:
                self._parts = [(self.text + text)[-self._max_chars :]]
                continue
            self._parts.append(text[:room])
            if len(text) > room and not self.over.done():
                self.over.set_result(None)
            room -= len(self._parts[-1])


class _Report:
    """The lines that the launcher reports."""

    def __init__(self) -> None:
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.problem: tuple[str, str] | None = None
        self.ended: tuple[int, float] | None = None  # exit code, negative for a signal; CPU seconds
        self.has_written_too_much = False

    async def read(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:  # until the launcher is dead
            word, _, rest = line.decode("utf-8", "replace").rstrip("\n").partition(" ")
            if word == "started":
                self.started.set_result(None)
            elif word == "ended":
                status, cpu_s = rest.split()
                self.ended = os.waitstatus_to_exitcode(int(status)), float(cpu_s)
            elif word == "written":
                self.has_written_too_much = True
            elif word == "problem" and self.problem is None:
                mechanism, _, problem = rest.partition(" ")
                self.problem = (mechanism, problem)


def _status_of(exit_code: int, cpu_s: float, limits: SandboxLimits, stderr: str) -> SandboxStatus:
    if exit_code == 0:
        return SandboxStatus.OK
    if exit_code == -signal.SIGXCPU or (exit_code == -signal.SIGKILL and cpu_s >= limits.cpu_s / 2):
        return SandboxStatus.CPU
    if exit_code < 0:
        return SandboxStatus.KILLED
    return SandboxStatus.MEMORY if last_line(stderr).startswith("MemoryError") else SandboxStatus.ERROR


def _remove_tree(path: str) -> None:
    """Remove the directory `path` and everything that the code left in it, however deep or locked; follows no link. The code is
    dead by then.

    Each folder is moved up before it is emptied, so no path is longer than two levels: a chain of 4000 folders, which `rm -rf`
    and shutil.rmtree take minutes for or give up on, takes no longer than as many side by side.
    """
    try:
        aside, waiting, number = tempfile.mkdtemp(prefix="grpo-async-sandbox-", dir=os.path.dirname(path)), [path], 0
        while waiting:
            folder = waiting.pop()
            os.chmod(folder, 0o700)
            with os.scandir(folder) as entries:
                for entry in list(entries):
                    if entry.is_dir(follow_symlinks=False):
                        os.chmod(entry.path, 0o700)  # moving a folder writes its `..`
                        number += 1
                        waiting.append(f"{aside}/{number}")
                        os.rename(entry.path, waiting[-1])
                    else:
                        os.unlink(entry.path)
            os.rmdir(folder)
        os.rmdir(aside)
    except OSError as error:
        raise SandboxError(f"the directory {path} of a sandbox cannot be removed: {error}") from error


# ---------------------------------------------------------------------------------- a process that a loop feeds and reads

CHUNK = 65536
"""Bytes to read at once."""


class ChildProcess(Process):
    """`start` it, `end` it, and `close` it at last: it has pipes for its streams, and a session of its own. When it was killed,
    and so could end nothing itself, the rest of the session is killed, too."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader

    def __init__(self, transport: asyncio.SubprocessTransport, protocol: _Protocol) -> None:
        super().__init__(transport, protocol, asyncio.get_running_loop())
        self.exited = protocol.exited
        """`wait` waits for the streams, too, which an orphan may still hold."""
        self.close = transport.close
        """asyncio's own `create_subprocess_exec` leaves that to the garbage collector."""

    @classmethod
    async def start(cls, *command: str, **options: Any) -> Self:
        """Start `command` in a session of its own, with pipes; `options` as of subprocess.Popen, and OSError as there."""
        transport, protocol = await asyncio.get_running_loop().subprocess_exec(
            _Protocol, *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, **options
        )
        return cls(transport, protocol)

    async def end(self, timeout_s: float) -> None:
        """Send SIGTERM, and SIGKILL if it does not end within `timeout_s`. If it has ended by itself, nothing is sent."""
        with contextlib.suppress(ProcessLookupError):
            if self.returncode is None:
                os.kill(self.pid, signal.SIGTERM)  # not `terminate`, which would take its exit code away from asyncio
        try:
            async with asyncio.timeout(timeout_s):
                await self.exited.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            await self.exited.wait()  # killed
        if self.returncode == -signal.SIGKILL:
            _kill_session(self.pid)


class _Protocol(SubprocessStreamProtocol):
    def __init__(self) -> None:
        super().__init__(limit=CHUNK, loop=asyncio.get_running_loop())
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


def _kill_session(session: int) -> None:
    """Kill what is left of a session whose leader is dead."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)
