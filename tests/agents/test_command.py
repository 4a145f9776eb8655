"""Agents that are commands: what they get, how they fail, and that none of their processes is left."""

from __future__ import annotations

import asyncio
import datetime
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Awaitable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from grpo_async.agents.agent import AgentError, AgentResult
from grpo_async.agents.command import load_command_agent
from grpo_async.config.sections import AgentSection
from tests.support.waiting import until

PYTHON = [sys.executable, "-I", "-S", "-c"]
MARK = "GRPO_ASYNC_TEST_MARK"
DAEMON = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
SELF_DAEMONIZING = (
    "import os, time\n"
    "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1000)\n    os._exit(0)\nos.wait()\n"
)


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """In the environment of whatever a test starts; nothing that has it is left when the test ends."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    yield value
    left = _marked(value)
    for process in left:
        process.kill()
    assert not left


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found += [process] if process.status() != psutil.STATUS_ZOMBIE else []
        except (psutil.Error, OSError):
            continue
    return found


def _session() -> Any:
    return SimpleNamespace(
        base_url="http://127.0.0.1:9/v1",
        anthropic_base_url="http://127.0.0.1:9",
        key="secret",
        model="policy",
        rollout_id="g7-r0",
    )


def _run(command: list[str], row: dict[str, Any] | None = None, **section: Any) -> Awaitable[AgentResult]:
    agent = load_command_agent(AgentSection(command=command, **{"timeout_s": 20.0, **section}))
    return agent.run(row or {"prompt": "hi"}, _session())


def test_a_command_gets_the_row_and_the_model_and_says_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_ASYNC_TOKEN", "of the servers")
    monkeypatch.setenv("NO_PROXY", "example.org")
    code = """
        import json, os, sys
        row = json.load(sys.stdin)
        names = [n for n in os.environ if n.startswith(("OPENAI", "ANTHROPIC", "GRPO_ASYNC", "NO_PROXY"))]
        print("step 1\\n", file=sys.stderr)
        oom = open("/proc/self/oom_score_adj").read()
        result = {"reward": 0.5, "row": row, "env": {n: os.environ[n] for n in names}, "oom_score_adj": oom}
        print("thinking\\n\\n" + json.dumps(result) + "\\n")
    """
    row = {"prompt": [{"role": "user", "content": "2 + 2 ="}], "answer": "4"}
    result = asyncio.run(_run([*PYTHON, textwrap.dedent(code)], row))
    assert result.reward == 0.5
    assert result.columns["row"] == row
    assert result.columns["oom_score_adj"] == "1000\n"  # without memory it goes before the trainer
    given = result.columns["env"]
    assert given.pop(MARK)
    assert given == {
        "OPENAI_BASE_URL": "http://127.0.0.1:9/v1",
        "OPENAI_API_BASE": "http://127.0.0.1:9/v1",
        "OPENAI_API_KEY": "secret",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9",
        "ANTHROPIC_API_KEY": "secret",
        "GRPO_ASYNC_MODEL": "policy",
        "GRPO_ASYNC_ROLLOUT": "g7-r0",
        "NO_PROXY": "example.org,127.0.0.1",
    }


@pytest.mark.parametrize(
    ("printed", "reward", "columns"),
    [
        ("", None, {}),
        ('{"reward": null, "tests": 3}', None, {"tests": 3}),
        ('{\n  "reward": 1\n}', 1.0, {}),  # the whole of it
        ('a log\n{"reward": 1, "said": "a\u2028b"}', 1.0, {"said": "a\u2028b"}),  # JSON.stringify does not escape it
    ],
)
def test_a_result_is_a_number_an_object_or_nothing(printed: str, reward: float | None, columns: dict[str, Any]) -> None:
    result = asyncio.run(_run(["printf", "%s\n", printed]))
    assert (result.reward, result.columns) == (reward, columns)


def test_a_row_may_hold_what_json_has_not_and_what_other_libraries_refuse() -> None:
    row = {"number": 2**70, "text": "\ud800", "score": float("nan"), "day": datetime.datetime(2024, 2, 29)}
    code = "import sys; print('{\"row\": ' + sys.stdin.read() + '}')"
    given = asyncio.run(_run([*PYTHON, code], row)).columns["row"]
    assert given == {**row, "score": None, "day": "2024-02-29T00:00:00"}


@pytest.mark.parametrize(
    ("code", "section", "told"),
    [
        ("import sys; sys.exit('no disk')", {}, r"exit code 1; its stderr ends: no disk"),
        ("import os; os.kill(os.getpid(), 9)", {}, r"was killed by SIGKILL"),
        (DAEMON + "import time; time.sleep(1000)", {"timeout_s": 2.0}, r"rollout\.agent\.timeout_s = 2 s and was killed"),
        ("print('[' * 100_000)", {}, r"is not JSON: '\[\[\["),
        ("print('x' * (2 << 20), flush=True); import time; time.sleep(99)", {}, "wrote more than 1048576 characters"),
        ("print(len(bytearray(1 << 29)))", {"memory_mb": 128}, r"memory \(rollout\.agent\.memory_mb = 128\); its"),
    ],
)  # fmt: skip
def test_a_command_that_fails_says_why(code: str, section: dict[str, Any], told: str) -> None:
    with pytest.raises(AgentError, match=told):
        asyncio.run(asyncio.wait_for(_run([*PYTHON, code], **section), 15.0))  # less than the other cases' timeout_s


def test_what_a_command_leaves_running_ends_with_it_even_if_it_kills_its_process_group() -> None:
    """The fixture looks for it."""
    assert asyncio.run(_run([*PYTHON, SELF_DAEMONIZING + "print(1.0)"])).reward == 1.0
    with pytest.raises(AgentError, match="was killed by SIGKILL"):
        asyncio.run(_run([*PYTHON, SELF_DAEMONIZING + "os.killpg(0, 9)"]))


def test_a_cancelled_run_ends_the_whole_tree(mark: str) -> None:
    async def run() -> None:
        running = asyncio.ensure_future(_run([*PYTHON, SELF_DAEMONIZING + DAEMON + "time.sleep(1000)"]))
        await until(lambda: len(_marked(mark)) >= 3)  # the command, two daemons
        running.cancel()
        await asyncio.wait({running}, timeout=20.0)
        assert running.cancelled()
        assert not _marked(mark)

    asyncio.run(run())


def test_the_launcher_that_is_killed_takes_the_command_with_it(mark: str) -> None:
    async def run() -> None:
        code = "import subprocess, time; subprocess.Popen(['sleep', '1000']); time.sleep(1000)"
        before = psutil.Process().children()  # other tests of this process may have left some
        running = asyncio.ensure_future(_run([*PYTHON, code]))
        await until(lambda: len(_marked(mark)) == 2)
        (launcher,) = set(psutil.Process().children()) - {*before}
        launcher.kill()
        with pytest.raises(AgentError, match="launcher was killed"):
            await running
        await until(lambda: not _marked(mark))

    asyncio.run(run())


def test_kill_nine_of_the_process_that_runs_agents_ends_them(mark: str) -> None:
    code = """
        import asyncio
        from tests.agents.test_command import PYTHON, SELF_DAEMONIZING, _run
        asyncio.run(_run([*PYTHON, SELF_DAEMONIZING + "time.sleep(1000)"]))
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=Path(__file__).parents[2])

    async def run() -> None:
        await until(lambda: len(_marked(mark)) >= 3, within_s=60.0)  # the owner, the command, a daemon
        owner.send_signal(signal.SIGKILL)
        owner.wait(10.0)
        await until(lambda: not _marked(mark))

    asyncio.run(run())
