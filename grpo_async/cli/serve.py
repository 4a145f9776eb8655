"""`serve-vllm`, `serve-embedded`: inference servers on their own. `train` starts its own, with launch.ray on every node."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from grpo_async.cli.options import ConfigArgument, PortOption, SetOption
from grpo_async.utils.network import is_loopback

if TYPE_CHECKING:
    from grpo_async.config import ExperimentConfig
    from grpo_async.config.base import EngineName


def serve_vllm(config: ConfigArgument, port: PortOption = 8000, overrides: SetOption = None) -> None:
    """Serve the model with vLLM, for a trainer that lists it in `inference.urls`.

    With inference.replicas above 1, that many servers start, on this port and the following ones, each with its own GPUs, and
    one that dies is restarted. A single server replaces this process, so whatever started it supervises it.

    Listens on `inference.host`. Every request except /health needs the
    token of GRPO_ASYNC_TOKEN; if the variable is not set, a token is generated and printed (on loopback; on any other
    address the server refuses to start without one).

    \b
    Examples:
      grpo-async serve-vllm configs/quickstart.yaml
      grpo-async serve-vllm configs/quickstart.yaml --set inference.replicas=8
      GRPO_ASYNC_TOKEN=secret grpo-async serve-vllm configs/quickstart.yaml --port 8001 --set inference.host=0.0.0.0
    """
    from grpo_async.servers.vllm import command

    command.serve_vllm(_prepared(config, overrides, "vllm", port), port)


def serve_embedded(config: ConfigArgument, port: PortOption = 8000, overrides: SetOption = None) -> None:
    """Serve the model with the embedded engine, for machines without vLLM. The HTTP API is the same.

    Replicas, address and token work as in serve-vllm.

    \b
    Examples:
      grpo-async serve-embedded configs/quickstart.yaml
      grpo-async serve-embedded configs/quickstart.yaml --port 8001 --set inference.threads=2
    """
    from grpo_async.servers.embedded import main

    main.serve_embedded(_prepared(config, overrides, "embedded", port), port)


def _prepared(path: Path, overrides: list[str] | None, engine: EngineName, port: int) -> ExperimentConfig:
    """The config, if one server is wanted: this process becomes it. Several replicas are served here, and typer.Exit is raised when
    they end."""
    from grpo_async.config.loader import load_config

    config = load_config(path, overrides or ())
    _ensure_token(config.inference.host)
    if config.inference.replicas == 1:
        return config
    from grpo_async.launch.serve import serve_replicas
    from grpo_async.servers.engine_choice import choose_engine

    inference = config.inference.model_copy(update={"engine": engine, "urls": []})
    config = config.model_copy(update={"inference": inference})
    raise typer.Exit(serve_replicas(config, choose_engine(config), port))


def _ensure_token(host: str) -> None:
    """A server started manually without a token must not be controllable by other users of this machine."""
    from grpo_async.inference.token import TOKEN_VARIABLE, token_from_environment

    if token_from_environment() is None and is_loopback(host):
        os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(32)
        print(
            f"${TOKEN_VARIABLE} is not set; generated one for this server. Where the trainer runs:\n"
            f"  export {TOKEN_VARIABLE}={os.environ[TOKEN_VARIABLE]}",
            file=sys.stderr,
            flush=True,
        )
