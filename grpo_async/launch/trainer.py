"""Entry point of every trainer rank (`torchrun -m grpo_async.launch.trainer`).

Rank 0 leads (launch.lead), the others follow its commands (training.workplace.follow).
"""

from __future__ import annotations

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.launch.assignment import Assignment
from grpo_async.launch.control import ControlClient
from grpo_async.launch.entry import run_process


def run_rank(place: Assignment, config: ExperimentConfig, control: ControlClient) -> None:
    """The whole life of this rank."""
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
    run_process("rank", run_rank)
