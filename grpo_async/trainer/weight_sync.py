"""Brings the trainer's weights to every server that is up, in one group; to follow a push: FleetSync.push here, then
weights/push.py.

A server that fails is fenced, and the push is repeated with the others; those that loaded a part of it pause until then. With no
server left the push is skipped: the weights follow when a server is back (Publisher.push_if_due)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError, GrpoAsyncError, RequestRejectedError, RunError, WeightPushError
from grpo_async.inference.api import ServerInfo
from grpo_async.inference.connect import is_answer
from grpo_async.inference.fleet import Fleet, Server, ServerState
from grpo_async.processes.control import ControlClient
from grpo_async.tracking.timeline import span
from grpo_async.training.verify import MAX_RATIO, LogprobDifference, Score, coarsest_dtype, compare_server
from grpo_async.utils.text import count, format_bytes, shortlist
from grpo_async.weights.buckets import GatheredParameters
from grpo_async.weights.push import GatherCommand, PushFailedError, WeightTransport, push_weights
from grpo_async.weights.receiver import NOT_AS_SENT, NOT_LOADED

logger = logging.getLogger(__name__)

_MAX_UNATTRIBUTED_FAILURES = 3
"""After so many consecutive pushes that failed although no server did, the fault is not with the servers: the run ends."""


class FleetSync:
    """Pushes the trainer's weights to the servers of the fleet; used from the trainer's main thread.

    Args:
        probes: token sequences whose log-probabilities are compared.
        control: told of each server that serves for the first time after a start.

    Attributes:
        served_version: of the last complete push; None before the first."""

    def __init__(
        self,
        config: ExperimentConfig,
        fleet: Fleet,
        transport: WeightTransport,
        parameters: GatheredParameters,
        *,
        probes: Sequence[Sequence[int]],
        control: ControlClient,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._transport = transport
        self._parameters = parameters
        self._probes = probes
        self._control = control
        self._num_pushes = 0
        self.served_version: int | None = None
        self._verify_now = False
        self._group: list[tuple[str, str]] = []  # members of the transport's group
        self._sleeping: list[Server] = []

    def push(self, version: int, *, send_to_ranks: Callable[[GatherCommand], None]) -> dict[str, float] | None:
        """Push the current weights as `version` to every server that is up. Returns metrics; None when no server is up.
        `send_to_ranks`: see push_weights.

        Raises:
            ConfigError: the first server cannot serve this run.
            WeightPushError: an update was refused, or pushes fail although every server is well."""
        self._wake_up()
        # a server may generate before all have the weights
        self._fleet.versions = range(self.served_version or 0, version + 1)
        unattributed = num_wrong = 0
        while servers := self._fit_servers():
            try:
                metrics = self._push_to(servers, version, send_to_ranks)
            except PushFailedError as error:
                self._transport.close()
                causes = [*error.failures.values(), *error.affected.values()]
                num_wrong += sum(NOT_AS_SENT in str(cause) or NOT_LOADED in str(cause) for cause in causes)
                unattributed = 0 if self._fence(servers, error) else unattributed + 1
                if unattributed >= _MAX_UNATTRIBUTED_FAILURES:
                    raise
                logger.warning("%s; pushing again", error)
                continue
            except WeightPushError:
                self._transport.close()
                raise
            self._mark_served(servers, version)
            return metrics | ({"sync/wrong": float(num_wrong)} if num_wrong else {})
        logger.warning("no inference server is up: version %d will be pushed when one is", version)
        return None

    def _push_to(
        self, servers: Sequence[Server], version: int, send_to_ranks: Callable[[GatherCommand], None]
    ) -> dict[str, float]:
        group = [(server.name, server.instance_id) for server in servers]  # a restarted server has left the group
        if self._group != group:
            self._transport.close()
        self._group = group
        with span("push", version=version, servers=len(servers)) as details:
            metrics = push_weights(
                self._parameters,
                version=version,
                servers=[server.control for server in servers],
                transport=self._transport,
                settings=self._config.weights,
                send_to_ranks=send_to_ranks,
                loading=self._fleet.loading_weights,
            )
            details["bytes"] = int(metrics["sync/bytes"])
        phases = ", ".join(
            f"{name} {1000.0 * metrics[f'sync/phase/{name}_s']:.0f}"
            for name in ("pause", "start", "transfer", "finish", "resume")
        )
        logger.info(
            "pushed version %d, %s at %s/s, to %s in %.0f ms (%s)",
            version,
            format_bytes(metrics["sync/bytes"]),
            format_bytes(metrics["sync/bytes_per_s"]),
            count(len(servers), "server"),
            1000.0 * metrics["sync/push_s"],
            phases,
        )
        return metrics

    def _mark_served(self, servers: Sequence[Server], version: int) -> None:
        every = self._config.weights.verify_every_pushes
        joined = self._fleet.mark_serving(servers, version=version)
        is_first = self._num_pushes == 0  # the preflight compares after the first push
        is_due = self._num_pushes % every == 0 or bool(joined) if every else False
        self._verify_now = self._verify_now or (is_due and not is_first)
        self._num_pushes += 1
        self.served_version = version
        self._fleet.versions = range(version, version + 1)
        for server in joined:
            self._control.send("server_serving", index=server.index)

    def _fence(self, servers: Sequence[Server], error: PushFailedError) -> bool:
        for name, cause in error.failures.items():
            server = next(server for server in servers if server.control.name == name)
            reason = f"{error.phase} of a weight push failed: {cause}"
            if is_answer(cause) and self._was_restarted(server):
                continue
            if not isinstance(cause, RequestRejectedError):
                self._fleet.fence(server, reason)
            elif self.served_version is not None and server.state is not ServerState.SERVING:
                logger.error("%s cannot take part in this run: %s", server.name, cause)
                self._fleet.give_up(server, reason)
            else:
                raise error
        return bool(error.failures)

    def _was_restarted(self, server: Server) -> bool:
        """Whether the server was restarted since it was found; if so, the fleet is notified. The new process knows nothing of the
        push, and serves the weights that it was started with."""
        try:
            info = server.control.info()
        except GrpoAsyncError:
            return False
        if info.instance_id == server.instance_id:
            return False
        self._fleet.restarted(server, info)
        return True

    def _fit_servers(self) -> list[Server]:
        """The servers that are up and fit this run. One that does not fit is given up, but ends the run if none has served yet."""
        fit = []
        for server in self._fleet.servers_up():
            assert server.info is not None  # a ready server has reported its info
            try:
                if server.state is ServerState.SERVING or self._is_fit(server, server.info):
                    fit.append(server)
            except ConfigError as error:
                if self.served_version is None:
                    raise
                logger.error("%s cannot take part in this run: %s", server.name, error)
                self._fleet.give_up(server, str(error))
        return fit

    def _is_fit(self, server: Server, info: ServerInfo) -> bool:
        """Whether a server can serve this run; False when it is gone again."""
        check_server(info, self._config)
        wire = self._config.inference.resolved_dtype
        if info.dtype != wire:
            logger.warning(
                "the server serves %s, but inference.dtype is %s: weights are sent as %s and cast by the server",
                info.dtype,
                wire,
                wire,
            )
        try:
            served = server.control.parameters()
        except RequestRejectedError as error:
            raise ConfigError(f"{server.name} cannot take pushed weights: {error}") from error
        except GrpoAsyncError as error:
            self._fleet.fence(server, f"it does not report what it serves: {error}")
            return False
        problems = self._parameters.problems(served)
        if problems:
            raise ConfigError(
                f"{server.name} serves another model than model.path: {self._config.model.path}: {shortlist(problems)}"
            )
        return True

    def verify(self, score: Score, *, is_proof: bool = False) -> dict[str, float]:
        """If a check is due, or for a proof (Publisher), compare the servers with `score`, the trainer's own log-probabilities;
        returns metrics. A server that is gone meanwhile is left to the fleet. Raises RunError: a server serves other weights than
        the trainer has."""
        if not (self._verify_now or is_proof) or not self._probes:
            return {}
        version = self.served_version
        assert version is not None
        self._verify_now = False
        servers = self._fleet.serving()
        expected = score(
            self._probes, coarsest_dtype(self._config, [server.info.dtype for server in servers if server.info])
        )
        found: list[LogprobDifference] = []
        for server in servers:
            try:
                compared = compare_server(server.control, self._probes, expected, config=self._config, version=version)
            except RequestRejectedError as error:
                raise RunError(f"{server.name} does not score sequences for the verification: {error}") from error
            except GrpoAsyncError as error:
                logger.warning("%s could not be compared with the trainer: %s", server.name, error)
                self._fleet.suspect(server.index)
                continue
            is_rounding = is_proof and compared.difference.mean <= MAX_RATIO * expected.rounding.mean
            if not (compared.is_same or (is_rounding and compared.versions == [version])):
                if self._was_restarted(server):
                    continue
                test = " (as a test: all are negated, or adapters large)" if is_proof else ""
                raise RunError(
                    f"{server.name} does not serve the trainer's weights after the push of version {version}{test}: it reports "
                    f"version {compared.versions}, and log-probabilities of fixed sequences differ: {compared.text}; see "
                    "weights.verify_tolerance"
                )
            found.append(compared.difference)
        if not found:
            self._verify_now = True
            return {}
        return {
            "sync/verify_mean": max(each.mean for each in found),
            "sync/verify_max": max(each.max for each in found),
            "sync/verify_rounding": expected.rounding.mean,
        }

    def sleep_servers(self) -> None:
        """Called when a step begins to train: with `inference.vllm.sleep_while_training` the servers sleep until the next push."""
        if not self._config.inference.vllm.sleep_while_training:
            return
        for server in self._fleet.serving():
            self._try(server, "sleep", server.control.sleep)
            self._sleeping.append(server)

    def _wake_up(self) -> None:
        sleeping, self._sleeping = self._sleeping, []
        for server in sleeping:
            self._try(server, "wake up", server.control.wake_up)

    def _try(self, server: Server, what: str, call: Callable[..., Any]) -> None:
        try:
            call(timeout_s=self._config.weights.timeout_s)
        except GrpoAsyncError as error:
            self._fleet.fence(server, f"it did not {what}: {error}")


def check_server(info: ServerInfo, config: ExperimentConfig) -> None:
    if info.max_model_len < config.inference.max_model_len:
        raise ConfigError(
            f"the server accepts {info.max_model_len} tokens, but inference.max_model_len is {config.inference.max_model_len}; "
            "start the server with this config, or lower the setting"
        )
    wanted, head = config.model.head_dtype, info.head_dtype or info.dtype
    if wanted is not None and head != wanted:
        raise ConfigError(
            f"model.head_dtype: {wanted}, but the server computes logits in {head}; start it with this config (without "
            "other --hf-overrides), or leave the setting out"
        )
