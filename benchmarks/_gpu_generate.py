"""The generation part of gpu.py: a server started as `train` starts one, and rounds of as many completions as are in flight."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks._gpu_bounds import ModelSize
from benchmarks.push_parts import server


def measure(folder: Path, size: ModelSize, options: argparse.Namespace) -> dict[int, list[float]]:
    """In flight -> seconds of each round of so many completions of --completion-tokens. One round before them warms up."""
    model = folder / "model"
    _write_model(model, size, options)
    config = _write_config(folder, options)
    serving = argparse.Namespace(engine=options.engine, device=options.device, transport="none")
    with server.serving(config, folder, serving) as (url, _log):
        return asyncio.run(_rounds(url, size, options))


def _write_model(folder: Path, size: ModelSize, options: argparse.Namespace) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(options.seed)
    config = Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=_length(options),
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(getattr(torch, options.dtype)).save_pretrained(folder)
    server.write_tokenizer(folder)


def _write_config(folder: Path, options: argparse.Namespace) -> Path:
    import yaml

    most = max(options.in_flight)
    data = folder / "data.jsonl"
    data.write_text('{"prompt": "1 + 1", "answer": "2"}\n', encoding="utf-8")
    memory = {"gpu_memory_utilization": options.gpu_memory} if options.device == "cuda" else {"kv_cache_mb": 256}
    engines = {
        "vllm": {"vllm": {"enforce_eager": options.device == "cpu", **memory}},
        "embedded": {"embedded": {"device": options.device, "max_slots": most}},
    }
    config = {
        "run": {"name": "bench", "dir": str(folder)},
        "model": {"path": str(folder / "model")},
        "data": {"train": {"type": "jsonl", "path": str(data)}},
        "rewards": [{"function": "grpo_async.quickstart.reward:exact_answer"}],
        "rollout": {"max_in_flight": most, "max_completion_tokens": options.completion_tokens},
        "inference": {
            "engine": options.engine,
            "dtype": options.dtype,
            "max_model_len": _length(options),
            "threads": options.threads,
            **engines[options.engine],
        },
    }
    path = folder / "bench.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def _length(options: argparse.Namespace) -> int:
    return int(options.prompt_tokens + options.completion_tokens)


async def _rounds(url: str, size: ModelSize, options: argparse.Namespace) -> dict[int, list[float]]:
    from grpo_async.inference.client import InferenceClient
    from grpo_async.inference.router import FixedServers
    from grpo_async.inference.surface import GenerateRequest

    draw = random.Random(options.seed)
    number = 0

    def request() -> GenerateRequest:
        nonlocal number
        number += 1
        return GenerateRequest(
            request_id=f"gpu-{number}",
            token_ids=[draw.randrange(min(256, size.vocab)) for _ in range(options.prompt_tokens)],
            max_tokens=options.completion_tokens,
            temperature=1.0,
            seed=number,
            ignore_eos=True,
        )

    await _until_it_serves(url)
    client = InferenceClient(
        FixedServers([url]), token=os.environ["GRPO_ASYNC_TOKEN"], request_timeout_s=options.timeout_s,
        wait_timeout_s=server.START_TIMEOUT_S,
    )  # fmt: skip
    found: dict[int, list[float]] = {}
    async with client:
        for in_flight in options.in_flight:
            seconds: list[float] = []
            for _ in range(options.rounds + 1):
                requests = [request() for _ in range(in_flight)]
                began = time.perf_counter()
                made: Sequence[int] = await asyncio.wait_for(_lengths(client, requests), options.timeout_s)
                seconds.append(time.perf_counter() - began)
                if set(made) != {options.completion_tokens}:
                    raise RuntimeError(f"completions of {sorted(set(made))} tokens, not {options.completion_tokens}")
            found[in_flight] = seconds[1:]
    return found


async def _lengths(client: object, requests: Sequence[object]) -> list[int]:
    made = await asyncio.gather(*(client.generate(each) for each in requests))  # type: ignore[attr-defined]
    return [len(each.token_ids) for each in made]


async def _until_it_serves(url: str) -> None:
    """Ask until it answers. Raises: RuntimeError, it has ended (`serving` shows its log) or takes too long."""
    import httpx
    import psutil

    ends_at = time.monotonic() + server.START_TIMEOUT_S
    headers = {"authorization": f"Bearer {os.environ['GRPO_ASYNC_TOKEN']}"}
    async with httpx.AsyncClient(timeout=5.0, headers=headers) as asking:
        while True:
            try:
                answer = await asking.get(f"{url}/health")
                if answer.status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not yet
            if all(child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children()):
                raise RuntimeError("the server has ended")
            if time.monotonic() > ends_at:
                raise RuntimeError(f"the server does not answer within {server.START_TIMEOUT_S:g} s")
            await asyncio.sleep(0.1)
