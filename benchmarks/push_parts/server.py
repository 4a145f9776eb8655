"""A model with random weights and a server of it, started as `train` starts one."""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 600.0
_END_TIMEOUT_S = 30.0
_LOG_TIMEOUT_S = 10.0
SHAPES = {
    "0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936},
    "1.7b": {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936},
}  # fmt: skip
"""Of Qwen3 models."""


def make_model(folder: Path, options: argparse.Namespace) -> Any:
    """A Qwen3 with random weights on the trainer's device, saved to `folder`, where the server loads it from."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = SHAPES.get(options.shape) or small_shape(options.megabytes)
    torch.manual_seed(options.seed)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**sizes, max_position_embeddings=2048, tie_word_embeddings=True))
    model = model.to(getattr(torch, options.trainer_dtype or options.dtype)).eval().requires_grad_(False)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model.to(options.device)


def small_shape(megabytes: int) -> dict[str, int]:
    """About so many float32 megabytes: layers of 4.2 M parameters each, in matrices of up to 512 x 2048, and a vocabulary of 8192;
    below 20 MB a quarter of each width and a vocabulary of 1024."""
    if megabytes < 20:
        return {"hidden_size": 128, "num_hidden_layers": max(1, round((megabytes * 1e6 / 4 - 1024 * 128) / 0.26e6)),
                "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 512,
                "vocab_size": 1024}  # fmt: skip
    layers = max(1, round((megabytes * 1e6 / 4 - 8192 * 512) / 4.2e6))
    return {"hidden_size": 512, "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 64, "intermediate_size": 2048, "vocab_size": 8192}  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    """Byte-level without merges: 256 tokens and an end, enough for a server that takes ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


def write_config(folder: Path, options: argparse.Namespace) -> Path:
    """A run's config for that model."""
    import yaml

    data = folder / "data.jsonl"
    data.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    engines: dict[str, dict[str, Any]] = {
        "vllm": {"vllm": {"enforce_eager": True, "kv_cache_mb": 512, "gpu_memory_utilization": 0.4}},
        "embedded": {"embedded": {"device": options.device}},
    }
    config = {
        "run": {"name": "bench", "dir": str(folder)},
        "model": {"path": str(folder / "model")},
        "data": {"train": {"type": "jsonl", "path": str(data)}},
        "rewards": [{"function": "grpo_async.quickstart.reward:exact_answer"}],
        "inference": {
            "engine": options.engine,
            "dtype": options.dtype,
            "max_model_len": 2048,
            **engines[options.engine],
        },
        "weights": {"transport": options.transport, "mode": options.mode, "bucket_mb": options.bucket_mb},
    }
    path = folder / "bench.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def serving(config: Path, folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """A server as `train` starts it; yields its URL, at which it may not answer yet, and its log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "server.log"
    environment = dict(os.environ)
    if options.device == "cuda" and options.transport == "nccl":
        environment |= _nccl_environment()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "grpo_async", f"serve-{options.engine}", str(config), "--port", str(port)],
            stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}", log
    except BaseException:
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
        raise
    finally:
        process.terminate()
        try:
            process.wait(timeout=_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=_END_TIMEOUT_S)


def _nccl_environment() -> dict[str, str]:
    """The second GPU for the server. With one GPU only the server says that it is another host: NCCL refuses two ends of one
    communicator on a GPU of one host, and sends between hosts through sockets."""
    import torch

    return {"CUDA_VISIBLE_DEVICES": "1"} if torch.cuda.device_count() > 1 else {"NCCL_HOSTID": "server"}


_LOADED = re.compile(r"loaded \d+ parameters in ([0-9.]+) s")


def load_times(log: Path) -> list[float]:
    """Seconds of each load that the server has written down so far."""
    return [float(value) for value in _LOADED.findall(log.read_text(errors="replace"))]


def wait_for_load_time(log: Path, seen: int) -> float:
    """The load time of the push that just ended, of the slowest worker.

    Args:
        seen: how many there were before the push.

    Raises:
        SystemExit: the log does not say.
    """
    ends_at = time.monotonic() + _LOG_TIMEOUT_S
    while len(times := load_times(log)) <= seen:
        if time.monotonic() > ends_at:
            raise SystemExit(f"the server's log has no load time: {log}")
        time.sleep(0.01)
    return max(times[seen:])
