"""The launcher: one command, one terminal, every process of a run.

config -> checks -> plan -> run directory -> supervisor { inference server, torchrun { trainer ranks } } -> summary
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_async.config import ExperimentConfig
    from grpo_async.display.output import Output

__all__ = ["run"]


def run(
    config: ExperimentConfig,
    *,
    resume: str | None,
    clean: bool,
    dry_run: bool,
    node_rank: int | None = None,
    output: Output | None = None,
) -> int:
    """Run an experiment to its end, with all its processes; call it from the main thread.

    Args:
        resume: None begins a new run; "auto" goes on from the newest whole checkpoint, "40" from that of step 40.
        clean: remove an old run of the same name first.
        dry_run: check, print the plan and the resolved configuration, start and write nothing.
        node_rank: which machine of several this is; None: $GRPO_ASYNC_NODE_RANK, else $SLURM_NODEID.
        output: how it tells of itself; None: everything, as a dashboard on a terminal and as lines elsewhere.

    Returns:
        The exit code: 0 finished, 1 failed (the cause is on stderr), 130 after SIGINT, 143 after SIGTERM or SIGHUP.

    Raises:
        ConfigError: the configuration, or something that it names, is wrong; nothing was started.
        RunError: a child could not be started at all, or the machine has no usable temporary folder.
    """
    from grpo_async.launcher.train import launch

    return launch(config, resume=resume, clean=clean, dry_run=dry_run, node_rank=node_rank, output=output)
