"""`export-model`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from grpo_async.cli.options import RunArgument

if TYPE_CHECKING:
    from grpo_async.config import ExperimentConfig
    from grpo_async.run_directory import RunDir


def export_model(
    run: RunArgument,
    checkpoint: Annotated[
        str,
        typer.Option(
            "--checkpoint", metavar="latest|best|STEP", help="best: by checkpoint.best_metric, of those that were kept."
        ),
    ] = "latest",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to write; default: RUN/model_step_N.")
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            "--push-to-hub", metavar="OWNER/NAME", help="Upload it, too; a repository that is new is private."
        ),
    ] = None,
) -> None:
    """Make a model that transformers and vLLM load (config, safetensors, tokenizer, model card) from a checkpoint of a run.

    A run that ends writes RUN/model itself; this is for one that was stopped, or for another step. Adapters (LoRA) are merged.
    On the CPU, in memory for one copy of the model.

    Exit code: 0 written, 1 the checkpoint is damaged or the upload failed, 2 the input is wrong.

    \b
    Examples:
      grpo-async export-model quickstart
      grpo-async export-model quickstart --checkpoint best --out my-model
      grpo-async export-model quickstart --push-to-hub me/my-model
    """
    from grpo_async.config.loader import load_config
    from grpo_async.training.export import export_checkpoint
    from grpo_async.viewer.runs import find_run

    run_dir = find_run(run)
    config = load_config(run_dir.config)
    step = _step(run_dir, config, checkpoint)
    folder = out or run_dir.root / f"model_step_{step}"
    export_checkpoint(run_dir, step, config, folder)
    typer.echo(f"step {step} -> {folder}")
    if push_to_hub is not None:
        typer.echo(_upload(folder, push_to_hub))


def _step(run_dir: RunDir, config: ExperimentConfig, checkpoint: str) -> int:
    """Raises: ConfigError: there is no such checkpoint."""
    from grpo_async.errors import ConfigError
    from grpo_async.tracking.evaluation_record import read_evaluations

    steps = run_dir.checkpoint_steps()
    if not steps:
        raise ConfigError(f"{run_dir.checkpoints} has no checkpoint")
    if checkpoint == "latest":
        return steps[-1]
    if checkpoint == "best":
        metric = config.checkpoint.best_metric
        scores = {each.step: each.metrics.get(metric) for each in read_evaluations(run_dir.evaluation_log, [])}
        scored = [(score, step) for step in steps if (score := scores.get(step)) is not None]
        if not scored:
            raise ConfigError(
                f"--checkpoint best: no checkpoint of {run_dir.root} was evaluated by {metric!r}; choose one of the steps "
                f"{', '.join(map(str, steps))}"
            )
        return max(scored)[1]
    if not checkpoint.isdecimal() or int(checkpoint) not in steps:
        raise ConfigError(
            f"--checkpoint {checkpoint}: there are latest, best, and the steps {', '.join(map(str, steps))}"
        )
    return int(checkpoint)


def _upload(folder: Path, repository: str) -> str:
    """The address of what was uploaded. Raises: RunError: it could not be; the folder stays."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    from grpo_async.errors import RunError

    hub = HfApi()
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        return str(hub.upload_folder(repo_id=repository, folder_path=folder))
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        raise RunError(
            f"{folder} is written, but cannot be uploaded to {repository}: {error}; log in (hf auth login, or $HF_TOKEN) and try "
            f"again, or: hf upload {repository} {folder}"
        ) from error
