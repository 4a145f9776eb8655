"""`serve-vllm` and `serve-embedded` with several replicas: the servers of one machine, each with its GPUs. One that dies is started
again.

No trainer looks after them here: it names them in `inference.urls`, and finds one again that was restarted. Configuration and
logs lie in a folder like a run's, run.dir/NAME.serve-PORT.
"""

from __future__ import annotations

import asyncio
import secrets

from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import dump_config
from grpo_async.display.display import Display
from grpo_async.display.output import Output
from grpo_async.inference.token import token_from_environment
from grpo_async.launch.children import Child, Children, first_of, private_folder
from grpo_async.launch.plan import ProcessPlan, own_urls, plan_processes
from grpo_async.launch.prepare import writing
from grpo_async.launch.servers import Servers
from grpo_async.launch.signals import Signals, exit_on_signals
from grpo_async.processes.assignment import Assignment
from grpo_async.run_directory import RunDir
from grpo_async.servers.engine_choice import EngineChoice


def serve_replicas(config: ExperimentConfig, engine: EngineChoice, port: int) -> int:
    """Serve `inference.replicas` times, at `port` and those after it, until a signal. Call it from the main thread.

    Returns:
        The exit code: 130 or 143 after a signal, 1 when every server was given up.

    Raises:
        ConfigError: this machine has too few GPUs, there are too few ports, or the folder cannot be written.
    """
    output = Output()
    with exit_on_signals(), private_folder() as private:
        changes = {
            "launch": config.launch.on_one_machine(colocate=False),
            "inference": config.inference.model_copy(update={"replicas": config.inference.min_replicas}),
            # those of another machine, with the same config, must not sample the same
            "run": config.run.model_copy(update={"seed": secrets.randbits(31)}),
        }
        config = config.model_copy(update=changes)
        run_dir = RunDir((config.run.dir / f"{config.run.name}.serve-{port}").absolute())
        with writing(run_dir):
            run_dir.create(dump_config(config))
            attempt = run_dir.new_attempt()
        assignment = Assignment(
            run_dir=run_dir,
            attempt_dir=attempt,
            private_dir=private,
            server_urls=own_urls(
                config, config.inference.host, ports=range(port, port + config.inference.max_replicas)
            ),
        )
        plan = plan_processes(
            config, engine=engine, assignment=assignment, token=token_from_environment(), trains=False
        )
        urls, specs = assignment.server_urls, plan.servers
        output.say("\n".join(f"{spec.name}: {url}, {spec.device}" for spec, url in zip(specs, urls, strict=True)))
        display = output.display(run_name=config.run.name, max_steps=0, run_dir=run_dir, lines_only=True)
        with display:
            return asyncio.run(_serve(config, plan, display))


async def _serve(config: ExperimentConfig, plan: ProcessPlan, display: Display) -> int:
    children, signals = Children(plan.assignment.attempt_dir, plan.assignment.private_dir, display.warning), Signals()

    async def spawn(index: int, num_restarts: int) -> Child:
        return await children.spawn(plan.servers[index], num_restarts=num_restarts)

    servers = Servers(config.inference, [spec.name for spec in plan.servers], spawn, display, tell_trainer=None)
    with signals.installed():
        async with children, servers.running():
            await first_of([], [signals.arrived, servers.lost])
            await servers.end(signals)
    if signals.first is not None:
        return signals.exit_code
    display.warning(str(servers.failure))
    return 1
