"""The configuration: `sections` and `experiment` say what may be written, `loader` reads it and reports what is wrong.

The whole `ExperimentConfig` goes to each process as a file in the run directory; each part takes its section where it is built, in
`trainer/context.py`, `trainer/start.py` and `trainer/rollout_side.py` for the trainer, and in `launch/plan.py` for processes.
"""

from grpo_async.config.experiment import ExperimentConfig

__all__ = ["ExperimentConfig"]
