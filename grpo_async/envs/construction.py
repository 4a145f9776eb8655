"""An instance on its way: made in the thread in which it will live, off the event loop, for it may connect to a server."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from grpo_async.envs.instance_thread import InstanceThread
from grpo_async.user_code.calls import Raised, UserCall


class Construction:
    """Starts to make an instance. `future` gives None, or what the factory raised; then `instance` is there.

    Args:
        name: of the environment.
        factory: class or function.
        arguments: its keyword arguments.
    """

    def __init__(self, name: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self.thread = InstanceThread(f"environment-{name}")
        self._made: list[Any] = []
        call: UserCall[None] = UserCall(factory, arguments, self._made.append)
        self.future: Future[Raised | None] = self.thread.post(call.attempt)

    @property
    def instance(self) -> Any:
        """What the factory made."""
        return self._made[0]

    def give_up(self) -> Future[Any]:
        """Close what was made, or is still going to be, and end the thread. Does not wait; the future is done then."""
        closed = self.thread.post(UserCall(self._close_made).attempt)
        self.thread.stop()
        return closed

    async def _close_made(self) -> None:
        for instance in self._made:
            close = getattr(instance, "close", None)
            if callable(close) and inspect.isawaitable(closing := close()):
                await closing  # the thread is a daemon
