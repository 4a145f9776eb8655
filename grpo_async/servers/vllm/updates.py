"""Weight updates as the API server sees them: a group of workers, an update that all of them staged, and its end.

    join -> start -> receive (staged by every worker, checked) -> apply

Nothing but `apply` touches what is served, and `apply` is one call of the engine core. What a trainer leaves behind at any
earlier moment is dropped by the next `start`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from grpo_async.errors import GrpoAsyncError
from grpo_async.inference.surface import ServedParameters, WeightInitInfo, WeightUpdateInfo
from grpo_async.servers.vllm import compat
from grpo_async.servers.vllm.answers import RefusedError
from grpo_async.servers.vllm.receiver import parameter_specs
from grpo_async.servers.vllm.reports import WorkerReports, collect_reports
from grpo_async.weights.adapters import BaseWeights
from grpo_async.weights.buckets import ITEM_SIZES
from grpo_async.weights.names import check_names

_REPORT_MARGIN_S = 30.0  # the workers have the trainer's deadline; this is for their answer
_READ_TIMEOUT_S = 120.0  # three rows of every tensor, from a disk that may be slow
_SETTING = "weights.timeout_s"
_MAX_NAMED = 5


class SupersededError(GrpoAsyncError):
    """Another trainer, or the same one after a restart, began anew."""


class Updates:
    """Used from one event loop. Calls of one trainer come one after the other; a newer call of `join` or `start` ends the
    waiting of an older one."""

    def __init__(self) -> None:
        self._started = False
        self._staged = False
        self._waiting: WorkerReports | None = None
        self._served: ServedParameters | None = None
        self._base: BaseWeights | None = None

    @property
    def is_staged(self) -> bool:
        return self._staged

    async def parameters(self, engine: Any) -> ServedParameters:
        """What an update has to bring; the same as long as the server runs."""
        if self._served is None:
            served = await compat.served_parameters(engine)
            self._base = BaseWeights(compat.describe(engine).model)
            async with asyncio.timeout(_READ_TIMEOUT_S):
                digest = await asyncio.to_thread(self._base.digest_or_none)
            self._served = served.model_copy(update={"base_digest": digest})
        return self._served

    async def join(self, engine: Any, info: WeightInitInfo) -> None:
        """Every worker meets the trainer's group.

        Raises:
            WorkerFailedError, DeadlineError: the group did not form. SupersededError: somebody else began to join.
        """
        self._forget()
        await self._wait_for_workers(
            engine,
            lambda address: compat.join_weight_group(engine, info, address),
            timeout_s=info.timeout_s,
            what=f"the workers to join the weight group at {info.master_address}:{info.master_port}",
        )

    async def start(self, engine: Any) -> None:
        """Begin an update; what an earlier one left is dropped."""
        self._forget()
        await compat.drop_staged_weights(engine)
        self._started = True

    async def receive(self, engine: Any, info: WeightUpdateInfo) -> None:
        """Every worker receives every parameter and keeps it apart.

        Raises:
            RefusedError: no update was started, or it does not fit the model. WorkerFailedError, DeadlineError: it did not
                arrive. In each case the old weights stay.
        """
        _check_lists(info)
        if not self._started:
            raise RefusedError(409, "no update was started: POST /start_weight_update first")
        self._started = self._staged = False
        if info.base is not None and (await self.parameters(engine)).base_digest != info.base.digest:
            raise RefusedError(400, "adapters of another base than this server's; the old weights stay")
        await self._wait_for_workers(
            engine,
            lambda address: compat.stage_weights(engine, info, address),
            timeout_s=info.timeout_s,
            what="the weights to arrive",
        )
        # only now, when nobody waits for a worker in the middle of a broadcast any more
        problems = await self._mismatches(engine, info)
        if problems:
            await compat.drop_staged_weights(engine)
            more = f" and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
            words = "; ".join(problems[:_MAX_NAMED])
            raise RefusedError(400, f"the update does not fit the model, the old weights stay: {words}{more}")
        self._staged = True

    async def apply(self, engine: Any) -> None:
        """Serve what is staged. A worker that fails half-way ends, and the server with it."""
        assert self._staged, "nothing is staged"
        self._staged = False
        await compat.apply_staged_weights(engine)

    def _forget(self) -> None:
        self._started = self._staged = False
        if self._waiting is not None:
            self._waiting.give_up(SupersededError("another weight update began in the meantime"))

    async def _wait_for_workers(
        self, engine: Any, begin: Callable[[str], Awaitable[None]], *, timeout_s: float, what: str
    ) -> None:
        async with collect_reports() as reports:
            self._waiting = reports
            try:
                await begin(reports.address)
                await reports.wait(
                    compat.describe(engine).num_workers,
                    timeout_s=timeout_s + _REPORT_MARGIN_S,
                    what=what,
                    setting=_SETTING,
                )
            finally:
                if self._waiting is reports:
                    self._waiting = None

    async def _mismatches(self, engine: Any, info: WeightUpdateInfo) -> list[str]:
        served = await self.parameters(engine)
        if not served.shapes:
            compat.logger.warning("cannot check the names of this update: vLLM loaded no checkpoint at start")
        if info.base is not None:
            assert self._base is not None  # its digest was compared
            return self._base.problems(parameter_specs(info), served.shapes, served.optional)
        return check_names(parameter_specs(info), served.shapes, served.optional)


def _check_lists(info: WeightUpdateInfo) -> None:
    unknown = sorted(set(info.dtype_names) - set(ITEM_SIZES))
    if unknown or not len(info.names) == len(info.dtype_names) == len(info.shapes):
        raise RefusedError(
            400,
            f"an update needs a dtype of {sorted(ITEM_SIZES)} and a shape per name, got {len(info.names)} names, "
            f"{len(info.dtype_names)} dtypes (unknown: {unknown}), {len(info.shapes)} shapes",
        )
