"""`serve-vllm`, `serve-embedded`: inference servers on their own. `train` starts its own, with launch.ray on every node."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_async.cli.options import ConfigArgument, PortOption, SetOption
from grpo_async.utils.network import is_loopback

if TYPE_CHECKING:
    from grpo_async.config import ExperimentConfig


def serve_vllm(config: ConfigArgument, port: PortOption = 8000, overrides: SetOption = None) -> None:
    """Serve the model with vLLM, for a trainer that lists it in `inference.urls`.

    One server, whatever inference.replicas says, replaces this process. For more of them call it once for each, with another port
    and CUDA_VISIBLE_DEVICES.

    Listens on `inference.host`. Every request except /health needs the
    token of GRPO_ASYNC_TOKEN; if the variable is not set, a token is generated and printed (on loopback; on any other
    address the server refuses to start without one).

    \b
    Examples:
      grpo-async serve-vllm configs/quickstart.yaml
      GRPO_ASYNC_TOKEN=secret grpo-async serve-vllm configs/quickstart.yaml --port 8001 --set inference.host=0.0.0.0
    """
    from grpo_async.servers.vllm import command

    command.serve_vllm(_prepared(config, overrides), port)


def serve_embedded(config: ConfigArgument, port: PortOption = 8000, overrides: SetOption = None) -> None:
    """Serve the model with the embedded engine, for machines without vLLM. The HTTP API is the same.

    Address and token work as in serve-vllm.

    \b
    Examples:
      grpo-async serve-embedded configs/quickstart.yaml
      grpo-async serve-embedded configs/quickstart.yaml --port 8001 --set inference.threads=2
    """
    from grpo_async.servers.embedded import main

    main.serve_embedded(_prepared(config, overrides), port)


def _prepared(path: Path, overrides: list[str] | None) -> ExperimentConfig:
    from grpo_async.config.loader import load_config

    config = load_config(path, overrides or ())
    if config.inference.max_replicas > 1:
        print(f"inference.replicas: {config.inference.replicas}: this is one of them", file=sys.stderr, flush=True)
    _ensure_token(config.inference.host)
    return config


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
