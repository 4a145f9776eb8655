"""The class of docs/howto/environment.md around a server of OpenEnv."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from grpo_async.config.sections import EnvironmentSection
from grpo_async.envs import load_environments

SERVER = """
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Expression(Action):
    expression: str

class Result(Observation):
    result: str = ""

class Sums(Environment):
    def reset(self, answer, seed=None, episode_id=None, **columns):
        self.answer = answer
        return Result()

    def step(self, action, timeout_s=None, **options):
        result = str(eval(action.expression))
        return Result(result=result, done=True, reward=float(result == self.answer))

    @property
    def state(self):
        return State()

app = create_app(Sums, Expression, Result)
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("openenv")
    page = Path(__file__).parents[2] / "docs" / "howto" / "environment.md"
    (found,) = re.findall(r"^```python\n(# sums\.py.*?)^```$", page.read_text(), re.M | re.S)
    (tmp_path / "openenv_sums.py").write_text(found)
    (tmp_path / "sums_server.py").write_text(SERVER)
    monkeypatch.syspath_prepend(str(tmp_path))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        command = [sys.executable, "-m", "uvicorn", "sums_server:app", "--fd", str(listening.fileno())]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        with subprocess.Popen(command, pass_fds=[listening.fileno()], env=environment) as process:
            try:
                url = f"http://127.0.0.1:{listening.getsockname()[1]}"
                httpx.get(f"{url}/schema", timeout=100.0, trust_env=False)  # answered when it has started
                yield url
            finally:
                process.kill()


def test_actions_of_openenv_are_tools_and_its_rewards_are_the_environments(server: str) -> None:
    section = EnvironmentSection(factory="openenv_sums:Sums", arguments={"url": server}, max_instances=1)
    environments = load_environments({"sums": section})

    async def play() -> list[tuple[bool, float | None]]:
        ends = []
        async with environments.pools["sums"].lease(1) as (environment,):
            for answer in ("-11", "5"):
                await environment.reset({"prompt": "12 + 7 - 30 =", "answer": answer})
                (tool,) = environment.tools
                assert (await tool.call({"expression": "12 + 7 - 30"})).text == "-11"
                ends.append((await environment.is_done(), await environment.get_reward()))
        await environments.aclose()
        return ends

    assert asyncio.run(play()) == [(True, 1.0), (True, 0.0)]
