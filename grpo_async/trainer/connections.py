"""What connects rank 0 (or an evaluation alone) to the inference servers: who watches them, and who sends requests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.errors import InferenceError
from grpo_async.inference.client import InferenceClient
from grpo_async.inference.fleet import Fleet, FleetSettings, Server
from grpo_async.inference.router import ServingServers
from grpo_async.inference.surface import token_from_environment
from grpo_async.processes.control import ControlClient
from grpo_async.trainer.server_news import ServerNews, ServerReport
from grpo_async.utils.retry import RetryPolicy


def open_fleet(config: ExperimentConfig, urls: Sequence[str], control: ControlClient, stack: ExitStack) -> Fleet:
    """The servers at `urls`, not watched yet (`start`). The launcher is told which of its own to restart, and tells what becomes of
    them; of others it hears what happens. Closed with `stack`."""
    inference = config.inference

    def ask_restart(index: int, reason: str) -> None:
        control.send("restart_server", index=index, reason=reason)

    fleet = Fleet(
        urls,
        token=token_from_environment(),
        settings=FleetSettings(
            heartbeat_interval_s=inference.heartbeat_interval_s,
            heartbeat_timeout_s=inference.heartbeat_timeout_s,
            startup_timeout_s=inference.startup_timeout_s,
            longest_startup_s=inference.longest_startup_s,
        ),
        control_timeout_s=config.weights.timeout_s,
        authority=inference.tls.trusted if inference.tls else None,
        ask_restart=None if inference.urls else ask_restart,
    )
    stack.callback(fleet.close)
    control.on_server = fleet.on_launcher_message
    report = ServerReport(fleet, lambda servers: control.send("servers", servers=servers))
    fleet.subscribe(report.on_change)
    fleet.subscribe_load(report.on_load)
    if inference.urls:  # of its own servers the launcher tells by itself
        fleet.subscribe(ServerNews(fleet, lambda text: control.send("phase", name=text)))
    return fleet


def is_lost(fleet: Fleet, server: Server) -> bool:
    """Whether a server has died since its record was read, seen or not."""
    if all(server.instance_id != other.instance_id for other in fleet.serving()):
        return True
    try:
        server.control.is_paused()  # goes through the engine
        return server.control.info().instance_id != server.instance_id
    except InferenceError:
        fleet.suspect(server.index)
        return True


def make_client(config: ExperimentConfig, servers: ServingServers) -> InferenceClient:
    """Sends rollouts' requests to `servers`."""
    inference = config.inference
    return InferenceClient(
        servers,
        token=token_from_environment(),
        request_timeout_s=inference.request_timeout_s,
        wait_timeout_s=inference.longest_outage_s,
        progress_timeout_s=min(config.training.queue_timeout_s, config.training.stall_timeout_s),
        authority=inference.tls.trusted if inference.tls else None,
        retry=RetryPolicy(max_retries=inference.max_retries),
    )
