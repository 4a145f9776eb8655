"""Environments of libraries as agents: the libraries' own code, against the endpoint."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from grpo_async.agents.agent import AgentError
from grpo_async.agents.environments import load_environment_agent, tasks
from grpo_async.config.interaction_sections import AgentSection
from grpo_async.errors import ConfigError
from tests.agents.page import FILES, calls, learn, play

ROW = {"prompt": [{"role": "user", "content": "12 + 7 - 30 ="}], "answer": "-11"}
SUM = calls("calculator", expression="12 + 7 - 30")
TASKSET = "verifiers:sums_taskset"

TALK = '''
import verifiers.v1 as vf

__all__ = ["TalkTaskset", "TalkEnv"]

class TalkTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=0.5)
    async def turns(self, trace):
        return float(trace.num_turns)

    @vf.reward
    async def polite(self, trace):
        return float("please" in trace.last_reply)

class TalkTaskset(vf.Taskset[TalkTask, vf.TasksetConfig]):
    def load(self):
        yield TalkTask(vf.TaskData(name="talk", system_prompt="Be brief."), self.config.task)

class TalkConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class TalkEnv(vf.Env[TalkConfig]):
    """A user who asks twice."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            for question in ("One?", "Two?"):
                if (await talk.turn(question)).terminated:
                    break
'''

TOOLS_SERVER = '''
from openenv.core.env_server import (
    CallToolAction, CallToolObservation, Environment, ListToolsAction, ListToolsObservation, Observation, State, Tool, create_app
)

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

class Shout(Environment):
    """Two shouts end it, and each pays 0.5."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def reset(self, seed=None, episode_id=None, **columns):
        self.count = 0
        return Observation()

    def step(self, action, timeout_s=None, **options):
        if isinstance(action, ListToolsAction):
            return ListToolsObservation(tools=[Tool(name="shout", description="Shouts.", input_schema=SCHEMA)])
        self.count += 1
        text = action.arguments["text"].upper()
        return CallToolObservation(tool_name="shout", result={"data": text}, reward=0.5, done=self.count == 2)

    @property
    def state(self):
        return State(step_count=self.count)

app = create_app(Shout, CallToolAction, CallToolObservation, max_concurrent_envs=1)
'''


def _section(environment: str, **arguments: Any) -> AgentSection:
    return AgentSection(environment=environment, arguments=arguments)


def _play(section: AgentSection, row: dict[str, Any], *answers: str, **limits: Any) -> Any:
    return asyncio.run(play(load_environment_agent(section, max_concurrent=4), row, *answers, **limits))


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that this process and its children can import."""
    for name in ("sums_taskset.py", "sums_server.py"):
        (tmp_path / name).write_text(FILES[name])
    (tmp_path / "talk_taskset.py").write_text(TALK)
    (tmp_path / "shout_server.py").write_text(TOOLS_SERVER)
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("HOME", str(tmp_path))  # where verifiers keeps its working folders
    return tmp_path


@pytest.fixture
def verifiers(modules: Path) -> None:
    pytest.importorskip("verifiers.v1")


@pytest.fixture
def openenv(modules: Path) -> None:
    pytest.importorskip("openenv")


def test_a_library_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for environment, extra in (
        ("verifiers:x", "verifiers"),
        ("nemo_gym:http://x", "verifiers"),
        ("openenv:x", "openenv"),
    ):
        with pytest.raises(ConfigError, match=rf"{environment}.*grpo-async\[{extra}\]"):
            load_environment_agent(_section(environment), max_concurrent=1)


@pytest.mark.usefixtures("verifiers")
def test_a_taskset_makes_the_rows_offers_its_tools_and_its_rewards_and_metrics_come_back() -> None:
    row = next(tasks(TASKSET, taskset={"num_tasks": 1}))
    (prompt,) = row["prompt"]
    assert row["task"] == {"idx": 0, "prompt": prompt["content"], "answer": str(eval(prompt["content"].strip("= ")))}
    assert json.loads(json.dumps(row)) == row
    expression = prompt["content"].strip("= ")
    result, completion = _play(
        _section(TASKSET), row, calls("calculator", expression=expression), row["task"]["answer"]
    )
    assert result.reward == 1.0
    assert result.columns == {"correct": 1.0, "num_tool_calls": 1.0}
    assert not completion.branches
    assert [message.role for message in completion.completion_messages()] == ["assistant", "tool", "assistant"]


@pytest.mark.usefixtures("verifiers")
def test_a_simulated_user_of_verifiers_talks_over_several_turns_and_rewards_have_their_weights() -> None:
    (row,) = tasks("verifiers:talk_taskset")
    assert row["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "talk"}]
    result, completion = _play(_section("verifiers:talk_taskset"), row, "Yes.", "No, please.")
    assert result.reward == 2 * 0.5 + 1.0
    assert result.columns == {"turns": 2.0, "polite": 1.0}
    roles = [(message.role, message.content) for message in completion.trajectory(None)]
    assert roles == [
        ("system", "Be brief."),
        ("user", "One?"),
        ("assistant", "Yes."),
        ("user", "Two?"),
        ("assistant", "No, please."),
    ]


@pytest.mark.usefixtures("verifiers")
def test_the_reward_of_several_seats_is_their_mean_and_columns_have_their_names() -> None:
    from grpo_async.agents.environments.verifiers_taskset import _result

    def trace(seat: str, reward: float) -> Any:
        scores = {"correct": SimpleNamespace(score=reward)}
        return SimpleNamespace(agent=SimpleNamespace(name=seat), rewards=scores, metrics={"turns": 2.0}, reward=reward)

    expected = {"asks_correct": 1.0, "asks_turns": 2.0, "says_correct": 0.5, "says_turns": 2.0, "reward": 0.75}
    assert _result([trace("asks", 1.0), trace("says", 0.5)]) == expected


@pytest.mark.usefixtures("verifiers")
def test_a_taskset_scores_what_there_is_when_the_budget_of_tokens_is_used_up() -> None:
    (row,) = tasks("verifiers:talk_taskset")
    result, completion = _play(_section("verifiers:talk_taskset"), row, "Yes.", "never said", max_turns=1)
    assert completion.truncated
    assert result.columns["turns"] == 2.0  # of the second one nothing was left to say


@pytest.mark.usefixtures("verifiers")
def test_what_verifiers_cannot_load_or_play_is_told() -> None:
    with pytest.raises(ConfigError, match=r"rollout.agent.environment: verifiers:nowhere.*'nowhere' not found"):
        load_environment_agent(_section("verifiers:nowhere"), max_concurrent=1)
    with pytest.raises(ConfigError, match="num_taskz"):
        load_environment_agent(_section(TASKSET, taskset={"num_taskz": 3}), max_concurrent=1)
    with pytest.raises(AgentError, match=r"no column `task`.*agents.environments:tasks"):
        _play(_section(TASKSET), ROW)


@pytest.mark.usefixtures("openenv")
def test_an_environment_of_openenv_is_served_by_a_process_that_ends_with_the_agent() -> None:
    agent = load_environment_agent(_section("openenv:sums_server:app", tool="calculator"), max_concurrent=2)
    result, completion = asyncio.run(play(agent, ROW, calls("calculator", expression="1 +"), SUM))
    assert result.reward == 1.0
    assert result.columns == {"steps": 2, "done": True}
    assert "not an arithmetic expression" in completion.completion_messages()[1].content
    assert not [child for child in psutil.Process().children() if "openenv_process" in " ".join(child.cmdline())]


@pytest.mark.usefixtures("openenv")
def test_without_a_tool_the_answer_is_the_action() -> None:
    result, completion = _play(_section("openenv:sums_server:app", tool=None), ROW, "1 +", "12 + 7 - 30")
    assert result.reward == 1.0
    assert [message.content for message in completion.completion_messages()][::2] == ["1 +", "12 + 7 - 30"]


@pytest.mark.usefixtures("openenv")
def test_tools_that_an_environment_of_openenv_lists_are_offered_to_the_model() -> None:
    shout = [calls("shout", text=text) for text in ("a", "b")]
    result, completion = _play(_section("openenv:shout_server:app"), ROW, *shout)
    assert result.reward == 1.0
    assert completion.completion_messages()[1].content == "A"


@pytest.mark.usefixtures("openenv")
def test_what_openenv_cannot_serve_is_told() -> None:
    with pytest.raises(ConfigError, match=r"names no server: write http://HOST:PORT"):
        load_environment_agent(_section("openenv:nowhere"), max_concurrent=1)
    with pytest.raises(ConfigError, match="max_stepz"):
        load_environment_agent(_section("openenv:sums_server:app", max_stepz=3), max_concurrent=1)
    with pytest.raises(AgentError, match=r"sums_server:nothing ended with exit code"):
        _play(_section("openenv:sums_server:nothing"), ROW)
    with pytest.raises(AgentError, match=r"no server of OpenEnv at http://127.0.0.1:9"):
        _play(_section("openenv:http://127.0.0.1:9"), ROW)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("library", ["verifiers", "openenv"])
def test_a_model_learns_in_an_environment_of_a_library(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    if library == "openenv":
        learn(
            tmp_path,
            "rollout.agent={environment: 'openenv:sums_server:app', arguments: {tool: calculator}, max_concurrent: 64}",
        )
        return
    source = {
        "type": "generator",
        "function": "grpo_async.agents.environments:tasks",
        "arguments": {"environment": TASKSET, "taskset": {"num_tasks": 2000}},
    }
    learn(tmp_path, f"data={json.dumps({'train': source})}", f"rollout.agent={{environment: '{TASKSET}'}}")
