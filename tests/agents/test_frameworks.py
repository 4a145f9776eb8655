"""Each file of docs/howto/agent.md, with the field's own clients and frameworks, makes a rollout whose tokens are exact."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from grpo_async.agents.agent import Agent
from grpo_async.agents.command import load_command_agent
from grpo_async.agents.function import load_function_agent
from grpo_async.config.sections import AgentSection
from tests.agents.page import FILES, learn, play
from tests.agents.support import calls

ROW = {"prompt": [{"role": "user", "content": "12 + 7 - 30 ="}], "answer": "-11"}
SUM = calls("calculator", expression="12 + 7 - 30")
PACKAGES = {"agent_openai_agents": "agents", "agent_langgraph": "langgraph", "agent_smolagents": "smolagents"}
AGENTS = [name.removesuffix(".py") for name in FILES if name.startswith("agent_")]
APPENDING = [name for name in AGENTS if name != "agent_smolagents"]


def _require(name: str) -> None:
    if name == "agent":
        if shutil.which("node") is None:
            pytest.skip("there is no node")
    elif name in PACKAGES:
        pytest.importorskip(PACKAGES[name])


def _load(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Agent:
    _require(name)
    if name == "agent":
        (folder / "agent.js").write_text(FILES["agent.js"])
        return load_command_agent(AgentSection(command=["node", str(folder / "agent.js")]))
    (folder / f"{name}.py").write_text(FILES[f"{name}.py"])
    monkeypatch.syspath_prepend(str(folder))
    return load_function_agent(AgentSection(function=f"{name}:run"), max_concurrent=4)


@pytest.mark.parametrize("name", [*APPENDING, "agent"])
def test_an_agent_that_only_appends_is_one_sample(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = _load(name, tmp_path, monkeypatch)
    result, completion = asyncio.run(play(agent, ROW, [SUM, "-11"]))
    assert result.reward == 1.0
    assert not completion.branches
    assert [message.content for message in completion.completion_messages()][1:] == ["-11", "-11"]  # result, answer


def test_smolagents_rewrites_its_history_so_that_each_step_is_a_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = _load("agent_smolagents", tmp_path, monkeypatch)
    result, completion = asyncio.run(play(agent, ROW, [SUM, calls("final_answer", answer="-11")]))
    assert result.reward == 1.0
    assert len(completion.branches) == 1


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", [*APPENDING, "agent"])
def test_a_model_learns_inside_of_the_agent(name: str, tmp_path: Path) -> None:
    """The tiny tool model in the embedded engine: its reward rises clearly."""
    _require(name)
    agent = f"command: [node, {tmp_path / 'agent.js'}]" if name == "agent" else f"function: '{name}:run'"
    fewer = ["rollout.groups_per_step=4"] if name == "agent" else []  # a process for each rollout takes its time
    learn(tmp_path, f"rollout.agent={{{agent}, max_concurrent: 32}}", *fewer)
