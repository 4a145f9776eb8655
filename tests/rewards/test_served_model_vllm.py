"""A reward model by address: the real vLLM with a tiny model, compared with transformers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_async.config.sections import RewardSection
from grpo_async.rewards import load_rewards
from tests.support.ports import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly]

PROMPT = "What is one and one? "
COMPLETIONS = ["two.", "hello world", "x"]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with one output on top, as reward models have it."""
    import torch
    from transformers import Qwen3ForSequenceClassification

    from tests.support.tiny_model import build_tiny_model

    folder = build_tiny_model(tmp_path_factory.mktemp("reward_model"))
    torch.manual_seed(0)
    Qwen3ForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def address(needs_vllm: None, reward_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(reward_model)]
    command += ["--runner", "pooling", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "512", "--enforce-eager", "--kv-cache-memory-bytes", str(64 * 2**20)]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, cwd=log.parent, process_group=0
        )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 200.0
        while not _is_healthy(url):
            assert server.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(30.0)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _values(address: str, prompt: Any, completions: list[Any]) -> list[float | None]:
    (reward,) = load_rewards([RewardSection(model=address, arguments={"use_activation": False})])
    count = len(completions)
    return asyncio.run(reward.score([prompt] * count, completions, [[1]] * count, {})).values


def _logits(folder: Path, texts: list[str]) -> list[float]:
    import torch
    from transformers import AutoTokenizer, Qwen3ForSequenceClassification

    model = Qwen3ForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [float(model(**tokenizer(text, return_tensors="pt")).logits[0, 0]) for text in texts]


def test_scores_of_text_and_messages_are_those_of_transformers(address: str, reward_model: Path) -> None:
    expected = _logits(reward_model, [PROMPT + completion for completion in COMPLETIONS])
    values = _values(address, PROMPT, COMPLETIONS)
    assert values == pytest.approx(expected, abs=1e-4)
    prompt = [{"role": "user", "content": "one and one?"}]
    completions = [[{"role": "assistant", "content": completion}] for completion in COMPLETIONS]
    texts = [
        f"<|im_start|>user\none and one?<|im_end|>\n<|im_start|>assistant\n{completion}<|im_end|>\n"
        for completion in COMPLETIONS
    ]
    values = _values(address, prompt, completions)
    assert values == pytest.approx(_logits(reward_model, texts), abs=1e-4)
    assert len(set(values)) == 3


def test_a_tool_call_is_accepted(address: str) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    turn = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "name": "f", "tool_call_id": "abcdefghi"},
        {"role": "assistant", "content": "two."},
    ]
    (value,) = _values(address, [{"role": "user", "content": "one and one?"}], [turn])
    assert value is not None
