"""Agents that are a command: one process for each rollout, which reads the row as JSON from stdin, finds the model
through environment variables, and prints its result as the last line of stdout.

When a run is over, however it ends, the command and all processes that it started are dead: `sandbox.execution`
ensures that.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from grpo_async.agents.agent import Agent, AgentError, AgentResult, read_result
from grpo_async.agents.session import AgentSession
from grpo_async.config.sections import AgentSection
from grpo_async.errors import ConfigError
from grpo_async.inference.token import TOKEN_VARIABLE
from grpo_async.sandbox import SandboxError, SandboxLimits, SandboxResult, SandboxStatus
from grpo_async.sandbox.execution import START_TIMEOUT_S, Job, execute, find_interpreter
from grpo_async.utils.files import json_safe
from grpo_async.utils.processes import describe_exit
from grpo_async.utils.text import clipped, last_line

SETTING = "rollout.agent.command"

_MAX_STDOUT = 1 << 20  # characters; a command that writes more is killed
_MAX_STDERR = 4096  # characters kept from its end
_MAX_SHOWN = 500  # characters quoted in a message
_HIDDEN_VARIABLES = (
    TOKEN_VARIABLE,  # token of the inference servers
    "ANTHROPIC_AUTH_TOKEN",  # Anthropic's client would prefer it to the key of the session
)
_SCRIPTS = (".py", ".js", ".mjs", ".ts", ".sh", ".rb", ".pl")
_NO_LIMIT = 1 << 30


class CommandAgent(Agent):
    """See the module's docstring."""

    start_timeout_s = START_TIMEOUT_S

    def __init__(self, command: Sequence[str], section: AgentSection) -> None:
        self._command = list(command)
        self._section = section
        self._limits = SandboxLimits(
            wall_s=section.timeout_s,
            memory_mb=section.memory_mb or _NO_LIMIT,
            max_output_chars=_MAX_STDOUT,
        )

    async def run(self, row: Mapping[str, Any], session: AgentSession) -> AgentResult:
        stdin = json.dumps(json_safe(row), default=_plain)  # not orjson: integers of any size, and lone surrogates
        job = Job(
            command=self._command,
            environment=_environment(session),
            stdin=stdin,
            limits=self._limits,
            interpreter=find_interpreter(),
            is_confined=False,
            stderr_end=_MAX_STDERR,
        )
        try:
            result = await execute(job)
        except (SandboxError, OSError) as error:
            lacks_resources = isinstance(error.__cause__ or error, OSError)  # out of processes or descriptors
            hint = "; lower rollout.agent.max_concurrent" if lacks_resources else ""
            raise AgentError(f"the agent's command ({self._command[0]}) could not be started: {error}{hint}") from error
        if problem := self._problem_of(result):
            said = result.stderr.strip()[-_MAX_SHOWN:]
            end = f"its stderr ends: {said}" if said else "its stderr is empty"
            raise AgentError(f"the agent's command {problem}; {end}")
        return read_result(_last_json(result.stdout))

    def _problem_of(self, result: SandboxResult) -> str:
        """What went wrong; "" if nothing did."""
        timeout_s, memory_mb = self._section.timeout_s, self._limits.memory_mb
        limit = "" if memory_mb == _NO_LIMIT else f" (rollout.agent.memory_mb = {memory_mb})"
        problems = {
            SandboxStatus.OK: "",
            SandboxStatus.TIMEOUT: f"did not end within rollout.agent.timeout_s = {timeout_s:g} s and was killed",
            SandboxStatus.OUTPUT: f"wrote more than {_MAX_STDOUT} characters to stdout and was killed",
            SandboxStatus.MEMORY: f"ran out of memory{limit}",
        }
        return problems.get(result.status, f"({self._command[0]}) {describe_exit(result.exit_code or 0)}")


def _environment(session: AgentSession) -> dict[str, str]:
    """This process's environment without its secrets, plus the variables of the model."""
    kept = {name: value for name, value in os.environ.items() if name not in _HIDDEN_VARIABLES}
    host = urlsplit(session.base_url).hostname or ""
    for name in ("no_proxy", "NO_PROXY"):  # a proxy could not reach the endpoint
        kept[name] = ",".join(filter(None, (kept.get(name), host)))
    return kept | {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_BASE": session.base_url,  # older libraries
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": session.anthropic_base_url,
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


def load_command_agent(section: AgentSection) -> CommandAgent:
    """Find the program and build the agent.

    Raises:
        ConfigError: the program does not exist.
    """
    command = section.command
    assert command is not None
    if shutil.which(command[0]) is None:
        where = f"no program on PATH or in the working directory {Path.cwd()}"
        raise ConfigError(f"{SETTING}: {command[0]} is {where} that can be executed")
    if len(command) > 1 and command[1].endswith(_SCRIPTS) and not Path(command[1]).exists():
        raise ConfigError(f"{SETTING}: {command[1]} does not exist (working directory: {Path.cwd()})")
    return CommandAgent(command, section)
