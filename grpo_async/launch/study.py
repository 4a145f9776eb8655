"""`grpo-async study`: training runs of one configuration under several settings and seeds, each as `train` would run it.

    OUT/study.json      what is varied
    OUT/NAME/           a run directory for each setting and seed

Everything about a run stands in its own directory, so a study that was stopped or killed goes on with the runs that have not
finished.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from signal import Signals
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_async.config import ExperimentConfig
from grpo_async.config.diff import MISSING, Difference, flat
from grpo_async.config.loader import load_config, read_override, set_options
from grpo_async.display.output import Output
from grpo_async.errors import USER_ERROR, ConfigError
from grpo_async.findings.study import STUDY_FILE, Setting, Study, StudyPlan, run_name
from grpo_async.launch.signals import ENDING, exit_code_of, handling
from grpo_async.run_directory import RunDir
from grpo_async.utils.files import read_object, write_atomically
from grpo_async.utils.processes import die_with_parent
from grpo_async.utils.run_state import FINISHED, state_of
from grpo_async.utils.safe_text import plain
from grpo_async.utils.text import count, duplicates, duration, last_line, shortlist

_MAX_AXES = 3
_NOT_VARIED = ("run.name", "run.dir", "run.seed")


def run_study(
    config: Path,
    vary: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    num_seeds: int = 3,
    out: Path | None = None,
    tolerance: float = 0.05,
    output: Output | None = None,
) -> int:
    """Do the runs that have not finished yet, and show the table; call it from the main thread. Arguments: see cli.train.

    Returns:
        The exit code: 0 all runs finished, 1 some failed, 130 or 143 after a signal.

    Raises:
        ConfigError: the input is wrong, or the folder holds another study.
    """
    output = output or Output()
    with output.reporting():
        base = load_config(config, overrides)
        plan = plan_study(config, base, vary, overrides, num_seeds=num_seeds, tolerance=tolerance)
        out = out or base.run.dir / f"{base.run.name}.study"
        _check_folder(out, plan)
        out.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(out / STUDY_FILE, plan.model_dump_json(indent=1))
        runner = _Runner(config, overrides, out, output)
        todo = [run for run in plan.runs() if not _has_finished(RunDir(out / run[0]))]
        output.say(f"{out}: {count(len(list(plan.runs())), 'run')}, {len(todo)} of them to do")
        with handling(runner.stop, *ENDING):
            runner.run_all(todo)
        study = Study.read(out)
        assert study is not None
        has_failed = any(setting.errors for setting in study.settings)
        exit_code = int(has_failed) if runner.stopped_by is None else exit_code_of(runner.stopped_by)
        show = partial(print_study, study=study, out=out)
        output.end(exit_code=exit_code, error=None, summary=study.as_json(), show=show)
        return exit_code


def plan_study(
    config: Path,
    base: ExperimentConfig,
    vary: Sequence[str],
    overrides: Sequence[str],
    *,
    num_seeds: int,
    tolerance: float,
) -> StudyPlan:
    """Return the runs of a study; every setting has been validated."""
    if base.evaluation is None:
        raise ConfigError(f"{config}: a study compares held-out rewards; give the section `evaluation`")
    if not 1 <= len(vary) <= _MAX_AXES:
        raise ConfigError(f"--vary: give one to {_MAX_AXES} of them, not {len(vary)}")
    axes = dict(map(_read_axis, vary))
    if len(axes) < len(vary):
        raise ConfigError("--vary: two axes have the same name")
    settings, own = [], None
    for combination in product(*(axis.items() for axis in axes.values())):
        labels = [label for label, _ in combination]
        changes = [change for _, some in combination for change in some]
        try:
            resolved = load_config(config, [*overrides, *changes])
        except ConfigError as error:
            raise ConfigError(f"the setting {', '.join(labels)}:\n{error}") from error
        settings.append((labels, changes))
        own = labels if resolved == base else own
    if same := duplicates(run_name(labels, 0).removesuffix("_seed-0") for labels, _ in settings):
        raise ConfigError(
            f"--vary: two settings would have the same folder: {shortlist(same)}; give them names: NAME={{LABEL: {{...}}}}"
        )
    seeds = list(range(base.run.seed, base.run.seed + num_seeds))
    values = flat(base.model_dump(mode="json"))
    return StudyPlan(
        config=str(config),
        base={path: text for path, text in values.items() if path not in _NOT_VARIED},
        axes=list(axes),
        settings=settings,
        own=own,
        seeds=seeds,
        tolerance=tolerance,
    )


def _read_axis(text: str) -> tuple[str, dict[str, list[str]]]:
    """Name, and overrides by label: "a.b=[1, 2]" -> ("a.b", {"1": ["a.b=1"], "2": ["a.b=2"]})."""
    name, has_values, values_text = text.partition("=")
    values = read_override(f"--vary {text}", values_text) if has_values else None
    if isinstance(values, list) and values:
        return name, {_label(value): [f"{name}={json.dumps(value)}"] for value in values}
    if isinstance(values, dict) and values and all(isinstance(changes, dict | None) for changes in values.values()):
        return name, {
            str(label): [f"{key}={json.dumps(value)}" for key, value in (changes or {}).items()]
            for label, changes in values.items()
        }
    raise ConfigError(
        f"--vary {text}: write KEY=[VALUE, VALUE], e.g. rollout.max_staleness=[0, 1, 4], or "
        "NAME={LABEL: {KEY: VALUE}, LABEL: {KEY: VALUE}}"
    )


def _label(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _check_folder(out: Path, plan: StudyPlan) -> None:
    """A study may get more settings and seeds; what its runs have in common may not change."""
    if out.exists() and not (out / STUDY_FILE).exists() and any(out.iterdir()):
        raise ConfigError(f"{out} holds something else than a study; name another folder with --out")
    if (before := Study.read(out)) is None:
        return
    old, new = before.plan.base, plan.base
    changes = [
        str(Difference(path=path, values=[old.get(path, MISSING), new.get(path, MISSING)]))
        for path in old | new
        if old.get(path) != new.get(path)
    ]
    known = {tuple(labels): overrides for labels, overrides in before.plan.settings}
    changes += [
        f"{', '.join(labels)}: other values" for labels, what in plan.settings if known.get(tuple(labels), what) != what
    ]
    if changes:
        raise ConfigError(
            f"{out} holds runs of another configuration ({shortlist(changes)}); name another folder with --out"
        )


def _has_finished(run: RunDir) -> bool:
    return state_of(read_object(run.status, []), read_object(run.summary, [])).state == FINISHED


class _Runner:
    """Does runs, one after the other. `stopped_by`: the signal after which no more are started."""

    def __init__(self, config: Path, overrides: Sequence[str], out: Path, output: Output) -> None:
        self.stopped_by: Signals | None = None
        self._config = config
        self._overrides = overrides
        self._out = out
        self._output = output
        self._running: Popen[bytes] | None = None

    def stop(self, number: Signals) -> None:
        """Pass a signal on: the run saves a checkpoint, from which the study goes on."""
        self.stopped_by = self.stopped_by or number
        if self._running is not None:
            self._running.send_signal(number)

    def run_all(self, todo: Sequence[tuple[str, Sequence[str], int]]) -> None:
        """Raises ConfigError: `train` refuses the configuration for what only it can see (files, models, memory)."""
        began = time.monotonic()
        for number, (name, changes, seed) in enumerate(todo, 1):
            if self.stopped_by is not None:
                break
            how = self._run(name, [*changes, f"run.seed={seed}"])
            left_s = (time.monotonic() - began) / number * (len(todo) - number)
            left = f"; about {duration(round(left_s))} left" if left_s else ""
            self._output.say(f"{number} of {len(todo)}: {name}: {how}{left}")

    def _run(self, name: str, changes: Sequence[str]) -> str:
        """Do one run, from its checkpoint if it has one; return how it ended."""
        run = RunDir(self._out / name)
        words = set_options([*self._overrides, *changes, f"run.name={name}", f"run.dir={self._out}"])
        begin = ["--resume", "latest"] if run.checkpoint_steps() else ["--clean"]
        with Popen(
            [sys.executable, "-m", "grpo_async", "train", str(self._config), *words, *begin, "--quiet"],
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=PIPE,
            preexec_fn=die_with_parent,  # the kill of a study leaves no run behind
            start_new_session=True,  # a Ctrl-C is for this process, which passes it on once
        ) as process:
            self._running = process
            if self.stopped_by is not None:  # while the process was being started
                process.send_signal(self.stopped_by)
            assert process.stderr is not None
            errors = process.stderr.read().decode(errors="replace")  # a run takes as long as it takes
        self._running = None
        if process.returncode == USER_ERROR:
            raise ConfigError(f"{name}: {errors.strip()}")
        setting = Setting.of_runs([name], {0: run})
        if setting.errors:
            return f"failed: {setting.errors[0].splitlines()[0]}"
        if process.returncode:
            return last_line(errors) or f"exit code {process.returncode}"
        if not setting.rewards:
            return "finished, without a held-out reward"
        seconds = "" if setting.seconds is None else f", {setting.seconds:.0f} s of training"
        return f"held out {setting.mean:.3f}{seconds}"


def print_study(console: Console, study: Study, out: Path) -> None:
    head, rows = study.table()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for at, name in enumerate(head):
        table.add_column(plain(name), justify="left" if at < len(study.plan.axes) else "right")
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    console.print(table)
    for setting in study.settings:
        if setting.errors:
            console.print(Text(plain(f"{setting}: {setting.errors[0]}")), soft_wrap=True)
    console.print(Text(f"\n{plain(study.advice())}\n\nnext:\n  grpo-async inspect {out}"), soft_wrap=True)
