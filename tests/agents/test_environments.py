"""Environments of libraries as agents: the libraries' own code, against the endpoint."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from grpo_async.agents.agent import Agent, AgentError
from grpo_async.agents.environments import load_environment_agent, tasks
from grpo_async.agents.session import AgentSession
from grpo_async.config.sections import AgentSection
from grpo_async.errors import ConfigError
from grpo_async.records import RolloutCompletion
from tests.agents.page import FILES, learn, play_in_turn
from tests.agents.support import FakePolicy, calls, renderer, serving, settings
from tests.support.waiting import until

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
    questions: int = 2
    player: vf.AgentConfig = vf.AgentConfig()

class TalkEnv(vf.Env[TalkConfig]):
    """A user who asks again."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            for question in ("One?", "Two?", "Three?")[: self.config.questions]:
                if (await talk.turn(question)).terminated:
                    break
'''

JUDGED = """
import verifiers.v1 as vf

__all__ = ["JudgedTaskset", "JudgedEnv"]

class JudgedTask(vf.Task[vf.TaskData]):
    pass

class JudgedTaskset(vf.Taskset[JudgedTask, vf.TasksetConfig]):
    def load(self):
        yield JudgedTask(vf.TaskData(prompt="Say hello."), self.config.task)

class JudgedConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()

class JudgedEnv(vf.Env[JudgedConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        trace = await agents.player.run(task)
        question = vf.TaskData(prompt=f"Was this polite? {trace.last_reply}")
        verdict = await agents.judge.run(vf.Task(question))
        if "polite" not in verdict.last_reply:
            raise RuntimeError("the jury is out")
        trace.record_reward("polite", 1.0, 1.0)
"""

TOOLS_SERVER = '''
from openenv.core.env_server import (
    CallToolAction, CallToolObservation, Environment, ListToolsAction, ListToolsObservation, Observation, State, Tool, create_app
)

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

class Greeting(Observation):
    text: str = ""

class Refusal(Observation):
    tool_name: str = "shout"
    error: str = "not so loud"

class Shout(Environment):
    """Two shouts end it, and each pays 0.5."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def reset(self, seed=None, episode_id=None, greeting="", is_over=False, **columns):
        self.count = 0
        return Greeting(text=greeting, done=is_over)

    def step(self, action, timeout_s=None, **options):
        if isinstance(action, ListToolsAction):
            return ListToolsObservation(tools=[Tool(name="shout", description="Shouts.", input_schema=SCHEMA)])
        text = action.arguments["text"].upper()
        if text == "LOUDER":
            return Refusal()
        self.count += 1
        return CallToolObservation(tool_name="shout", result={"data": text}, reward=0.5, done=self.count == 2)

    @property
    def state(self):
        return State(step_count=self.count)

app = create_app(Shout, CallToolAction, CallToolObservation, max_concurrent_envs=1)
'''


def _section(environment: str, **arguments: Any) -> AgentSection:
    return AgentSection(environment=environment, arguments=arguments)


def _play(section: AgentSection, row: dict[str, Any], *answers: str, **limits: Any) -> Any:
    (found,) = asyncio.run(play_in_turn(load_environment_agent(section, max_concurrent=4), (row, answers), **limits))
    return found


def _play_in_turn(agent: Agent, *rollouts: tuple[dict[str, Any], list[str]], all_trained: bool = True) -> Any:
    return asyncio.run(play_in_turn(agent, *rollouts, all_trained=all_trained))


def _told(completion: RolloutCompletion) -> list[str]:
    """Results of tools."""
    return [message.content for message in completion.completion_messages() if message.role == "tool"]


def _children(part_of_command: str) -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [each for each in found if each.is_running() and part_of_command in " ".join(each.cmdline())]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that this process and its children can import."""
    for name in ("sums_taskset.py", "sums_server.py"):
        (tmp_path / name).write_text(FILES[name])
    (tmp_path / "talk_taskset.py").write_text(TALK)
    (tmp_path / "judged_taskset.py").write_text(JUDGED)
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


@contextmanager
def _serving(app: str) -> Iterator[str]:
    """The reference of an environment whose server runs while the block does."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        options = ["--fd", str(listening.fileno()), "--log-level", "warning"]
        command = [sys.executable, "-m", "uvicorn", app, *options]
        with subprocess.Popen(command, pass_fds=[listening.fileno()]) as server:
            try:
                url = f"http://127.0.0.1:{listening.getsockname()[1]}"
                httpx.get(f"{url}/schema", timeout=100.0, trust_env=False)  # answered when it has started
                yield f"openenv:{url}"
            finally:
                server.kill()


def test_a_library_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for environment, extra in (
        ("verifiers:x", "verifiers"),
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
    use = [calls("abacus", beads=3), calls("calculator", expression=prompt["content"].strip("= "))]
    result, completion = _play(_section(TASKSET), row, *use, row["task"]["answer"])
    assert result.reward == 1.0
    assert result.columns == {"correct": 1.0, "num_tool_calls": 2.0}
    assert not completion.branches
    assert _told(completion) == ["error: there is no tool 'abacus'; there are ['calculator']", row["task"]["answer"]]
    assert not _children("sums_taskset")


@pytest.mark.usefixtures("verifiers")
def test_a_simulated_user_of_verifiers_talks_over_several_turns_and_rewards_have_their_weights() -> None:
    (row,) = tasks("verifiers:talk_taskset")
    assert row["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "talk"}]
    result, completion = _play(_section("verifiers:talk_taskset"), row, "Yes.", "No, please.")
    assert result.reward == 2 * 0.5 + 1.0
    assert result.columns == {"turns": 2.0, "polite": 1.0}
    roles = [
        (message.role, message.content)
        for message in [*(completion.prompt_messages or ()), *completion.completion_messages()]
    ]
    assert roles == [
        ("system", "Be brief."),
        ("user", "One?"),
        ("assistant", "Yes."),
        ("user", "Two?"),
        ("assistant", "No, please."),
    ]


@pytest.mark.usefixtures("verifiers")
def test_a_taskset_scores_what_there_is_when_the_budget_of_tokens_is_used_up() -> None:
    (row,) = tasks("verifiers:talk_taskset")
    section = _section("verifiers:talk_taskset", questions=3)
    result, completion = _play(section, row, "Yes.", "never said", max_turns=1)
    assert completion.truncated
    assert result.columns["turns"] == 2.0  # no token was left for the second, and the third was refused


@pytest.mark.usefixtures("verifiers")
def test_an_agent_that_is_not_trainable_is_played_by_the_policy_and_not_trained() -> None:
    """Such as a judge, which verifiers does not train either."""
    (row,) = tasks("verifiers:judged_taskset")
    agent = load_environment_agent(_section("verifiers:judged_taskset"), max_concurrent=1)
    [(result, completion)] = _play_in_turn(agent, (row, ["Good day.", "It was polite."]), all_trained=False)
    assert result.columns == {"polite": 1.0}
    assert [message.content for message in completion.completion_messages()] == ["Good day."]
    assert not completion.branches


@pytest.mark.usefixtures("verifiers")
def test_an_environment_that_raises_fails_its_rollout_with_the_reason() -> None:
    (row,) = tasks("verifiers:judged_taskset")
    agent = load_environment_agent(_section("verifiers:judged_taskset"), max_concurrent=1)
    with pytest.raises(AgentError, match=r"the environment failed: .*the jury is out"):
        _play_in_turn(agent, (row, ["Good day.", "Hm."]))


@pytest.mark.usefixtures("verifiers")
def test_what_verifiers_cannot_load_or_play_is_told() -> None:
    with pytest.raises(ConfigError, match=r"rollout.agent.environment: verifiers:nowhere.*'nowhere' not found"):
        load_environment_agent(_section("verifiers:nowhere"), max_concurrent=1)
    with pytest.raises(
        ConfigError,
        match=r"rollout\.agent\.arguments: (taskset\.)?num_taskz: Extra inputs .*settings of the taskset '\w+'",
    ) as raised:
        load_environment_agent(_section(TASKSET, taskset={"num_taskz": 3}), max_concurrent=1)
    assert "pydantic" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"rollout\.agent\.arguments\.taskset: is 'gsm8k'; it must be the settings"):
        load_environment_agent(_section(TASKSET, taskset="gsm8k"), max_concurrent=1)
    with pytest.raises(AgentError, match=r"no column `task`.*agents.environments:tasks"):
        _play(_section(TASKSET), ROW)


@pytest.mark.usefixtures("openenv")
def test_an_action_is_the_call_of_a_tool_and_what_an_environment_of_openenv_does_not_take_is_told() -> None:
    wrong = calls("calculator", expression="1 +")
    with _serving("sums_server:app") as environment:
        agent = load_environment_agent(_section(environment, tool="calculator", max_steps=2), max_concurrent=2)
        first, second, third = _play_in_turn(
            agent,
            (ROW, [calls("abacus", beads=3), calls("calculator", beads=3), SUM + "\n" + SUM]),
            (ROW, [wrong, wrong, SUM]),
            (ROW, [wrong + "\n" + wrong + "\n" + SUM]),
        )
    told = _told(first[1])
    assert told[0] == "error: there is no tool 'abacus', only 'calculator'"
    assert told[1].startswith("error: ")
    assert "VALIDATION_ERROR" in told[1]
    assert [result.reward for result, _ in (first, second, third)] == [1.0, 0.0, 0.0]
    assert [result.columns for result, _ in (first, second, third)] == [
        {"steps": 2, "done": True},  # one that was refused, and the first of two sums
        {"steps": 2, "done": False},  # the limit
        {"steps": 2, "done": False},  # the limit, within one answer
    ]
    assert "not an arithmetic expression" in _told(second[1])[0]
    offered = renderer().completion_text(list(first[1].prompt_ids))
    assert "expression" in offered
    assert "metadata" not in offered


@pytest.mark.usefixtures("openenv")
def test_tools_that_an_environment_of_openenv_lists_are_offered_and_a_server_without_room_says_what_to_set() -> None:
    policy = FakePolicy(renderer(), lambda _: calls("shout", text="a"), per_chunk=1)

    async def crowd(environment: str) -> None:
        agent = load_environment_agent(_section(environment), max_concurrent=2)
        policy.gate = asyncio.Event()
        try:
            async with serving(policy) as (endpoint, session):
                given = settings(stop_token_ids=policy.chat.end_of_turn_ids)
                first = asyncio.create_task(agent.run(dict(ROW), session))
                await until(lambda: bool(policy.served), within_s=60.0)  # it has its session of the environment
                with pytest.raises(AgentError, match=r"max_concurrent_envs.*rollout\.agent\.max_concurrent"):
                    await agent.run(dict(ROW), AgentSession(endpoint.sessions, "g7-r1", settings=given, seed=6))
                policy.gate.set()
                assert (await first).reward == 1.0
        finally:
            await agent.aclose()

    with _serving("shout_server:app") as environment:
        agent = load_environment_agent(_section(environment), max_concurrent=2)
        (result, completion), (nothing, _) = _play_in_turn(
            agent,
            (ROW | {"greeting": "Hello."}, [calls("shout", text=text) for text in ("a", "louder", "b")]),
            (ROW | {"is_over": True}, []),
        )
        asyncio.run(crowd(environment))
    assert result.reward == 1.0
    assert _told(completion) == ["A", "error: not so loud"]
    assert [message.content for message in completion.prompt_messages or ()] == ["12 + 7 - 30 =\n\nHello."]
    assert nothing.columns == {"steps": 0, "done": True}


@pytest.mark.usefixtures("openenv")
def test_what_openenv_cannot_serve_is_told() -> None:
    with pytest.raises(ConfigError, match=r"is not a URL; start the environment's server"):
        load_environment_agent(_section("openenv:nowhere"), max_concurrent=1)
    with pytest.raises(
        ConfigError, match=r"rollout\.agent\.arguments\.max_stepz: there is no such setting; the settings are \['max_st"
    ):
        load_environment_agent(_section("openenv:http://127.0.0.1:9", max_stepz=3), max_concurrent=1)
    with pytest.raises(AgentError, match=r"no server of OpenEnv at http://127.0.0.1:9"):
        _play(_section("openenv:http://127.0.0.1:9"), ROW)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("library", ["verifiers", "openenv"])
def test_a_model_learns_in_an_environment_of_a_library(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(library)
    if library == "openenv":
        (tmp_path / "sums_server.py").write_text(FILES["sums_server.py"])
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with _serving("sums_server:app") as environment:
            options = "arguments: {tool: calculator}, max_concurrent: 64"
            learn(tmp_path, f"rollout.agent={{environment: '{environment}', {options}}}")
        return
    source = {
        "type": "generator",
        "function": "grpo_async.agents.environments:tasks",
        "arguments": {"environment": TASKSET, "taskset": {"num_tasks": 2000}},
    }
    learn(tmp_path, f"data={json.dumps({'train': source})}", f"rollout.agent={{environment: '{TASKSET}'}}")
