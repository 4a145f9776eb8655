"""Real servers that are killed or hang: every request finishes with the very tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from grpo_async.inference.api import GenerateRequest
from grpo_async.inference.client import Generation, InferenceClient
from grpo_async.inference.fleet import ServerState
from grpo_async.inference.router import FixedServers, Servers
from grpo_async.inference.token import TOKEN_VARIABLE
from tests.inference.fleet_support import Watch, watched
from tests.support.ports import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.slow

TOKEN = "secret"
NUM_REQUESTS, NUM_TOKENS = 16, 200
LIMIT_S = 300.0


class _Process:
    """An embedded server that is started again on the same port."""

    def __init__(self, config: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "grpo_async", "serve-embedded", str(config), "--port", str(port)]
        self.start()

    def start(self) -> None:
        environment = {**os.environ, TOKEN_VARIABLE: TOKEN}
        self._process = subprocess.Popen(self._command, env=environment, stdout=subprocess.DEVNULL)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(20.0)


class _Load:
    """Requests in flight; `wait_for` a number of tokens of all of them together."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._more = asyncio.Event()

    def _count(self, number: int, version: int) -> None:
        self.num_tokens += number
        self._more.set()

    async def wait_for(self, number: int) -> None:
        while self.num_tokens < number:
            self._more.clear()
            await self._more.wait()

    async def run(self, servers: Servers) -> list[Generation]:
        async with InferenceClient(servers, token=TOKEN, request_timeout_s=LIMIT_S, wait_timeout_s=LIMIT_S) as client:
            requests = [
                GenerateRequest(
                    request_id=f"r{number}", token_ids=[(7 * number + i * i) % 300 for i in range(20)], temperature=1.0,
                    max_tokens=NUM_TOKENS, seed=number, ignore_eos=True, flush_interval_s=0.02,
                )
                for number in range(NUM_REQUESTS)
            ]  # fmt: skip
            work = [
                client.generate(request, on_tokens=self._count, affinity=f"g{number // 4}/{number % 4}")
                for number, request in enumerate(requests)
            ]
            return await asyncio.gather(*work)


async def _restart(watch: Watch, process: _Process, index: int) -> None:
    """What the launcher does, and the push that follows."""
    await until(lambda: any(one == index for one, _ in watch.restarts))  # listeners hear of the state first
    assert [one for one, _ in watch.restarts].count(index) == 1, watch.restarts
    watch.restarts = [one for one in watch.restarts if one[0] != index]
    process.kill()
    process.start()
    watch.tell("starting", index=index)
    await asyncio.to_thread(watch.wait_state, ServerState.READY, index)
    watch.fleet.mark_serving(watch.fleet.members(), version=0)


def test_a_killed_server_costs_no_token_and_doubles_none(tiny_model: Path, tmp_path: Path) -> None:
    """Two servers answer all requests, and one is killed and restarted meanwhile. What a server that hangs costs: test_client and
    test_fleet."""
    content = {
        "run": {"name": "test"},
        "model": {"path": str(tiny_model)},
        "data": {"train": {"type": "jsonl", "path": "none.jsonl"}},
        "rewards": [{"function": "module:function"}],
        "inference": {"engine": "embedded"},
    }
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(content))

    async def disturbed(watch: Watch, process: _Process) -> list[Generation]:
        load = _Load()
        async with asyncio.timeout(LIMIT_S):
            running = asyncio.create_task(load.run(watch.fleet))
            await load.wait_for(500)
            process.send(signal.SIGKILL)
            await asyncio.to_thread(watch.wait_state, ServerState.DOWN, 1)
            await _restart(watch, process, 1)
            found = await running
            assert load.num_tokens == NUM_REQUESTS * NUM_TOKENS
            return found

    with ExitStack() as stack:
        processes = [_Process(config) for _ in range(2)]
        for process in processes:
            stack.callback(process.kill)
        urls = [process.url for process in processes]
        watch = stack.enter_context(watched(urls, token=TOKEN, timeout_s=6.0, startup_timeout_s=LIMIT_S))
        watch.serve_all(version=0)
        expected = asyncio.run(_Load().run(FixedServers(urls[:1])))
        found = asyncio.run(disturbed(watch, processes[1]))
        (failure,), metrics = watch.fleet.failures, watch.fleet.metrics()
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert len(one.token_ids) == len(one.logprobs) == len(one.policy_versions) == NUM_TOKENS
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert set(one.policy_versions) == {0}
        assert one.finish_reason is other.finish_reason
    assert failure.index == 1
    assert failure.recovery_s is not None
    assert failure.recovery_s > 0.0
    assert (metrics["servers/serving"], metrics["servers/restarts"]) == (2.0, 1.0)
