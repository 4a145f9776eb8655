"""Environments of libraries as agents: the libraries' own code, against the endpoint."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_async.agents.agent import AgentError
from grpo_async.agents.environments import load_environment_agent, tasks
from grpo_async.config.sections import AgentSection
from tests.agents.page import FILES, learn, play
from tests.agents.support import calls

TASKSET = "verifiers:sums_taskset"

TALK = """
import verifiers.v1 as vf

__all__ = ["TalkTaskset", "TalkEnv"]

class TalkTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=0.5)
    async def turns(self, trace):
        return float(trace.num_turns)

class TalkTaskset(vf.Taskset[TalkTask, vf.TasksetConfig]):
    def load(self):
        yield TalkTask(vf.TaskData(name="talk", system_prompt="Be brief."), self.config.task)

class TalkConfig(vf.EnvConfig):
    questions: int = 2
    player: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()

class TalkEnv(vf.Env[TalkConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            for question in ("One?", "Two?", "Three?")[: self.config.questions]:
                if (await talk.turn(question)).terminated:
                    return
        question = vf.TaskData(prompt=f"Was this polite? {talk.trace.last_reply}")
        verdict = await agents.judge.run(vf.Task(question))
        if "polite" not in verdict.last_reply:
            raise RuntimeError("the jury is out")
        talk.trace.record_reward("polite", 1.0, 1.0)
"""


def _play(environment: str, row: dict[str, Any], *answers: str, arguments: Any = None, **options: Any) -> Any:
    section = AgentSection(environment=environment, arguments=arguments or {})
    return asyncio.run(play(load_environment_agent(section, max_concurrent=4), row, answers, **options))


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of modules that this process and its children can import."""
    pytest.importorskip("verifiers.v1")
    (tmp_path / "sums_taskset.py").write_text(FILES["sums_taskset.py"])
    (tmp_path / "talk_taskset.py").write_text(TALK)
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("HOME", str(tmp_path))  # where verifiers keeps its working folders


@pytest.mark.usefixtures("modules")
def test_a_taskset_makes_the_rows_offers_its_tools_and_its_rewards_and_metrics_come_back() -> None:
    row = next(tasks(TASKSET, taskset={"num_tasks": 1}))
    (prompt,) = row["prompt"]
    assert row["task"] == {"idx": 0, "prompt": prompt["content"], "answer": str(eval(prompt["content"].strip("= ")))}
    assert json.loads(json.dumps(row)) == row
    use = [calls("abacus", beads=3), calls("calculator", expression=prompt["content"].strip("= "))]
    result, completion = _play(TASKSET, row, *use, row["task"]["answer"])
    assert result.reward == 1.0
    assert result.columns == {"correct": 1.0, "num_tool_calls": 2.0}
    assert not completion.branches
    told = [message.content for message in completion.completion_messages() if message.role == "tool"]
    assert told == ["error: there is no tool 'abacus'; there are ['calculator']", row["task"]["answer"]]
    left = psutil.Process().children(recursive=True)
    assert not [each for each in left if each.is_running() and "sums_taskset" in " ".join(each.cmdline())]


@pytest.mark.usefixtures("modules")
def test_a_user_talks_over_several_turns_rewards_have_their_weights_and_a_judge_is_not_trained() -> None:
    (row,) = tasks("verifiers:talk_taskset")
    assert row["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "talk"}]
    answers = ["Yes.", "No, please.", "It was polite."]
    result, completion = _play("verifiers:talk_taskset", row, *answers, all_trained=False)
    assert result.reward == 2 * 0.5 + 1.0
    assert result.columns == {"turns": 2.0, "polite": 1.0}
    assert [message.content for message in completion.prompt_messages] == ["Be brief.", "One?"]
    assert [message.content for message in completion.completion_messages()] == ["Yes.", "Two?", "No, please."]
    assert not completion.branches
    with pytest.raises(AgentError, match=r"the environment failed: .*the jury is out"):
        _play("verifiers:talk_taskset", row, "Yes.", "No.", "Hm.")


@pytest.mark.usefixtures("modules")
def test_a_taskset_scores_what_there_is_when_the_budget_of_tokens_is_used_up() -> None:
    (row,) = tasks("verifiers:talk_taskset")
    result, completion = _play("verifiers:talk_taskset", row, "Yes.", arguments={"questions": 3}, max_turns=1)
    assert completion.truncated
    assert result.columns == {"turns": 2.0}  # no token was left for the second, and the third was refused


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
