"""What the launcher tells a trainer rank, by environment variables (see launch.plan, which sets them)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from grpo_async.errors import ConfigError
from grpo_async.launch.plan import RESUME_VARIABLE, RUN_DIR_VARIABLE, SERVER_URL_VARIABLE, STORE_VARIABLE
from grpo_async.launch.torchrun_entry import ATTEMPT_VARIABLE
from grpo_async.rundir import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One rank's place in the run. `store_file` is where the ranks meet; None: torchrun's own address."""

    rundir: RunDir
    attempt_dir: Path
    server_url: str
    rank: int
    local_rank: int
    world_size: int
    store_file: Path | None
    resume_step: int | None

    @classmethod
    def from_environment(cls) -> Assignment:
        """Read the variables.

        Raises:
            ConfigError: one is missing (the trainer was started by hand).
        """
        env = os.environ
        try:
            rundir = RunDir(Path(env[RUN_DIR_VARIABLE]))
            server_url = env[SERVER_URL_VARIABLE]
            rank, local_rank, world_size = int(env["RANK"]), int(env["LOCAL_RANK"]), int(env["WORLD_SIZE"])
        except KeyError as error:
            raise ConfigError(
                f"${error.args[0]} is not set; start the trainer with `grpo-async train CONFIG`"
            ) from error
        resume, store = env.get(RESUME_VARIABLE), env.get(STORE_VARIABLE)
        return cls(
            rundir=rundir,
            attempt_dir=Path(env.get(ATTEMPT_VARIABLE, str(rundir.latest_logs))),
            server_url=server_url,
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            store_file=Path(store) if store else None,
            resume_step=int(resume) if resume else None,
        )
