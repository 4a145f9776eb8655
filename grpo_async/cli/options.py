"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import typer

from grpo_async.display.events import JSON_EVENTS

if TYPE_CHECKING:
    from grpo_async.config import ExperimentConfig
    from grpo_async.display.output import Output

ConfigArgument: TypeAlias = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the experiment.")]
RunArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="RUN", help="Name of a run below runs/, or a run directory.")
]
SetOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override one value, e.g. optimizer.lr=1e-6 or rewards.0.weight=2; repeatable.",
    ),
]
PortOption: TypeAlias = Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")]
EvaluationOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--evaluation", metavar="STEP|latest", help="Rollouts of an evaluation instead of the training rollouts."
    ),
]
QuietOption: TypeAlias = Annotated[
    bool, typer.Option("--quiet", "-q", help="Only warnings, errors, and the summary at the end.")
]
JsonLogsOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--json-logs", help="Write every event to stdout as one JSON object per line, and nothing else; see below."
    ),
]
_JSON_LOGS_HELP = "\n".join(
    (
        "--json-logs writes one object per line, with `time` (seconds since 1970) and `event`; the rest by event:",
        "\n\b",
        *(f"  {event:<12}" + help.replace("\n", "\n" + " " * 14) for event, help in JSON_EVENTS.items()),
    )
)
Command = TypeVar("Command", bound=Callable[..., Any])


def with_json_logs_help(command: Command) -> Command:
    """Adds to the help of a command what --json-logs writes."""
    command.__doc__ = f"{cleandoc(command.__doc__ or '')}\n\n{_JSON_LOGS_HELP}"
    return command


def load_and_report(
    config: Path, overrides: list[str] | None, *, quiet: bool, json_logs: bool
) -> tuple[ExperimentConfig, Output]:
    """Load the config and make the Output; config errors are reported through it."""
    from grpo_async.config.loader import load_config
    from grpo_async.display.output import Output, OutputMode

    output = Output(OutputMode.of(quiet=quiet, json_logs=json_logs))
    with output.reporting():
        return load_config(config, overrides or ()), output
