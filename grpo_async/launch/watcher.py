"""Watches from outside that the trainer lives and makes progress; a watcher inside stands still with it.

    sign of life                 deadline                      sent by
    heartbeat of each process    launch.heartbeat_timeout_s    processes.heartbeat, every second
    progress of the run          training.stall_timeout_s      trainer.progress, every few seconds
    the run directory is there   none                          this process looks

When a deadline has passed, the stacks of all threads are written and `trouble` is set: the supervisor saves what can be saved
and ends the run with `failure`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import psutil

from grpo_async.config import ExperimentConfig
from grpo_async.processes.assignment import Assignment
from grpo_async.processes.heartbeat import (
    INTERVAL_S,
    MAX_DATAGRAM,
    STACKS_SIGNAL,
    RankEnd,
    stacks_file,
)
from grpo_async.run_directory import attempt_config
from grpo_async.utils.concurrency import in_thread
from grpo_async.utils.processes import is_running
from grpo_async.utils.safe_text import plain

_WARNING_S = 30.0
_OWN_PAUSE_S = 5.0
"""This process stood still itself (Ctrl-Z, a scheduler that suspends the job): nobody else was silent meanwhile."""
_STACKS_S = 3.0  # for the stacks to be written, and for a process that was stopped to give a sign of life
_MAX_FRAMES = 12
_NOTICE_S = 5.0  # torchrun notices a death within this; it kills ranks that outlive its SIGTERM only after 30 s


@dataclass(slots=True)
class _Process:
    """`seen_at` is the time of its last heartbeat on the monotonic clock."""

    name: str
    pid: int
    seen_at: float
    is_warned_of: bool = False

    def describe(self, now: float) -> str:
        return (
            f"{self.name} (pid {self.pid}) has given no sign of life for {now - self.seen_at:.0f} s: it was stopped "
            "(SIGSTOP), or some code in it holds the GIL"
        )


class Cause(NamedTuple):
    """The rank that failed first, and a few lines for the user. Safe to print: errors quote what models and tools wrote."""

    rank: int
    text: str


class Watcher:
    """See the module's docstring. An async context manager. `warn` tells the user.

    Attributes:
        trouble: set when a deadline has passed; `failure` says who, how, and where in its code.
        can_save: the trainer still gives signs of life, so it may save when it is asked to.
        ends: what ranks and torchrun have said of the ends of ranks.
    """

    def __init__(self, assignment: Assignment, config: ExperimentConfig, warn: Callable[[str], None]) -> None:
        self._assignment = assignment
        self._timeout_s = config.launch.heartbeat_timeout_s
        self._stall_timeout_s = config.training.stall_timeout_s
        self._warn = warn
        self._processes: dict[int, _Process] = {}
        # the run directory itself may survive `rm -rf`, by a file that is written meanwhile, or be another one of that name; nobody
        # replaces this file, and while it is open no other can get its inode
        self._file = attempt_config(assignment.attempt_dir)
        self._descriptor = os.open(self._file, os.O_RDONLY)
        self.trouble = asyncio.Event()
        self.failure: str | None = None
        self.can_save = False
        self.ends: list[RankEnd] = []

    async def __aenter__(self) -> Self:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(self._assignment.heartbeat_socket))
        asyncio.get_running_loop().add_reader(self._socket, self._receive)
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        os.close(self._descriptor)

    def silent(self) -> str | None:
        """Describe the process that the user was warned of, which is the cause of what fails after it; None: there is none."""
        warned = [process for process in self._processes.values() if process.is_warned_of]
        return min(warned, key=lambda process: process.seen_at).describe(time.monotonic()) if warned else None

    def explain(self) -> Cause | None:
        """Return which rank failed first and why; None: none has said anything."""
        self._receive()
        return explain(self.ends)

    def lost_run_dir(self) -> str | None:
        """Look whether the run directory is where it was; return what happened and what to do, or None."""
        try:
            if os.path.samestat(os.stat(self._file), os.fstat(self._descriptor)):
                return None
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:  # a file system that cannot be reached for a while
            return None
        return (
            f"the run directory {self._assignment.run_dir.root} was deleted or renamed during the run; rename it back and "
            "continue with --resume, or begin again"
        )

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:  # until nothing is left
                message = json.loads(self._socket.recv(MAX_DATAGRAM))  # does not block
                match message["kind"]:
                    case "heartbeat":
                        pid = message["pid"]
                        self._processes[pid] = _Process(message["name"], pid, time.monotonic())
                    case "progress" if message["unchanged_s"] >= self._stall_timeout_s:
                        self.can_save = True
                        self._fail(message["text"])
                    case "end":
                        self.ends.append(RankEnd(**message["end"]))

    async def _watch(self) -> None:
        looked_at = time.monotonic()
        while not self.trouble.is_set():
            await asyncio.sleep(INTERVAL_S)  # back-off until the next look; cancelled with the run
            self._receive()
            now = time.monotonic()
            if now - looked_at > INTERVAL_S + _OWN_PAUSE_S:
                for process in self._processes.values():
                    process.seen_at = now
            looked_at = now
            for process in list(self._processes.values()):
                await self._check(process, now)
            # in a thread: a file system that hangs must not hold up the launcher
            lost = await asyncio.wrap_future(in_thread(self.lost_run_dir, name="watch-run-dir"))
            if lost is not None:
                self._fail(lost)

    async def _check(self, process: _Process, now: float) -> None:
        silent_s = now - process.seen_at
        if silent_s < INTERVAL_S:
            return
        if not is_running(process.pid):  # others say how it has ended
            if not process.is_warned_of:
                del self._processes[process.pid]
        elif silent_s >= self._timeout_s:
            text = process.describe(now)
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                # one that was stopped writes its stacks when it goes on (processes.heartbeat)
                if psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                    os.kill(process.pid, STACKS_SIGNAL)
                os.kill(process.pid, signal.SIGCONT)
            await asyncio.sleep(_STACKS_S)  # back-off: for the process to be back, if it was only stopped
            self._receive()
            self.can_save = self._processes[process.pid].seen_at > process.seen_at
            how = "Raise `launch.heartbeat_timeout_s` if this is expected; a reward that computes for long may `run_in: process`."
            self._fail("\n".join([text, *self._stacks(process.pid, process.name), how]))
        elif silent_s >= min(_WARNING_S, self._timeout_s / 2) and not process.is_warned_of:
            process.is_warned_of = True
            limit = f"the run ends after {self._timeout_s:g} s (launch.heartbeat_timeout_s)"
            self._warn(f"{process.describe(now)}; {limit}")

    def _fail(self, failure: str) -> None:
        if not self.trouble.is_set():
            self.failure = plain(failure)
            self.trouble.set()

    def keep_stacks(self) -> None:
        """Copy the stacks that processes have written to the logs."""
        for process in self._processes.values():
            self._stacks(process.pid, process.name)

    def _stacks(self, pid: int, name: str) -> list[str]:
        """Keep the stacks of a process in the logs; return lines that say where its threads are, in code that is no library's."""
        written = stacks_file(self._assignment.heartbeat_socket, pid)
        target = self._assignment.attempt_dir / f"stacks_{name.replace(' ', '_')}.txt"
        try:
            stacks = written.read_text(encoding="utf-8", errors="replace")
            if not stacks:
                return []
            shutil.copyfile(written, target)
        except OSError:  # a full disk
            return []
        libraries = (sysconfig.get_path("stdlib"), "site-packages", "<frozen")
        frames: dict[str, None] = {}  # each once, in order
        for thread in stacks.split("\n\n"):
            lines = [line for line in thread.splitlines() if line.startswith("  File ")]
            own = [line for line in lines if not any(library in line for library in libraries)]
            frames.update(dict.fromkeys(own[:1]))
        shown = list(frames)[:_MAX_FRAMES]
        return [*(["its threads are in:", *shown] if shown else []), f"the stacks of all its threads: {target}"]


def explain(ends: Sequence[RankEnd]) -> Cause | None:
    """Return which rank failed first and why; None when nothing was reported. The earliest error is the cause of the others, unless
    a signal ended a rank before it could say anything. Having seen one end, the agent ends the others by SIGTERM, so that signal
    counts for the first one only."""
    ends = sorted(ends, key=lambda end: end.time)
    errors, exits = [end for end in ends if end.error is not None], [end for end in ends if end.error is None]
    reported = {end.rank for end in errors}
    for index, end in enumerate(exits):
        is_killed = end.status < 0 and end.rank not in reported and (index == 0 or end.status != -signal.SIGTERM)
        if is_killed and (not errors or errors[0].time > end.time - _NOTICE_S):
            after = [f"after that rank {errors[0].rank} reported: {errors[0].error}"] if errors else []
            return Cause(end.rank, plain("\n".join([end.text, *after])))
        if is_killed:
            break
    return Cause(errors[0].rank, plain(errors[0].text)) if errors else None
