"""Entry point of every trainer rank (`torchrun -m grpo_async.launch.trainer`).

Rank 0 leads (launch.lead), the others follow its commands (training.loop.follow). Failures are written for the launcher before
the process ends.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.loader import load_config
from grpo_async.launch.assignment import Assignment
from grpo_async.launch.control import ControlClient
from grpo_async.launch.failures import write_failure
from grpo_async.processes import die_with_parent

logger = logging.getLogger("grpo_async.trainer")


def main() -> int:
    """Run this rank; the exit code is 0 for a finished or politely stopped run, 1 otherwise."""
    die_with_parent()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    place = Assignment.from_environment()
    control = ControlClient.from_environment() if place.rank == 0 else ControlClient(None)
    try:
        _run_rank(place, load_config(place.rundir.config), control)
    except BaseException as error:
        logger.exception("rank %d failed", place.rank)
        write_failure(place.attempt_dir, place.rank, error)
        text = "".join(traceback.format_exception(error))
        control.send("failed", rank=place.rank, error=f"{type(error).__name__}: {error}", traceback=text)
        control.close()
        logging.shutdown()
        # the other ranks may sit in a collective that this rank will never join: end at once, torchrun ends them
        os._exit(1)
    control.close()
    return 0


def _run_rank(place: Assignment, config: ExperimentConfig, control: ControlClient) -> None:
    control.send("phase", name="loading the model")
    import torch  # here, so that a broken installation is reported like any other failure
    import torch.distributed as dist

    from grpo_async.launch.lead import lead
    from grpo_async.launch.renderer import load_renderer
    from grpo_async.launch.workplace import build_workplace, join_process_group
    from grpo_async.training.checkpoint import load_tensors
    from grpo_async.training.workplace import follow

    torch.set_num_threads(config.launch.trainer_threads)
    torch.manual_seed(config.run.seed)
    join_process_group(place, config)
    try:
        renderer = load_renderer(config)
        workplace = build_workplace(place, config, tokenizer=renderer.tokenizer)
        if place.rank == 0:
            lead(place, config, control, workplace, renderer)
        else:
            if place.resume_step is not None:
                load_tensors(
                    place.rundir,
                    place.resume_step,
                    workplace.policy,
                    workplace.optimizer,
                    seed=config.run.seed,
                )
            follow(workplace)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
