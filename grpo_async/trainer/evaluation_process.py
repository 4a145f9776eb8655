"""The process of `grpo-async eval` that queries the servers: rollouts, rewards and metrics as in a run, without a trainer.

wait for a server -> take the model that it has loaded -> evaluate -> send the result to the launcher
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.inference.fleet import Fleet, ServerState
from grpo_async.processes.assignment import Assignment
from grpo_async.processes.control import ControlClient
from grpo_async.processes.entry import run_process
from grpo_async.utils.concurrency import call_when_set, close_all
from grpo_async.utils.text import count

_CLOSE_TIMEOUT_S = 10.0


def evaluate_served(assignment: Assignment, config: ExperimentConfig, control: ControlClient) -> None:
    """Run this process from start to end."""
    from grpo_async.store.rollout_store import RolloutStore, all_groups
    from grpo_async.trainer.connections import open_fleet

    with ExitStack() as stack:
        fleet = open_fleet(config, assignment.server_urls, control, stack)
        store = stack.enter_context(
            RolloutStore(assignment.run_dir.rollouts, settings=all_groups(config.record.rollouts))
        )
        control.send("phase", name="waiting for the server")
        _serve_what_is_loaded(config, fleet, control)
        fleet.start()
        is_ready = fleet.wait_until_up(deadline_s=config.inference.startup_timeout_s, stop=control.stop_requested)
        result = _run(config, control, fleet, store, stack) if is_ready else None
        if result is None:
            return  # stopped
        info = next((server.info for server in fleet.serving() if server.info is not None), None)
        result["engine"] = "unknown" if info is None else info.engine
        control.send("summary", summary=result)


def _serve_what_is_loaded(config: ExperimentConfig, fleet: Fleet, control: ControlClient) -> None:
    """Mark each server that comes up, also after a restart, as serving the model that it loaded at its start."""
    from grpo_async.trainer.weight_sync import check_server

    def take() -> None:
        for server in fleet.servers_up():
            if server.state is ServerState.SERVING:
                continue
            assert server.info is not None  # a ready server has reported its info
            try:
                check_server(server.info, config)
            except ConfigError as error:
                fleet.give_up(server, str(error))
                continue
            if fleet.mark_serving([server], version=server.info.policy_version):
                control.send("server_serving", index=server.index)

    fleet.subscribe(take)


def _run(
    config: ExperimentConfig, control: ControlClient, fleet: Fleet, store: Any, stack: ExitStack
) -> dict[str, Any] | None:
    """Run the evaluation. Returns the result; None when it was stopped."""
    from grpo_async.chat.renderer import load_renderer
    from grpo_async.evaluation.evaluator import EvaluationTask, build_evaluator
    from grpo_async.inference.router import MAX_INT32
    from grpo_async.trainer.connections import make_client
    from grpo_async.trainer.rollout_side import load_rollout_inputs

    section = config.evaluation
    assert section is not None  # checked by the launcher
    renderer = load_renderer(config)
    inputs = load_rollout_inputs(config, renderer)
    for reward in inputs.rewards:
        stack.callback(reward.close)
    # the smallest model's; whether the tokenizer fits it was checked before the start
    sizes = [server.info.vocab_size for server in fleet.servers_up() if server.info and server.info.vocab_size]
    client = make_client(config, fleet, vocab_size=min(sizes, default=MAX_INT32 + 1))

    def served_version() -> int:
        return max((server.info.policy_version for server in fleet.serving() if server.info is not None), default=0)

    evaluator = build_evaluator(config, inputs.data, inputs.components, inputs.scorer, client=client, renderer=renderer)
    assert evaluator is not None
    num_prompts = min(section.num_prompts, len(inputs.data.evaluation or ()))
    control.send(
        "phase",
        name=f"evaluating: {count(num_prompts, 'prompt')}, {count(section.samples_per_prompt, 'completion')} each",
    )
    task = EvaluationTask(
        step=0,
        served_version=served_version,
        max_in_flight=config.max_in_flight_evaluation_only,
        store=store,
        tell=lambda done: control.send("phase", name=f"evaluating: {done}"),
    )

    async def run() -> dict[str, Any] | None:
        running = asyncio.ensure_future(evaluator.run(task))
        loop = asyncio.get_running_loop()

        def cancel() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(running.cancel)

        call_when_set(control.stop_requested, cancel)
        try:
            result = await running
        except asyncio.CancelledError:
            return None
        finally:
            await close_all([inputs.components.aclose, client.aclose], timeout_s=_CLOSE_TIMEOUT_S)
        baseline = {} if evaluator.majority_baseline is None else {"majority_baseline": evaluator.majority_baseline}
        return {"metrics": result.metrics, "by_group": result.by_group, "group_by": section.group_by, **baseline}

    return asyncio.run(run())


if __name__ == "__main__":
    run_process("evaluation rank", evaluate_served)
