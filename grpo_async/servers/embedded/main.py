"""The embedded engine as a process: `grpo-async serve-embedded CONFIG --port P`.

Loads the model, binds the port, serves until SIGTERM (open answers end with reason "abort") or until the engine fails
(every request gets the error, /health answers 503 for a moment, then the process exits with 1).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError, message_of
from grpo_async.inference.api import ServerInfo
from grpo_async.inference.token import require_token, token_from_environment
from grpo_async.utils.network import family_of, host_in_url
from grpo_async.utils.processes import importing_much, raise_open_files_limit

if TYPE_CHECKING:
    from grpo_async.servers.embedded.engine import SlotEngine

_EXIT_DELAY_S = 1.0  # between the engine's failure and the exit, so that clients and the launcher see why


def serve_embedded(config: ExperimentConfig, port: int) -> None:
    """Serve `config.model` until the process is asked to end; SystemExit with 1 after the engine failed."""
    raise_open_files_limit()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = config.for_devices(trains_on_gpu=False, serves_on_gpu=config.inference.embedded.device == "cuda")
    # before the model is loaded, so that a taken port shows at once
    inference = config.inference
    listener = bind_listener(inference.host, port)
    engine = load_engine(config)
    from grpo_async.servers.embedded.server import EmbeddedEngine, EmbeddedServer  # slow import

    description = ServerInfo(
        engine="embedded",
        model=str(config.model.path),
        dtype=inference.resolved_dtype,
        head_dtype=config.model.head_dtype,
        max_model_len=inference.max_model_len,
        policy_version=0,
    )
    served = EmbeddedEngine(
        engine,
        description=description,
        on_failure=lambda: asyncio.get_running_loop().call_later(_EXIT_DELAY_S, setattr, server, "should_exit", True),
        timeout_s=inference.heartbeat_timeout_s,
        from_hub={"revision": config.model.revision, "trust_remote_code": config.model.trust_remote_code},
    )
    host, port = listener.getsockname()[:2]
    address = f"http://{host_in_url(host)}:{port}"
    server = EmbeddedServer(served, greeting=f"serving {Path(config.model.path).name} on {address}")
    server.run(sockets=[listener])
    if server.has_failed:
        raise SystemExit(1)


def load_engine(config: ExperimentConfig) -> SlotEngine:
    """Load the model and build its engine."""
    with importing_much():
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        from grpo_async.servers.embedded.engine import SlotEngine, check_against_model, compute_logits_in_float32

    gc.freeze()  # nor does a later collection walk through all that
    inference = config.inference
    if inference.embedded.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("inference.embedded.device: cuda, but torch sees no CUDA device; use cpu")
    torch.set_num_threads(inference.threads)
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.model.path,
            revision=config.model.revision,
            dtype=getattr(torch, inference.resolved_dtype),
            attn_implementation="sdpa",
            trust_remote_code=config.model.trust_remote_code,
        )
    except Exception as error:  # transformers may raise anything for a broken file or an unknown family
        raise ConfigError(
            f"model.path: {config.model.path} cannot be loaded by the embedded engine: {message_of(error)}\n"
            "copy the model again if a file is broken; set inference.engine: vllm if this engine does not support its family"
        ) from error
    model = model.to(inference.embedded.device).eval().requires_grad_(False)
    if config.model.head_dtype == "float32":
        compute_logits_in_float32(model)
    engine = SlotEngine(model, num_slots=inference.embedded.max_slots, max_model_len=inference.max_model_len)
    check_against_model(engine, model)
    return engine


def bind_listener(host: str, port: int) -> socket.socket:
    """Bind without listening yet: until the model is loaded, clients are refused instead of kept waiting."""
    require_token(host, token_from_environment())
    listener = socket.socket(family_of(host), socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier process may linger
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot bind {host_in_url(host)}:{port}: {error.strerror}; stop what uses this address, or choose another --port"
        ) from error
    return listener
