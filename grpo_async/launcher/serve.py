"""`serve-vllm` and `serve-embedded` with several replicas: the servers of one machine, each with its GPUs. One that dies is started
again.

No trainer looks after them here: it names them in `inference.urls`, and finds one again that was restarted. Configuration and
logs lie in a folder like a run's, run.dir/NAME.serve-PORT.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import dump_config
from grpo_async.config.sections import NodesSection
from grpo_async.display.display import Display
from grpo_async.display.output import Output
from grpo_async.inference.token import token_from_environment
from grpo_async.launcher.child import KILL_TIMEOUT_S, ending_children
from grpo_async.launcher.gpus import share_gpus
from grpo_async.launcher.plan import ProcessSpec, common_environment, own_urls, server_specs
from grpo_async.launcher.reaper import private_folder
from grpo_async.launcher.signals import GRACE_S, Signals, end_children, first_of, unwinding
from grpo_async.launcher.spawned_servers import SpawnedServers
from grpo_async.processes import machine as machine_module
from grpo_async.processes.assignment import Node
from grpo_async.run_directory import RunDir, attempt_config
from grpo_async.servers.engine_choice import EngineChoice

_SERVES = Node(rank=1, num_train=1, num_infer=1)
"""A machine on which nothing trains."""


def serve_replicas(config: ExperimentConfig, engine: EngineChoice, port: int) -> int:
    """Serve `inference.replicas` times, at `port` and those after it, until a signal. Call it from the main thread.

    Returns:
        The exit code: 130 or 143 after a signal, 1 when every server was given up.

    Raises:
        ConfigError: this machine has too few GPUs.
    """
    output = Output()
    with unwinding(), private_folder() as private:
        launch = config.launch.model_copy(update={"nodes": NodesSection(), "server_port": port, "colocate": False})
        config = config.model_copy(update={"launch": launch})
        machine = machine_module.inspect()
        shares = share_gpus(config, engine, machine.gpus, _SERVES)
        run_dir = RunDir((config.run.dir / f"{config.run.name}.serve-{port}").absolute())
        run_dir.create(dump_config(config))
        attempt = run_dir.new_attempt()
        urls = own_urls(config, config.inference.host)
        specs = server_specs(
            config,
            engine,
            machine,
            config_path=attempt_config(attempt),
            private=private,
            urls=urls,
            first=0,
            gpus=shares.servers,
            common=common_environment(machine, token_from_environment(), Node()),
        )
        gpus = [f"GPU {','.join(spec.gpus)}" if spec.gpus else "CPU" for spec in specs]
        output.say(
            "\n".join(f"{spec.name}: {url}, {where}" for spec, url, where in zip(specs, urls, gpus, strict=True))
        )
        display = output.display(run_name=config.run.name, max_steps=0, run_dir=run_dir, lines_only=True)
        with display:
            return asyncio.run(_serve(config, specs, display, attempt))


async def _serve(config: ExperimentConfig, specs: Sequence[ProcessSpec], display: Display, logs: Path) -> int:
    signals = Signals()

    def started(index: int, event: str, detail: str, incarnation: int) -> None:
        server = servers.get(index)
        if (
            event == "starting" and server is not None
        ):  # nobody else says that it serves, which ends a row of restarts in time
            server.count_as_served()

    with signals.installed():
        async with ending_children(logs, display.warning) as children:
            servers = SpawnedServers(
                specs,
                display,
                tell_trainer=started,
                children=children,
                max_restarts=config.inference.max_restarts,
                delay_s=config.inference.restart_delay_s,
            )
            try:
                await servers.start()
                for index in range(len(specs)):
                    started(index, "starting", "", 0)
                await first_of(signals, [], [servers.lost_all])
                servers.raise_errors()
                await servers.stop(GRACE_S)
                await end_children(signals, servers.running)
            finally:
                await servers.abandon(KILL_TIMEOUT_S)
    if signals.first is not None:
        return signals.exit_code
    display.warning(str(servers.failure))
    return 1
