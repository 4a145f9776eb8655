"""Agents that are a command: a process for each rollout, which calls the model by the variables in its environment.

    row as JSON -> stdin | subreaper -> command -> ... | stdout -> last line: the result as JSON
                                                    | stderr -> its end, for the message about a rollout that failed

Invariant: when a run is over (it ended, failed, took too long, was cancelled, or this process was killed), the command and all that
it has started are dead; `subreaper` sees to that, in the sandbox its namespaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from grpo_async.agents.agent import Agent, AgentError, AgentResult, read_result
from grpo_async.agents.session import AgentSession
from grpo_async.agents.subreaper import CANNOT_START
from grpo_async.config.sections import AgentSection
from grpo_async.errors import ConfigError
from grpo_async.inference.token import TOKEN_VARIABLE
from grpo_async.sandbox import Sandbox, SandboxError, SandboxLimits, SandboxStatus, has_loopback
from grpo_async.sandbox import startup_notes as sandbox_notes
from grpo_async.sandbox.execution import find_interpreter
from grpo_async.sandbox.inside.loopback import PORT
from grpo_async.utils.child_process import CHUNK, ChildProcess
from grpo_async.utils.processes import describe_exit
from grpo_async.utils.text import clipped

SETTING = "rollout.agent.command"

_END_TIMEOUT_S = 10.0
"""From the order to end until everything is dead; then the subreaper is killed, too."""
_MAX_STDOUT = 1 << 20  # bytes; a command that writes more is killed
_MAX_STDERR = 4096  # bytes of its end that are kept
_MAX_SHOWN = 500  # characters of it in a message
_TOO_MUCH = f"wrote more than {_MAX_STDOUT} bytes to stdout and was killed"
_HIDDEN_VARIABLES = (
    TOKEN_VARIABLE,
    "ANTHROPIC_AUTH_TOKEN",
)  # the servers' token; what Anthropic's client would prefer to the key
_SCRIPTS = (".py", ".js", ".mjs", ".ts", ".sh", ".rb", ".pl")
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_SANDBOX_MEMORY_MB = 2048
_SANDBOX_REQUIRES = ("limits", "network", "filesystem", "processes")


class CommandAgent(Agent):
    """See the module's docstring.

    Args:
        command: the program and its arguments.
        section: limits and sandbox.
    """

    def __init__(self, command: Sequence[str], section: AgentSection) -> None:
        self._command = list(command)
        self._section = section
        self._sandbox = _Sandboxed(command, section) if section.sandbox else None

    async def run(self, row: Mapping[str, Any], session: AgentSession) -> AgentResult:
        stdin = orjson.dumps(row, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
        run = self._run if self._sandbox is None else self._sandbox.run
        stdout = await run(stdin, session)
        return read_result(_last_json(stdout))

    def notes(self) -> list[str]:
        return sandbox_notes(_SANDBOX_REQUIRES) if self._sandbox is not None else []

    async def _run(self, stdin: bytes, session: AgentSession) -> str:
        """What it writes to stdout; raises AgentError."""
        section, problem = self._section, ""
        stdout, stderr = bytearray(), bytearray()
        subreaper = await _start_subreaper(self._command, section.memory_mb or 0, _environment(session))
        with contextlib.closing(subreaper):
            reading = asyncio.create_task(_read(subreaper.stdout, stdout, limit=_MAX_STDOUT))
            reading_end = asyncio.create_task(_read_end(subreaper.stderr, stderr))
            ending = asyncio.create_task(subreaper.exited.wait())
            tasks = {reading, reading_end, ending}
            try:
                if not subreaper.stdin.is_closing():  # it was killed at once: uvloop takes no write then
                    subreaper.stdin.write(stdin)
                    subreaper.stdin.close()  # once all of it is written, or nobody reads it anymore
                async with asyncio.timeout(section.timeout_s):
                    await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
                    if not reading.done() or reading.result():
                        await ending
            except TimeoutError:
                problem = _too_late(section)
            finally:
                await subreaper.end(_END_TIMEOUT_S)
                await asyncio.wait(tasks, timeout=_END_TIMEOUT_S)
                for task in tasks:
                    task.cancel()
            code = subreaper.returncode or 0
        if reading.done() and not reading.cancelled() and not reading.result():
            problem = _TOO_MUCH
        problem = problem or _problem_of(code, self._command[0])
        if problem:
            raise _failed(problem, stderr.decode(errors="replace"))
        return stdout.decode(errors="replace")


# -- a process with its subreaper


async def _start_subreaper(command: Sequence[str], memory_mb: int, environment: Mapping[str, str]) -> ChildProcess:
    """The subreaper of a command; with it the command ends, and all that it started."""
    subreaper = [
        sys.executable,
        "-I",
        "-S",
        str(Path(__file__).with_name("subreaper.py")),
        str(os.getpid()),
        str(memory_mb),
    ]
    try:
        return await ChildProcess.start(*subreaper, *command, env=environment)
    except OSError as error:
        raise AgentError(
            f"no process can be started for the agent: {error}; lower rollout.agent.max_concurrent"
        ) from error


async def _read(stream: asyncio.StreamReader, into: bytearray, *, limit: int) -> bool:
    """Read to the end; False when there is more than `limit` bytes. The caller has a time limit."""
    while data := await stream.read(CHUNK):
        into += data
        if len(into) > limit:
            return False
    return True


async def _read_end(stream: asyncio.StreamReader, into: bytearray) -> None:
    """Read to the end and keep the last bytes. Ends with the process."""
    while data := await stream.read(CHUNK):
        into += data
        del into[:-_MAX_STDERR]


def _environment(session: AgentSession) -> dict[str, str]:
    """This process's own, without its secrets, and where the model is."""
    kept = {name: value for name, value in os.environ.items() if name not in _HIDDEN_VARIABLES}
    host = urlsplit(session.base_url).hostname or ""
    for name in ("no_proxy", "NO_PROXY"):  # a proxy could not reach the endpoint
        kept[name] = ",".join(filter(None, (kept.get(name), host)))
    return kept | _model_variables(session, session.base_url, session.anthropic_base_url)


def _model_variables(session: AgentSession, base_url: str, anthropic_base_url: str) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,  # older libraries
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": anthropic_base_url,
        "ANTHROPIC_API_KEY": session.key,
        "GRPO_ASYNC_MODEL": session.model,
        "GRPO_ASYNC_ROLLOUT": session.rollout_id,
    }


# -- what became of it


def _too_late(section: AgentSection) -> str:
    return f"did not end within rollout.agent.timeout_s = {section.timeout_s:g} s and was killed"


def _problem_of(code: int, program: str) -> str:
    """What is wrong with an exit code; "" for 0."""
    if code == 0:
        return ""
    return f"({program}) {describe_exit(code)}" + (": it could not be started" if code == CANNOT_START else "")


def _failed(problem: str, stderr: str) -> AgentError:
    said = stderr.strip()[-_MAX_SHOWN:]
    return AgentError(
        f"the agent's command {problem}; " + (f"its stderr ends: {said}" if said else "its stderr is empty")
    )


def _last_json(stdout: str) -> Any:
    """The last line that is not empty, or all of it, as JSON; None where nothing was written.

    "step 1\\n{"reward": 0.5}\\n" -> {"reward": 0.5}
    """
    lines = [line for line in stdout.splitlines() if line.strip()]
    if not lines:
        return None
    for text in (lines[-1], stdout):
        with contextlib.suppress(ValueError):
            return json.loads(text)
    raise AgentError(
        f"the last line that the agent's command wrote to stdout is not JSON: {clipped(lines[-1].strip(), 200)!r}; its result "
        'belongs there, such as {"reward": 1.0}, and logs on stderr; a command without a result prints nothing'
    )


# -- in the sandbox

_START = """
import os, sys
os.environ.update({variables!r})
try:
    os.execv({program!r}, {command!r})
except OSError as error:
    sys.stderr.write({program!r} + " cannot be started: " + str(error))
    os._exit({cannot_start})
"""


class _Sandboxed:
    """Runs a command in the sandbox, where it has a loopback of its own with one port: that of the endpoint.

    Raises:
        ConfigError: the sandbox of this machine cannot hold that.
    """

    def __init__(self, command: Sequence[str], section: AgentSection) -> None:
        if not has_loopback():
            raise ConfigError(
                "rollout.agent.sandbox: without user namespaces, which this machine does not give, the sandbox denies every "
                "connection, that to the model too; allow them (sysctl user.max_user_namespaces > 0, kernel.apparmor_"
                "restrict_unprivileged_userns=0), or set sandbox: false and start the run in a container"
            )
        self._program, self._arguments, named = _resolve(command)
        self._name = command[0]
        self._section = section
        self._sandbox = Sandbox(
            SandboxLimits(
                wall_s=section.timeout_s,
                cpu_s=section.timeout_s,
                memory_mb=section.memory_mb or _SANDBOX_MEMORY_MB,
                file_mb=256,
                directory_mb=1024,
                max_processes=128,
                max_output_chars=_MAX_STDOUT,
            ),
            require=_SANDBOX_REQUIRES,
            with_site_packages=True,
            read_paths=[*named, *(os.path.realpath(path) for path in section.read_paths)],
        )

    async def run(self, stdin: bytes, session: AgentSession) -> str:
        """What it writes to stdout; raises AgentError."""
        own_url = f"http://127.0.0.1:{PORT}"
        code = _START.format(
            variables=_model_variables(session, f"{own_url}/v1", own_url),
            program=self._program,
            command=[self._program, *self._arguments],
            cannot_start=CANNOT_START,
        )
        ours, theirs = socket.socketpair()
        with ours, theirs:
            async with _serving(ours, session):
                try:
                    result = await self._sandbox.run(code, stdin=stdin.decode(), loopback=theirs.fileno())
                except SandboxError as error:
                    raise AgentError(f"the agent's command could not be run in the sandbox: {error}") from error
        problems = {
            SandboxStatus.OK: "",
            SandboxStatus.TIMEOUT: _too_late(self._section),
            SandboxStatus.OUTPUT: _TOO_MUCH,
            SandboxStatus.MEMORY: f"took more memory than rollout.agent.memory_mb = {self._sandbox.limits.memory_mb}",
            SandboxStatus.CPU: f"took more than {self._section.timeout_s:g} s of CPU time and was killed",
        }
        problem = problems.get(result.status, _problem_of(result.exit_code or 0, self._name))
        if problem:
            raise _failed(problem, result.stderr)
        return result.stdout


@asynccontextmanager
async def _serving(channel: socket.socket, session: AgentSession) -> AsyncIterator[None]:
    """While the block runs, the endpoint answers at the port in the sandbox, whose listening socket comes through `channel`."""
    task = asyncio.create_task(_serve(channel, session))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=_END_TIMEOUT_S)


async def _serve(channel: socket.socket, session: AgentSession) -> None:
    """Runs until it is cancelled."""
    assert session.serve is not None
    loop = asyncio.get_running_loop()
    channel.setblocking(False)
    is_here = asyncio.Event()
    loop.add_reader(channel, is_here.set)
    try:
        await is_here.wait()  # cancelled with the run, which has wall_s
    finally:
        loop.remove_reader(channel)
    _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    listener = socket.socket(fileno=descriptors[0])
    listener.setblocking(False)
    server = await session.serve(listener)
    try:
        await asyncio.Event().wait()  # until it is cancelled
    finally:
        server.close()


# -- before anything starts


def load_command_agent(section: AgentSection) -> CommandAgent:
    """Look for the program.

    Raises:
        ConfigError: it is not there, or the sandbox cannot hold what an agent needs on this machine.
    """
    command = section.command
    assert command is not None
    is_python = section.sandbox and _PYTHON.fullmatch(command[0])
    if not is_python and shutil.which(command[0]) is None:
        path = Path(command[0])
        if path.parent != Path():
            problem = "is not executable; chmod +x it" if path.is_file() else "does not exist"
            raise ConfigError(f"{SETTING}: {command[0]} {problem} (working directory: {Path.cwd()})")
        raise ConfigError(f"{SETTING}: there is no program {command[0]!r} on PATH; install it, or write its whole path")
    if len(command) > 1 and command[1].endswith(_SCRIPTS) and not Path(command[1]).exists():
        raise ConfigError(f"{SETTING}: {command[1]} does not exist (working directory: {Path.cwd()})")
    return CommandAgent(command, section)


def _resolve(command: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """The program and its arguments for another working directory and root, and the files that they name: absolute, without links.

    ["python", "agents/mine.py", "--fast"] -> "/usr/bin/python3.12", ["/home/me/agents/mine.py", "--fast"], [both of these files]
    """
    if _PYTHON.fullmatch(command[0]):
        program = find_interpreter().executable  # that of the run; what PATH has may be a script that looks for one
    else:
        found = shutil.which(command[0])
        assert found is not None  # see load_command_agent
        program = os.path.realpath(found)
    arguments = [os.path.realpath(each) if _is_path(each) else each for each in command[1:]]
    return program, arguments, [program, *(each for each in arguments if os.path.isabs(each) and os.path.exists(each))]


def _is_path(argument: str) -> bool:
    return os.path.isfile(argument) or ("/" in argument and os.path.exists(argument))
