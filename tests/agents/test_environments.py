"""Environments of libraries as agents: the libraries' own code, against the endpoint."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_async.agents.agent import Agent, AgentError
from grpo_async.agents.environments import load_environment_agent, tasks
from grpo_async.config.sections import AgentSection
from grpo_async.errors import ConfigError
from grpo_async.records import RolloutCompletion
from tests.agents.page import FILES, learn, play_in_turn
from tests.agents.support import calls

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
    (tmp_path / "sums_taskset.py").write_text(FILES["sums_taskset.py"])
    (tmp_path / "talk_taskset.py").write_text(TALK)
    (tmp_path / "judged_taskset.py").write_text(JUDGED)
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("HOME", str(tmp_path))  # where verifiers keeps its working folders
    return tmp_path


@pytest.fixture
def verifiers(modules: Path) -> None:
    pytest.importorskip("verifiers.v1")


def test_a_library_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"verifiers:x.*grpo-async\[verifiers\]"):
        load_environment_agent(_section("verifiers:x"), max_concurrent=1)


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


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_model_learns_in_a_taskset_of_verifiers(tmp_path: Path) -> None:
    pytest.importorskip("verifiers")
    source = {
        "type": "generator",
        "function": "grpo_async.agents.environments:tasks",
        "arguments": {"environment": TASKSET, "taskset": {"num_tasks": 2000}},
    }
    learn(tmp_path, f"data={json.dumps({'train': source})}", f"rollout.agent={{environment: '{TASKSET}'}}")
