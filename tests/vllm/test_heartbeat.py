"""GET /is_paused as the liveness probe: it is answered by the engine core, or not at all."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.vllm.server import VllmServer

pytestmark = pytest.mark.vllm

PROMPT = [5, 6, 7, 8, 9, 10]


def test_a_hung_engine_does_not_answer_although_health_does(vllm_server: VllmServer) -> None:
    engine = vllm_server.engine_core()
    engine.send_signal(signal.SIGSTOP)
    try:
        assert vllm_server.client.get("/health", timeout=5.0).status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            vllm_server.client.get("/is_paused", timeout=1.0)
    finally:
        engine.send_signal(signal.SIGCONT)
    assert vllm_server.client.get("/is_paused", timeout=30.0).json() == {"is_paused": False}
    assert vllm_server.generate(PROMPT, max_tokens=2).finish_reason == "length"


def test_a_busy_engine_answers_quickly(vllm_server: VllmServer) -> None:
    prompts = [[*PROMPT, 30 + number] for number in range(16)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(vllm_server.generate, prompt, max_tokens=200) for prompt in prompts]
        slowest_s, num_probes = 0.0, 0
        while not all(future.done() for future in running):
            began = time.monotonic()
            assert vllm_server.client.get("/is_paused", timeout=10.0).status_code == 200
            slowest_s = max(slowest_s, time.monotonic() - began)
            num_probes += 1
        assert all(future.result().finish_reason == "length" for future in running)
    assert num_probes > 5
    assert slowest_s < 10.0  # a heartbeat's default deadline is 30 s; this machine may be loaded
