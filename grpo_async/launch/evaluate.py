"""`grpo-async eval`: a training run of zero steps, of the chosen model, shown as the evaluation that it is.

The folder of the results is laid out as a run directory, so `inspect-rollouts OUT --evaluation latest` reads it:

    OUT/evaluation.json          the numbers
    OUT/evaluations/step_0/      what was generated
    OUT/config.yaml, OUT/plan.txt, OUT/preflight.json, OUT/summary.json, OUT/logs/
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from grpo_async.checks.config_checks import check_inputs
from grpo_async.checks.memory import check_run_dir_writable
from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import dump_config, load_config
from grpo_async.display.output import Output
from grpo_async.display.summary import print_evaluation
from grpo_async.errors import CheckpointError, ConfigError
from grpo_async.evaluation.target import EvaluationTarget, choose_target
from grpo_async.launch.gpus import fill_in_for_devices
from grpo_async.launch.prepare import Start, clear_run_dir
from grpo_async.launch.start import lead_run
from grpo_async.launch.supervise import RunOutcome
from grpo_async.processes.machine import inspect_machine
from grpo_async.run_directory import RunDir, partial_of
from grpo_async.servers.engine_choice import choose_engine
from grpo_async.utils.files import write_atomically
from grpo_async.utils.run_state import EVALUATED
from grpo_async.utils.safe_text import plain
from grpo_async.utils.validation import problems_of


def run_evaluation(
    config: ExperimentConfig, *, checkpoint: str | None, out: Path | None, output: Output | None = None
) -> RunOutcome:
    """Evaluate a model without training; call it from the main thread. The outcome's `summary` is the content of evaluation.json.

    Args:
        checkpoint: see evaluation.target.choose_target.
        out: a folder for the results, new or empty; None: RUN_DIR/NAME.eval-LABEL.

    Raises:
        ConfigError: the input is wrong; nothing was started.
        CheckpointError: the checkpoint cannot be used.
    """
    output = output or Output()
    with output.reporting():
        if config.evaluation is None:
            raise ConfigError(
                "evaluation: the configuration has no such section; say what to evaluate on (evaluation.data)"
            )
        target = choose_target(config, checkpoint)
        if config.launch.ray is not None:  # on this machine alone, with its ranks and one server
            alone = {"ray": None, "trainer_nodes": 1, "sharding": "full", "colocate": True}
            launch = config.launch.model_copy(update=alone)
            inference = config.inference.model_copy(update={"replicas": 1})
            config = config.model_copy(update={"launch": launch, "inference": inference})
        engine = choose_engine(config)
        config = fill_in_for_devices(config, engine, inspect_machine().gpus)
        notes = check_inputs(config, engine=engine)
        run_dir = RunDir(_choose_folder(config, target, out).absolute())
        check_run_dir_writable(run_dir)
        with _new_folder(run_dir), _model(config, target, run_dir, output) as model_path:
            evaluated = _without_steps(config, model_path, run_dir)
            outcome = lead_run(evaluated, engine, output, purpose="evaluation", notes=notes)
            # rollouts are looked at with the model's own name: the folder that was served is removed now
            write_atomically(run_dir.config, dump_config(_without_steps(config, config.model.path, run_dir)))
        return _report(outcome, target, run_dir, output)


def _choose_folder(config: ExperimentConfig, target: EvaluationTarget, out: Path | None) -> Path:
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"--out {out}: exists and is not an empty directory; name another one")
        return out
    name = f"{config.run.name}.eval-{target.label}"
    folders = (config.run.dir / f"{name}{suffix}" for suffix in chain([""], (f"-{number}" for number in count(2))))
    return next(folder for folder in folders if not folder.exists())


@contextlib.contextmanager
def _new_folder(run_dir: RunDir) -> Iterator[None]:
    """Make the folder of the results. When the input turns out to be wrong, nothing was started, and what was made is removed."""
    is_there = run_dir.root.exists()
    run_dir.create()
    try:
        yield
    except (ConfigError, CheckpointError):
        clear_run_dir(run_dir, Start(removes=True))
        if not is_there:
            run_dir.root.rmdir()
        raise


@contextlib.contextmanager
def _model(config: ExperimentConfig, target: EvaluationTarget, run_dir: RunDir, output: Output) -> Iterator[str]:
    """Path of the Hugging Face folder to serve; what is made of a checkpoint is removed at the end."""
    if target.run is None or target.step is None:
        assert target.folder is not None
        yield target.folder
        return
    from grpo_async.training.export import export_checkpoint

    trained = load_config(target.run.config) if target.run.config.is_file() else config
    output.say(f"reading the checkpoint of step {target.step} in {target.run.root}")
    try:
        export_checkpoint(target.run, target.step, trained, run_dir.model)
        yield str(run_dir.model)
    finally:
        for leftover in (run_dir.model, partial_of(run_dir.model)):
            shutil.rmtree(leftover, ignore_errors=True)


def _without_steps(config: ExperimentConfig, model_path: str, run_dir: RunDir) -> ExperimentConfig:
    """Return `config` for a run that only evaluates: the model as it stands in the folder, and no copy of it as reference."""
    content = config.model_dump(mode="json")
    content["run"] |= {"dir": str(run_dir.root.parent), "name": run_dir.root.name}
    revision = config.model.revision if model_path == config.model.path else None
    content["model"] |= {"path": model_path, "revision": revision, "lora": None}
    content["loss"] |= {"beta": 0.0, "reference": "initial", "sync_ref_model": False}
    content["evaluation"]["at_start"] = True
    try:
        return ExperimentConfig.model_validate(content)
    except ValidationError as error:  # a folder whose name no run may have
        raise ConfigError(f"the configuration cannot be used for an evaluation: {problems_of(error)}") from error


def _report(outcome: RunOutcome, target: EvaluationTarget, run_dir: RunDir, output: Output) -> RunOutcome:
    result: dict[str, Any] | None = None
    if outcome.summary is not None and outcome.exit_code == 0:
        found = outcome.summary
        result = {
            "evaluated": target.label,
            "engine": found["engine"],
            "metrics": found["before"],
            "by_group": found["by_group"]["before"],
            "group_by": found["group_by"],
            **({"majority_baseline": found["majority_baseline"]} if "majority_baseline" in found else {}),
            "folder": str(run_dir.root),
        }
        write_atomically(run_dir.evaluation_result, json.dumps(result, indent=2))
        summary = {"status": EVALUATED, "steps": 0, "evaluation": found}
        write_atomically(run_dir.summary, json.dumps(summary, indent=2))

    def show(console: Console) -> None:
        assert result is not None
        title = f"held out, {plain(target.label)}"
        print_evaluation(console, result["metrics"], result["by_group"], group_by=result["group_by"], title=title)
        lines = [
            f"results: {run_dir.root}",
            "",
            "next:",
            f"  grpo-async inspect-rollouts {shlex.quote(str(run_dir.root))} --evaluation latest",
        ]
        if "majority_baseline" in result:
            lines.insert(0, f"always the most frequent answer: {result['majority_baseline']:.3f}")
        console.print(Text("\n".join(lines)), soft_wrap=True)

    output.end(exit_code=outcome.exit_code, error=outcome.error, summary=result, show=None if result is None else show)
    return replace(outcome, summary=result)
