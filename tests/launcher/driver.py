"""The launcher with stand-ins for its children: `python -m tests.launcher.driver JSON`, see `LauncherProcess`.

Options: folder; trainer and server (modes of the stand-ins); torchrun; stop_timeout_s; inference and launch (values of these
sections); preflight; node_rank.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_async.launcher.plan import ProcessPlan
from grpo_async.launcher.train import launch, preflight
from tests.launcher.support import make_config

HERE = Path(__file__).parent


def main(options: dict[str, Any]) -> int:
    folder = Path(options["folder"])

    def amend(plan: ProcessPlan) -> ProcessPlan:
        rank = (str(HERE / "stand_in_trainer.py"), options["trainer"], str(folder))
        trainer = plan.trainer
        if trainer is not None:
            torchrun = trainer.command[: trainer.command.index("grpo_async.trainer.main") - 1]
            command = (*torchrun, *rank) if options["torchrun"] else (sys.executable, *rank)
            trainer = replace(trainer, command=command)
        servers = tuple(
            replace(
                spec,
                command=(
                    *(sys.executable, str(HERE / "stand_in_server.py"), options["server"], str(folder)),
                    "server" if len(plan.servers) == 1 else f"server{index}",
                ),
            )
            for index, spec in enumerate(plan.servers)
        )
        return replace(plan, servers=servers, trainer=trainer)

    config = make_config(
        folder,
        launch={"num_trainer_ranks": 2, "stop_timeout_s": options["stop_timeout_s"], **options.get("launch", {})},
        inference=options.get("inference", {}),
    )
    if options.get("preflight"):
        code = preflight(config, amend=amend).exit_code
    else:
        code = launch(config, node_rank=options.get("node_rank"), amend=amend)
    if "torch" in sys.modules and config.launch.nodes.count == 1:  # several machines meet in a store of torch
        raise AssertionError("the launcher imported torch")
    return code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
