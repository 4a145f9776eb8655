"""Environments: stateful objects whose public methods are tools, one instance per rollout, pooled.

`load_environments` makes pools from the config, `pool.lease(n)` lends instances.
"""

from grpo_async.envs.environment import Environment, EnvironmentCallError
from grpo_async.envs.load import Environments, load_environments
from grpo_async.envs.pool import EnvironmentPool

__all__ = ["Environment", "EnvironmentCallError", "EnvironmentPool", "Environments", "load_environments"]
