"""The configuration: `sections` and `experiment` say what may be written, `loader` reads it, `problems` reports what is wrong."""

from grpo_async.config.experiment import ExperimentConfig

__all__ = ["ExperimentConfig"]
