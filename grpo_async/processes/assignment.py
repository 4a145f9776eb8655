"""What the launcher tells a trainer rank, by environment variables (see launch.plan, which sets them)."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from grpo_async.errors import ConfigError
from grpo_async.inference.surface import TransportKind
from grpo_async.rundir import RunDir

ATTEMPT_VARIABLE = "GRPO_ASYNC_ATTEMPT_DIR"
RUN_DIR_VARIABLE = "GRPO_ASYNC_RUN_DIR"
SERVER_URLS_VARIABLE = "GRPO_ASYNC_SERVER_URLS"
"""A JSON list."""
TRANSPORT_VARIABLE = "GRPO_ASYNC_TRANSPORT"
RESUME_VARIABLE = "GRPO_ASYNC_RESUME"
STORE_VARIABLE = "GRPO_ASYNC_STORE"
"""A file through which the ranks meet; unset: at torchrun's address."""
PREFLIGHT_VARIABLE = "GRPO_ASYNC_PREFLIGHT_ONLY"
"""Set to 1 for a trainer that makes its checks and ends: exit code 0 when none failed, else 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One rank's place in the run. `store_file` is where the ranks meet; None: in the store of torchrun (several machines)."""

    rundir: RunDir
    attempt_dir: Path
    server_urls: tuple[str, ...]
    """A server's index is its place in here; it keeps its URL over restarts."""
    transport: TransportKind = "gloo"
    """How weights travel, as planned from `weights.transport` and the devices."""
    rank: int
    local_rank: int
    world_size: int
    num_nodes: int = 1
    node_rank: int = 0
    """Of this machine among `num_nodes`; each has world_size / num_nodes ranks, in the order of the machines."""
    store_file: Path | None
    resume_step: int | None
    preflight_only: bool = False
    """Make the checks of `grpo-async preflight`, report them and end: exit code 0 when none failed, else 1."""

    @classmethod
    def from_environment(cls) -> Assignment:
        """Read the variables.

        Raises:
            ConfigError: one is missing or is nonsense (the trainer was started by hand).
        """
        env = os.environ
        try:
            rundir = RunDir(Path(env[RUN_DIR_VARIABLE]))
            urls = json.loads(env[SERVER_URLS_VARIABLE])
            transport = env[TRANSPORT_VARIABLE]
            rank, local_rank, world_size = int(env["RANK"]), int(env["LOCAL_RANK"]), int(env["WORLD_SIZE"])
            num_nodes, node_rank = int(env.get("GROUP_WORLD_SIZE", "1")), int(env.get("GROUP_RANK", "0"))
        except KeyError as error:
            raise ConfigError(
                f"${error.args[0]} is not set; start the trainer with `grpo-async train CONFIG`"
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"the launcher's variables are broken ({error}); start with `grpo-async train`"
            ) from error
        if not isinstance(urls, list) or transport not in get_args(TransportKind):
            raise ConfigError(
                f"${SERVER_URLS_VARIABLE} or ${TRANSPORT_VARIABLE} is broken; start with `grpo-async train`"
            )
        resume, store = env.get(RESUME_VARIABLE), env.get(STORE_VARIABLE)
        return cls(
            rundir=rundir,
            attempt_dir=Path(env.get(ATTEMPT_VARIABLE, str(rundir.latest_logs))),
            server_urls=tuple(str(url) for url in urls),
            transport=cast(TransportKind, transport),
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            num_nodes=num_nodes,
            node_rank=node_rank,
            store_file=Path(store) if store else None,
            resume_step=int(resume) if resume else None,
            preflight_only=bool(env.get(PREFLIGHT_VARIABLE)),
        )
