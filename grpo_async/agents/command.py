"""Agents that are a command: one process for each rollout, which finds the model through environment variables.

    row as JSON -> stdin | launcher -> command -> ... | stdout -> last line: the result as JSON
                                                   | stderr -> its end, for the message about a rollout that failed

Invariant: when a run is over (it ended, failed, took too long, was cancelled, or this process was killed), the command and all
processes that it started are dead: `sandbox.execution`, which starts it with or without the sandbox, ensures that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import date, time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from grpo_async.agents.agent import Agent, AgentError, AgentResult, read_result
from grpo_async.agents.session import AgentSession
from grpo_async.config.sections import AgentSection
from grpo_async.errors import ConfigError
from grpo_async.inference.token import TOKEN_VARIABLE
from grpo_async.sandbox import (
    FILESYSTEM,
    REQUIRED,
    Sandbox,
    SandboxError,
    SandboxLimits,
    SandboxResult,
    SandboxStatus,
    has_loopback,
)
from grpo_async.sandbox import startup_notes as sandbox_notes
from grpo_async.sandbox.execution import START_TIMEOUT_S, Job, execute, find_interpreter
from grpo_async.sandbox.inside.loopback import PORT
from grpo_async.utils.files import json_safe
from grpo_async.utils.processes import describe_exit
from grpo_async.utils.text import clipped, last_line

SETTING = "rollout.agent.command"

_END_TIMEOUT_S = 10.0
_MAX_STDOUT = 1 << 20  # characters; a command that writes more is killed
_MAX_STDERR = 4096  # characters kept from its end
_MAX_SHOWN = 500  # characters quoted in a message
_HIDDEN_VARIABLES = (
    TOKEN_VARIABLE,  # token of the inference servers
    "ANTHROPIC_AUTH_TOKEN",  # Anthropic's client would prefer it to the key of the session
)
_SCRIPTS = (".py", ".js", ".mjs", ".ts", ".sh", ".rb", ".pl")
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_SANDBOX_MEMORY_MB = 2048
_NO_LIMIT = 1 << 30
_SANDBOX_REQUIRES = (*REQUIRED, FILESYSTEM)


class CommandAgent(Agent):
    """See the module's docstring.

    Args:
        command: the program and its arguments.
        section: `rollout.agent` of the configuration.

    Raises:
        ConfigError: the sandbox cannot enforce what an agent needs on this machine.
    """

    start_timeout_s = START_TIMEOUT_S

    def __init__(self, command: Sequence[str], section: AgentSection) -> None:
        self._name = command[0]
        self._section = section
        self._limits = SandboxLimits(
            wall_s=section.timeout_s,
            cpu_s=section.timeout_s if section.sandbox else _NO_LIMIT,
            memory_mb=section.memory_mb or (_SANDBOX_MEMORY_MB if section.sandbox else _NO_LIMIT),
            file_mb=256,
            directory_mb=1024,
            max_processes=128,
            max_output_chars=_MAX_STDOUT,
        )
        self._sandbox: Sandbox | None = None
        self._command = list(command)
        if section.sandbox:
            if not has_loopback():
                raise ConfigError(
                    "rollout.agent.sandbox: without user namespaces, which this machine does not give, the sandbox denies every "
                    "connection, that to the model too; allow them (sysctl user.max_user_namespaces > 0, kernel.apparmor_"
                    "restrict_unprivileged_userns=0), or set sandbox: false and start the run in a container"
                )
            self._command, named = _resolve(command)
            allowed = [*named, *(os.path.realpath(path) for path in section.read_paths)]
            self._sandbox = Sandbox(
                self._limits, require=_SANDBOX_REQUIRES, with_site_packages=True, read_paths=allowed
            )

    async def run(self, row: Mapping[str, Any], session: AgentSession) -> AgentResult:
        stdin = json.dumps(json_safe(row), default=_plain)  # not orjson: integers of any size, and lone surrogates
        run = self._run if self._sandbox is None else self._run_in_sandbox
        try:
            result = await run(stdin, session)
        except (SandboxError, OSError) as error:
            lacks_resources = isinstance(error.__cause__ or error, OSError)  # out of processes or descriptors
            hint = "; lower rollout.agent.max_concurrent" if lacks_resources else ""
            raise AgentError(f"the agent's command ({self._name}) could not be started: {error}{hint}") from error
        if problem := self._problem_of(result):
            said = result.stderr.strip()[-_MAX_SHOWN:]
            end = f"its stderr ends: {said}" if said else "its stderr is empty"
            raise AgentError(f"the agent's command {problem}; {end}")
        return read_result(_last_json(result.stdout))

    def notes(self) -> list[str]:
        return sandbox_notes(_SANDBOX_REQUIRES) if self._sandbox is not None else []

    async def _run(self, stdin: str, session: AgentSession) -> SandboxResult:
        job = Job(
            command=self._command,
            environment=_environment(session),
            stdin=stdin,
            limits=self._limits,
            interpreter=find_interpreter(),
            is_confined=False,
            stderr_end=_MAX_STDERR,
        )
        return (await execute(job))[0]

    async def _run_in_sandbox(self, stdin: str, session: AgentSession) -> SandboxResult:
        """Run it in the sandbox, with its own loopback on which one port leads to the endpoint."""
        assert self._sandbox is not None
        own_url = f"http://127.0.0.1:{PORT}"
        ours, theirs = socket.socketpair()
        with ours, theirs:
            async with _serving(ours, session):
                return await self._sandbox.run_command(
                    self._command,
                    environment=_model_variables(session, f"{own_url}/v1", own_url),
                    stdin=stdin,
                    loopback=theirs.fileno(),
                    stderr_end=_MAX_STDERR,
                )

    def _problem_of(self, result: SandboxResult) -> str:
        """What went wrong; "" if nothing did."""
        timeout_s, memory_mb = self._section.timeout_s, self._limits.memory_mb
        limit = "" if memory_mb == _NO_LIMIT else f" (rollout.agent.memory_mb = {memory_mb})"
        problems = {
            SandboxStatus.OK: "",
            SandboxStatus.TIMEOUT: f"did not end within rollout.agent.timeout_s = {timeout_s:g} s and was killed",
            SandboxStatus.OUTPUT: f"wrote more than {_MAX_STDOUT} characters to stdout and was killed",
            SandboxStatus.MEMORY: f"ran out of memory{limit}",
            SandboxStatus.CPU: f"took more than rollout.agent.timeout_s = {timeout_s:g} s of CPU time and was killed",
        }
        return problems.get(result.status, f"({self._name}) {describe_exit(result.exit_code or 0)}")


def _environment(session: AgentSession) -> dict[str, str]:
    """This process's environment without its secrets, plus the variables of the model."""
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


def _plain(value: Any) -> str:
    return value.isoformat() if isinstance(value, (date, time)) else str(value)


def _last_json(stdout: str) -> Any:
    """The last non-empty line, or the whole output, as JSON; None if nothing was written.

    "step 1\\n{"reward": 0.5}\\n" -> {"reward": 0.5}
    """
    last = last_line(stdout.replace("\r", "\n"))  # a progress bar ends with \r
    if not last:
        return None
    for text in (last, stdout):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
    raise AgentError(
        f"the last line that the agent's command wrote to stdout is not JSON: {clipped(last, 200)!r}; its result "
        'belongs there, such as {"reward": 1.0}, and logs on stderr; a command without a result prints nothing'
    )


@asynccontextmanager
async def _serving(channel: socket.socket, session: AgentSession) -> AsyncIterator[None]:
    """While the block runs, the endpoint answers at the port in the sandbox, whose listening socket arrives through `channel`."""
    task = asyncio.create_task(_serve(channel, session))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=_END_TIMEOUT_S)


async def _serve(channel: socket.socket, session: AgentSession) -> None:
    """Serve until cancelled."""
    assert session.serve is not None
    loop = asyncio.get_running_loop()
    channel.setblocking(False)
    has_listener = asyncio.Event()
    loop.add_reader(channel, has_listener.set)
    try:
        await has_listener.wait()  # cancelled with the run, whose limit is wall_s
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


def load_command_agent(section: AgentSection) -> CommandAgent:
    """Find the program and build the agent.

    Raises:
        ConfigError: the program does not exist, or the sandbox cannot enforce what an agent needs on this machine.
    """
    command = section.command
    assert command is not None
    is_python = section.sandbox and _PYTHON.fullmatch(command[0])
    if not is_python and shutil.which(command[0]) is None:
        path = Path(command[0])
        problem = "is not on PATH; install it, or write its whole path"
        if path.parent != Path():
            problem = "is not executable; chmod +x it" if path.is_file() else "does not exist"
        raise ConfigError(f"{SETTING}: {command[0]} {problem} (working directory: {Path.cwd()})")
    if len(command) > 1 and command[1].endswith(_SCRIPTS) and not Path(command[1]).exists():
        raise ConfigError(f"{SETTING}: {command[1]} does not exist (working directory: {Path.cwd()})")
    return CommandAgent(command, section)


def _resolve(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command for another working directory and root, and the files that it names, as absolute paths without links.

    ["python", "agents/mine.py", "--fast"] -> ["/usr/bin/python3.12", "/home/me/agents/mine.py", "--fast"], [both of these files]
    """
    if _PYTHON.fullmatch(command[0]):
        program = find_interpreter().executable  # the run's Python; on PATH there may be a wrapper script
    else:
        found = shutil.which(command[0])
        assert found is not None  # see load_command_agent
        program = os.path.realpath(found)
    resolved = [program, *(os.path.realpath(each) if _is_path(each) else each for each in command[1:])]
    return resolved, [each for each in resolved if os.path.isabs(each) and os.path.exists(each)]


def _is_path(argument: str) -> bool:
    return os.path.isfile(argument) or ("/" in argument and os.path.exists(argument))
