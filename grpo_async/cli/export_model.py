"""`export-model`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grpo_async.cli.options import RunArgument


def export_model(
    run: RunArgument,
    checkpoint: Annotated[
        str,
        typer.Option(
            "--checkpoint",
            metavar="latest|best|STEP|PATH",
            help="best: by checkpoint.best_metric, among those that were kept; PATH: RUN/checkpoints/step_N.",
        ),
    ] = "latest",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to write; default: RUN/model_step_N.")
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option("--push-to-hub", metavar="OWNER/NAME", help="Also upload it; a new repository is private."),
    ] = None,
) -> None:
    """Make a model that transformers and vLLM load (config, safetensors, tokenizer, model card) from a checkpoint of a run.

    A finished run has written RUN/model itself; this is for a stopped run, or for another step. Adapters (LoRA) are merged.
    Runs on the CPU and needs memory for one copy of the model.

    Exit code: 0 written, 1 the checkpoint is damaged or the upload failed, 2 the input is wrong.

    \b
    Examples:
      grpo-async export-model quickstart
      grpo-async export-model quickstart --checkpoint best --out my-model
      grpo-async export-model quickstart --push-to-hub me/my-model
    """
    from grpo_async.config.loader import load_config
    from grpo_async.training.checkpoint_choice import find_checkpoint
    from grpo_async.training.export import export_checkpoint
    from grpo_async.viewer.runs import find_run

    run_dir = find_run(run)
    config = load_config(run_dir.config)
    step = find_checkpoint(run_dir, checkpoint, option="--checkpoint")
    folder = out or run_dir.root / f"model_step_{step}"
    export_checkpoint(run_dir, step, config, folder)
    typer.echo(f"step {step} -> {folder}")
    if push_to_hub is not None:
        typer.echo(_upload(folder, push_to_hub))


def _upload(folder: Path, repository: str) -> str:
    """The URL of the upload. Raises: RunError: it failed; the folder stays."""
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
