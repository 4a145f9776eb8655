"""The instances of one environment: made when first needed, reset often, at most `max_instances` at a time.

A lease takes all of its instances at once or waits, so two leases cannot each hold half. A broken instance is
discarded; one whose call still runs when its lease ends comes back when the call ends. Instances are leased on one
event loop, that of the rollouts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from grpo_async.config.sections import EnvironmentSection
from grpo_async.envs.environment import Environment, EnvironmentCallError, EnvironmentKind, close_instance
from grpo_async.user_code.calls import Raised, UserCall
from grpo_async.user_code.threads import InstanceThread
from grpo_async.user_code.workers import remote_instance

# Threads cannot be killed, and each one holds a connection and a stack. It is better to report that an environment keeps
# hanging than to fill the machine.
MAX_STUCK = 16


class Construction:
    """An instance under construction, in the thread in which it will live, off the event loop, because it may connect to a server.
    `finish` returns the instance when `future` is done; before that, it raises that this takes too long.
    """

    def __init__(self, name: str, factory: Callable[..., Any], section: EnvironmentSection) -> None:
        self.thread = InstanceThread(f"environment-{name}")
        self._name, self._timeout_s = name, section.timeout_s
        self._made: list[Any] = []
        if section.run_in == "process":
            factory = partial(remote_instance, section.factory, f"environment {name}", section.timeout_s)
        call: UserCall[None] = UserCall(factory, section.arguments, self._made.append)
        self.future: Future[Raised | None] = self.thread.post(call.attempt)

    def finish(self) -> Any:
        """The object that the factory made."""
        if not self.future.done():
            raise EnvironmentCallError(
                self._name,
                f"making an instance took longer than {self._timeout_s:g} s; raise `environments.{self._name}.timeout_s` if "
                "this is expected",
            )
        raised = self.future.result(timeout=0.0)
        if raised is not None:
            raise EnvironmentCallError(self._name, f"making an instance {raised.problem}") from raised.error
        return self._made[0]

    def give_up(self) -> Future[Any]:
        """Close the instance, now or when it exists, and end the thread. Does not wait; the returned future is done then."""
        closed = self.thread.post(self._close_made)
        self.thread.stop()
        return closed

    def _close_made(self) -> None:
        for instance in self._made:
            close_instance(instance, self._name, self._timeout_s)


class EnvironmentPool:
    """Instances of one environment."""

    def __init__(self, kind: EnvironmentKind, probe: Environment, extra_schemas: Sequence[Mapping[str, Any]]) -> None:
        self.kind = kind
        self.schemas = [*extra_schemas, *(spec.schema for spec in kind.specs.values())]
        self._free = [probe]
        self._num_taken = 0  # leased, or not back yet
        self._lease_lock = asyncio.Lock()  # held by the lease that waits
        self._freed = asyncio.Event()
        self._returning: set[asyncio.Task[None]] = set()
        self._discarded: list[Future[Any]] = []
        self._closed = False

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def num_stuck(self) -> int:
        """Number of discarded instances whose thread still runs."""
        self._discarded = [freed for freed in self._discarded if not freed.done()]
        return len(self._discarded)

    @asynccontextmanager
    async def lease(self, count: int) -> AsyncIterator[list[Environment]]:
        """Lend `count` instances, which the caller must reset; EnvironmentCallError if one cannot be made. The time limits of other
        rollouts bound the wait."""
        await self._take(count)
        environments: list[Environment] = []
        try:
            await self._fill(environments, count)
            yield list(environments)
        finally:
            self._give_back(environments, count)

    async def aclose(self) -> None:
        """End all instances; leased ones end when they come back. Bounded by the environment's time limit."""
        self._closed = True
        if self._returning:
            await asyncio.wait(set(self._returning), timeout=self.kind.timeout_s + 1.0)
        free, self._free = self._free, []
        await asyncio.gather(*(environment.aclose() for environment in free))

    def discard_free(self) -> None:
        """End the instances that are not leased, without waiting and without an event loop."""
        self._closed = True
        free, self._free = self._free, []
        self._discarded.extend(environment.discard() for environment in free)

    async def _take(self, count: int) -> None:
        limit = self.kind.section.max_instances
        if limit is not None and count > limit:
            raise ValueError(
                f"{count} instances are wanted at once; raise `{self.kind.setting}.max_instances`: {limit}"
            )
        if self._closed:
            raise EnvironmentCallError(self.name, "its pool was closed")
        async with self._lease_lock:  # first come, first served: a later, smaller request does not overtake
            while limit is not None and self._num_taken + count > limit:
                self._freed.clear()
                await self._freed.wait()  # until rollouts end, which have time limits
            self._num_taken += count

    async def _fill(self, environments: list[Environment], count: int) -> None:
        """Append `count` instances to `environments`, each as soon as it exists, so that none is lost if this fails or is
        cancelled."""
        while self._free and len(environments) < count:
            environments.append(self._free.pop())
        missing = count - len(environments)
        if missing:
            # Even if cancelled, gather ends only after all of them.
            made = await asyncio.gather(*(self._add_new(environments) for _ in range(missing)), return_exceptions=True)
            for raised in made:
                if raised is not None:
                    raise raised

    async def _add_new(self, environments: list[Environment]) -> None:
        environments.append(await self._construct())

    async def _construct(self) -> Environment:
        kind = self.kind
        if self.num_stuck >= MAX_STUCK:
            raise EnvironmentCallError(
                self.name, f"{self.num_stuck} of its instances hang in calls past their time limit; no more are made"
            )
        construction = Construction(kind.name, kind.factory, kind.section)
        waiter = asyncio.wrap_future(construction.future)
        try:
            await asyncio.wait({waiter}, timeout=kind.timeout_s)
            instance = construction.finish()
            if type(instance) is not kind.environment_class:
                raise EnvironmentCallError(
                    self.name,
                    f"its factory made a {type(instance).__name__}, after a {kind.environment_class.__name__}; all instances "
                    "must be of one class, because they have the same tools",
                )
        except BaseException:  # also when cancelled: an instance that is still being made must be closed
            self._discarded.append(construction.give_up())
            raise
        finally:
            waiter.cancel()  # no effect if it is done
        return Environment(instance, kind, construction.thread)

    def _give_back(self, environments: Sequence[Environment], count: int) -> None:
        self._num_taken -= count - len(environments)
        for environment in environments:
            if environment.is_idle:
                self._put_back(environment)
            else:
                task = asyncio.get_running_loop().create_task(self._put_back_when_idle(environment))
                self._returning.add(task)
                task.add_done_callback(self._returning.discard)
        self._freed.set()

    async def _put_back_when_idle(self, environment: Environment) -> None:
        try:
            await environment.wait_idle()
        finally:  # also when the event loop ends
            self._put_back(environment)

    def _put_back(self, environment: Environment) -> None:
        self._num_taken -= 1
        self._freed.set()
        if self._closed or environment.broken is not None or not environment.is_idle:
            self._discarded.append(environment.discard())
        else:
            self._free.append(environment)
