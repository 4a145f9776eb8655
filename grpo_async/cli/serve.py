"""`serve-vllm`, `serve-embedded`: an inference server alone. `train` starts one by itself; several machines need this."""

from __future__ import annotations

from grpo_async.cli.options import ConfigArgument, PortOption, SetOption


def serve_vllm(config: ConfigArgument, port: PortOption = 8000, overrides: SetOption = None) -> None:
    """Serve the model with vLLM, for a trainer that names it in `inference.url`.

    Listens on `inference.host`. Where GRPO_ASYNC_TOKEN is set, every request but /health needs it; an address
    other than loopback needs it always.

    \b
    Examples:
      grpo-async serve-vllm configs/quickstart.yaml
      GRPO_ASYNC_TOKEN=secret grpo-async serve-vllm configs/quickstart.yaml --port 8001 --set inference.host=0.0.0.0
    """
    from grpo_async.config.loader import load_config
    from grpo_async.servers.vllm import command

    command.serve_vllm(load_config(config, overrides or ()), port)


def serve_embedded(config: ConfigArgument, port: PortOption = 8000, overrides: SetOption = None) -> None:
    """Serve the model with the embedded engine, for machines without vLLM. The HTTP surface is the same.

    \b
    Examples:
      grpo-async serve-embedded configs/quickstart.yaml
      grpo-async serve-embedded configs/quickstart.yaml --port 8001 --set inference.threads=2
    """
    from grpo_async.config.loader import load_config
    from grpo_async.servers.embedded import main

    main.serve_embedded(load_config(config, overrides or ()), port)
