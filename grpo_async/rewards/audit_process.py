"""`audit.observe` in a process of its own: a function that holds the interpreter (one long regular expression, one huge power)
stops every time limit that is kept inside its process. Here it is killed, and what was seen until then is kept.

    parent                                       child
    _Order (section, prompts, cases)  ------>    loads the function, `observe`s
    _Trying, Observation, ...         <------    as it happens
    Observations, or _Failed          <------    at the end
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from grpo_async.config.interaction_sections import RewardSection
from grpo_async.errors import ConfigError, GrpoAsyncError
from grpo_async.records import Prompt
from grpo_async.rewards.audit import Sink, observe
from grpo_async.rewards.findings import Observation, Observations
from grpo_async.rewards.fuzz import Case
from grpo_async.rewards.load import load_reward
from grpo_async.rewards.pool import START_TIMEOUT_S
from grpo_async.rewards.process import READY, WorkerProcess
from grpo_async.utils.lifetime import die_with_parent

_GRACE_S = 10.0  # beyond the function's own time limit


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    section: dict[str, Any]
    path: str
    prompts: Sequence[Prompt]
    rows: Sequence[Sequence[Case]]
    seed: int
    slow_s: float


@dataclass(frozen=True, slots=True)
class _Trying:
    row: int
    name: str


@dataclass(frozen=True, slots=True)
class _Failed:
    problem: str


def observe_in_process(
    section: RewardSection,
    path: str,
    prompts: Sequence[Prompt],
    rows: Sequence[Sequence[Case]],
    *,
    seed: int,
    slow_s: float,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Observations:
    """What `observe` saw; with `stopped` set if its process had to be killed or died.

    Raises:
        ConfigError: the function cannot be loaded there, or a column cannot be pickled.
    """
    order = _Order(
        section=section.model_dump(mode="json"), path=path, prompts=prompts, rows=rows, seed=seed, slow_s=slow_s
    )
    try:
        payload = pickle.dumps(order)
    except Exception as error:
        raise ConfigError(
            f"{path}: a column cannot be sent to the process that checks the function: {error}"
        ) from error
    worker = WorkerProcess(section.function, module=__name__)
    try:
        worker.wait_until_ready(START_TIMEOUT_S)
        worker.send(payload, START_TIMEOUT_S)
        return _follow(worker, section, sum(len(cases) for cases in rows), on_progress)
    finally:
        worker.kill()
        worker.close()


def _follow(
    worker: WorkerProcess, section: RewardSection, total: int, on_progress: Callable[[int, int], None]
) -> Observations:
    singles: list[Observation] = []
    trying: _Trying | None = None
    while True:
        starts = trying is None or section.run_in == "process"
        patience_s = section.timeout_s + _GRACE_S + (START_TIMEOUT_S if starts else 0.0)
        try:
            message = pickle.loads(worker.receive(patience_s))
        except TimeoutError:
            why = (
                f"did not come back within {section.timeout_s + _GRACE_S:.0f} s and had to be killed: it holds the interpreter "
                "or the event loop, so no time limit can end it and in training everything would stand still; set "
                "`run_in: process`"
            )
            return Observations(singles=singles, stopped=_stopped(trying, why))
        except (EOFError, OSError):
            return Observations(singles=singles, stopped=_stopped(trying, f"ended its process (exit {worker.reap()})"))
        if isinstance(message, _Trying):
            trying = message
        elif isinstance(message, Observation):
            singles.append(message)
            on_progress(len(singles), total)
        elif isinstance(message, Observations):
            return message
        elif isinstance(message, _Failed):
            raise ConfigError(message.problem)


def _stopped(trying: _Trying | None, why: str) -> str:
    where = "While it was imported, it" if trying is None else f"With `{trying.name}` on row {trying.row} it"
    return f"{where} {why}"


def main(descriptor: int, reference: str) -> None:
    """The child. What functions print goes to stderr: the parent's stdout is the report."""
    die_with_parent()
    os.dup2(2, 1)
    with Connection(descriptor) as connection:
        connection.send_bytes(READY)  # the owner kills this process
        order: _Order = pickle.loads(connection.recv_bytes())

        def send(message: Any) -> None:
            connection.send_bytes(pickle.dumps(message))

        try:
            # one worker: `observe` makes one call at a time, and the start of a second would be taken for a slow call
            reward = load_reward(RewardSection.model_validate(order.section), order.path, num_workers=1)
        except GrpoAsyncError as error:
            send(_Failed(f"{reference}: {error}"))
            return
        sink = Sink(trying=lambda row, name: send(_Trying(row, name)), seen=send)
        try:
            seen = asyncio.run(
                observe(reward, order.prompts, order.rows, seed=order.seed, slow_s=order.slow_s, sink=sink)
            )
        finally:
            reward.close()
        send(seen)
