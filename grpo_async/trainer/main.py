"""Entry point of every trainer rank (`torchrun -m grpo_async.trainer.main`).

Rank 0 decides (trainer.start), the others follow its commands (training.ranks.follow).
"""

from __future__ import annotations

import gc
import os
import random
import time
from contextlib import nullcontext
from typing import Any

from grpo_async.config import ExperimentConfig
from grpo_async.processes.assignment import Assignment
from grpo_async.processes.control import ControlClient
from grpo_async.processes.entry import run_process
from grpo_async.run_directory import attempt_number
from grpo_async.tracking.timeline import ATTEMPT, record, recording, span
from grpo_async.utils.processes import importing_much
from grpo_async.utils.seeds import seed_of


def run_rank(assignment: Assignment, config: ExperimentConfig, control: ControlClient) -> None:
    number = attempt_number(assignment.attempt_dir)
    details = {"attempt": number, "process": os.getpid()}
    if assignment.resume_step is not None:
        details["resume_step"] = assignment.resume_step
    with recording(assignment.run_dir.events) if assignment.rank == 0 else nullcontext():
        now = time.time()
        record(ATTEMPT, now, now, **details)  # an attempt that is killed has no span
        with span(ATTEMPT, **details) as attempt:
            _run(assignment, config, control, attempt)


def _run(assignment: Assignment, config: ExperimentConfig, control: ControlClient, attempt: dict[str, Any]) -> None:
    if assignment.rank == 0:
        control.send("phase", name="loading the model")
    began = time.time()
    with importing_much():  # here, so that a broken installation is reported like any other failure
        import numpy as np
        import torch
        import torch.distributed as dist

        from grpo_async.chat.renderer import load_renderer
        from grpo_async.trainer.context import build_context, join_process_group
        from grpo_async.trainer.start import run_rank_zero
        from grpo_async.training.checkpoint import find_undamaged
        from grpo_async.training.ranks import follow

    gc.freeze()  # nor does a later collection walk through all that
    record("importing", began, time.time())
    torch.set_num_threads(config.launch.trainer_threads)
    seed = seed_of(config.run.seed, assignment.resume_step, assignment.rank)  # for the user's code
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    join_process_group(assignment, config)
    try:
        if assignment.resume_step is not None:
            with span("checking the checkpoint") as check:
                step, notes = find_undamaged(
                    assignment.run_dir, assignment.resume_step, is_named=assignment.resume_is_named
                )
                check["resume_step"] = attempt["resume_step"] = step
            for note in notes if assignment.rank == 0 else ():
                control.send("warning", text=note)
            assignment = assignment.model_copy(update={"resume_step": step})
        with span("loading the tokenizer"):
            renderer = load_renderer(config)
        context = build_context(assignment, config, tokenizer=renderer.tokenizer)
        record("loading the model", began, time.time())
        if assignment.rank == 0:
            run_rank_zero(assignment, control, context, renderer)
        else:
            if assignment.resume_step is not None:
                context.load(assignment.resume_step)
            follow(context)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    run_process(run_rank)
