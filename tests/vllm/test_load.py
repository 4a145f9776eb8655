"""What a busy server says of its load."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_async.inference.surface import ServerInfo
from tests.vllm.server import MAX_NUM_SEQS, VllmServer

pytestmark = pytest.mark.vllm

PROMPT = [5, 6, 7, 8, 9, 10]
TOKENS = 400


def test_a_busy_server_says_what_runs_what_waits_and_how_full_its_cache_is(vllm_server: VllmServer) -> None:
    prompts = [[*PROMPT, 30 + number] for number in range(MAX_NUM_SEQS + 3)]
    seen: list[ServerInfo] = []
    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(vllm_server.generate, prompt, max_tokens=TOKENS) for prompt in prompts]
        while not all(future.done() for future in running):
            seen.append(vllm_server.info())
            time.sleep(0.02)
        assert all(future.result().finish_reason == "length" for future in running)
    assert {info.max_running_requests for info in seen} == {MAX_NUM_SEQS}
    full = [info for info in seen if info.running_requests == MAX_NUM_SEQS]
    assert max(info.waiting_requests for info in full) == 3
    usages = [info.kv_usage for info in full if info.kv_usage is not None]
    assert 0.0 < min(usages) <= max(usages) <= 1.0
    assert max(usages) > usages[0], "the cache fills while the requests grow"


def test_an_aborted_server_is_idle(vllm_server: VllmServer) -> None:
    chunks = vllm_server.chunks(PROMPT, max_tokens=TOKENS)
    next(chunks)
    assert vllm_server.info().running_requests == 1
    chunks.close()  # vLLM makes no further step, so its own statistics would stay at 1
    deadline = time.monotonic() + 10.0
    while (info := vllm_server.info()).active_requests:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert (info.running_requests, info.waiting_requests, info.kv_usage) == (0, 0, 0.0)


def test_what_users_code_sends_through_vllms_own_api_is_load_as_well(vllm_server: VllmServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
    seen: list[ServerInfo] = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(vllm_server.client.post, "/v1/completions", json=body)
        while not running.done():
            seen.append(vllm_server.info())
            time.sleep(0.02)
        running.result().raise_for_status()
    assert {info.active_requests for info in seen} == {0}
    assert max(info.running_requests for info in seen) == 1
    assert vllm_server.info().running_requests == 0
