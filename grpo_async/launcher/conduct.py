"""One plan from its first process to its last, as the user sees it: dashboard or lines, status.json, advice, how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from grpo_async.cluster.node_hub import HubListener, NodeHub
from grpo_async.config import ExperimentConfig
from grpo_async.display.display import Display
from grpo_async.display.output import Output
from grpo_async.display.status_file import StatusFile
from grpo_async.display.summary import print_summary
from grpo_async.findings.pipeline_figures import setup_of
from grpo_async.launcher.advising import Advisor
from grpo_async.launcher.plan import ProcessPlan
from grpo_async.launcher.server_keeper import RestartRules
from grpo_async.launcher.supervisor import Outcome, Supervisor
from grpo_async.rundir import RunDir


def conduct(
    config: ExperimentConfig,
    plan: ProcessPlan,
    output: Output,
    make_hub: Callable[[HubListener], NodeHub] | None,
) -> Outcome:
    """Carry out `plan` in front of the user; status.json and advice.jsonl are kept meanwhile.

    Args:
        make_hub: of several machines, this is node 0: makes the channel to the others.
    """
    run_dir = plan.places.run_dir
    display = output.display(
        run_name=config.run.name,
        max_steps=config.training.max_steps,
        run_dir=run_dir,
        resume_step=plan.resume_step,
        lines_only=plan.preflight_only,
    )
    if plan.preflight_only:  # nothing of it is kept
        return _carry_out(config, plan, display, make_hub)
    on_gpu = bool(plan.trainer.gpus)
    status = StatusFile(
        run_dir,
        display.progress,
        run_name=config.run.name,
        attempt=str(plan.places.attempt),
        engine=plan.engine.engine,
        on_gpu=on_gpu,
        num_gpus=plan.num_gpus,
    )
    output.on_lost = lambda text: display.progress.add_message(text, is_warning=True)  # prints nothing
    advisor = Advisor(
        display,
        setup=setup_of(config, engine=plan.engine.engine, on_gpu=on_gpu, num_gpus=plan.num_gpus),
        every_steps=config.record.advise_every_steps,
        run_dir=run_dir,
        resume_step=plan.resume_step,
    )
    display.views += [status, advisor]
    outcome = _carry_out(config, plan, display, make_hub)
    states = {0: "finished", 1: "failed"}
    status.end(states.get(outcome.exit_code, "stopped"), exit_code=outcome.exit_code, error=outcome.error)
    return outcome


def _carry_out(
    config: ExperimentConfig,
    plan: ProcessPlan,
    display: Display,
    make_hub: Callable[[HubListener], NodeHub] | None,
) -> Outcome:
    restarts = RestartRules(max_restarts=config.inference.max_restarts, delay_s=config.inference.restart_delay_s)
    supervisor = Supervisor(
        plan,
        display,
        stop_timeout_s=config.launch.stop_timeout_s,
        heartbeat_timeout_s=config.launch.heartbeat_timeout_s,
        restarts=restarts,
        make_hub=make_hub,
        rdzv_timeout_s=config.launch.rdzv_timeout_s,
    )
    with display:
        return asyncio.run(supervisor.run())


def report_end(outcome: Outcome, run_dir: RunDir, output: Output, *, report: Path | None = None) -> int:
    """Say how it ended; returns the exit code. `report`: the page about the run, where one is written next."""
    summary = outcome.summary

    def show(console: Console) -> None:
        assert summary is not None
        print_summary(console, summary, run_dir.root, report=report)

    output.end(
        exit_code=outcome.exit_code,
        error=outcome.error,
        summary=summary,
        show=None if summary is None else show,
    )
    if summary is None and report is not None:
        output.say(f"what the run did until then: {report}")
    output.console.file.flush()  # whatever comes after it
    return outcome.exit_code
