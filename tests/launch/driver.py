"""The launcher with stand-ins for its children: `python -m tests.launch.driver JSON`, see `LauncherProcess`.

Options: folder; trainer and server (modes of the stand-ins); torchrun; stop_timeout_s; inference and
launch (values of these sections).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_async.launch import site, start
from grpo_async.launch.plan import ProcessPlan, plan_processes
from tests.launch.support import make_config

HERE = Path(__file__).parent


def main(options: dict[str, Any]) -> int:
    folder = Path(options["folder"])

    def plan_stand_ins(*args: Any, **options_of_plan: Any) -> ProcessPlan:
        plan = plan_processes(*args, **options_of_plan)
        rank = (str(HERE / "stand_in_trainer.py"), options["trainer"], str(folder))
        trainer = plan.trainer
        if trainer is not None:
            torchrun = trainer.command[: trainer.command.index("grpo_async.trainer.main") - 1]
            trainer = replace(trainer, command=(*(torchrun if options["torchrun"] else (sys.executable,)), *rank))
        names = ["server"] if len(plan.servers) == 1 else [f"server{index}" for index in range(len(plan.servers))]
        command = (sys.executable, str(HERE / "stand_in_server.py"), options["server"], str(folder))
        servers = [replace(spec, command=(*command, name)) for spec, name in zip(plan.servers, names, strict=True)]
        return replace(plan, servers=tuple(servers), trainer=trainer)

    site.plan_processes = plan_stand_ins  # type: ignore[attr-defined]
    config = make_config(
        folder,
        launch={"num_trainer_ranks": 2, "stop_timeout_s": options["stop_timeout_s"], **options.get("launch", {})},
        inference=options.get("inference", {}),
    )
    code = start.launch(config)
    if "torch" in sys.modules:
        raise AssertionError("the launcher imported torch")
    return code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
