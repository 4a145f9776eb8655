"""The commands of `grpo-async`, in the order of their help.

Exit codes: 0 done; 1 a run or a server failed; 2 the input is wrong, nothing was started; 130 after SIGINT, 143 after SIGTERM,
SIGHUP and SIGQUIT.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from grpo_async import __version__
from grpo_async.cli.check_reward import check_reward
from grpo_async.cli.configs import doctor, explain, schema, validate
from grpo_async.cli.export import export, export_model
from grpo_async.cli.inspect import InspectCommand, inspect, inspect_rollouts
from grpo_async.cli.runs import replay, report, status, trace
from grpo_async.cli.serve import serve_embedded, serve_vllm
from grpo_async.cli.start import import_script, init, prepare_quickstart
from grpo_async.cli.train import TrainCommand, evaluate, study, train
from grpo_async.errors import USER_ERROR, GrpoAsyncError, exit_code_of
from grpo_async.utils.resilient_stream import escape_unencodable

_PATH_ERRNOS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EROFS, errno.EEXIST, errno.ENOTDIR)
"""Errors caused by a path that the user named, wherever it is first opened."""
_MAX_SHOWN = 200
_INTERRUPTED = 130


class ReportingGroup(TyperGroup):
    """Runs a command and turns the package's own errors into messages."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GrpoAsyncError as error:
            from grpo_async.utils.safe_text import visible

            typer.echo(visible(str(error)), err=True)  # it may quote what a model or a file says
            raise typer.Exit(exit_code_of(error)) from error
        except OSError as error:
            if error.errno not in _PATH_ERRNOS or not isinstance(error.filename, str | os.PathLike):
                raise
            from grpo_async.utils.text import clipped

            typer.echo(f"{clipped(str(error.filename), _MAX_SHOWN)}: {error.strerror}", err=True)
            raise typer.Exit(USER_ERROR) from error
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None


app = typer.Typer(
    name="grpo-async",
    cls=ReportingGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # a bug shows Python's own traceback, without the values of local variables
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"grpo-async {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Asynchronous GRPO from one YAML file: an inference server generates while torchrun trains.

    \b
    Examples:
      grpo-async prepare-quickstart
      grpo-async train configs/quickstart.yaml
      grpo-async inspect
    """


app.command("init", short_help="Write a config, a reward, data and a test to start from.")(init)
app.command("import", short_help="Turn a training script of TRL into a configuration.")(import_script)
app.command("train", cls=TrainCommand, short_help="Run an experiment: server, trainer, progress.")(train)
app.command("eval", short_help="Evaluate a model or a checkpoint on held-out data.")(evaluate)
app.command("study", short_help="Compare settings over several seeds: which are safe, which is the cheapest.")(study)
app.command("validate", short_help="Check a configuration; print every setting.")(validate)
app.command("doctor", short_help="Check this machine: versions, GPUs, limits, disk.")(doctor)
app.command("check-reward", short_help="Try the reward functions on good and bad completions.")(check_reward)
app.command("explain", short_help="Explain a configuration key.")(explain)
app.command("schema", short_help="Print the JSON schema of configurations.")(schema)
app.command("serve-vllm", short_help="Serve the model with vLLM.")(serve_vllm)
app.command("serve-embedded", short_help="Serve the model with the embedded engine.")(serve_embedded)
app.command("prepare-quickstart", short_help="Make the quickstart's model and data.")(prepare_quickstart)
app.command("inspect", short_help="Look at runs in the browser.")(inspect)
app.command("inspect-rollouts", cls=InspectCommand, short_help="Look at a run's rollouts in the terminal.")(
    inspect_rollouts
)
app.command("export", short_help="Export a run's rollouts to one file.")(export)
app.command("export-model", short_help="Turn a checkpoint into a Hugging Face model.")(export_model)
app.command("replay", short_help="Compute a stored step again, under other losses or advantages.")(replay)
app.command("report", short_help="Write an offline HTML page: is it learning, and if not, why.")(report)
app.command("status", short_help="Show how a run stands and what to do, its progress and servers.")(status)
app.command("trace", short_help="Write a timeline trace for Perfetto.")(trace)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit, or in KeyboardInterrupt before a command begins."""
    escape_unencodable(sys.stdout)
    app(args=arguments, prog_name="grpo-async")
