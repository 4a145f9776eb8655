"""The files of docs/howto/agent.md, and rollouts of their agents with a policy whose answers are given."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_async.agents.agent import Agent, AgentResult
from grpo_async.quickstart.prepare import prepare
from grpo_async.records import RolloutCompletion, RolloutStatus
from tests.agents.support import FakePolicy, check_exact, renderer, serving
from tests.e2e.support import REPOSITORY, make_run

FILES = {
    name: text
    for text, name in re.findall(
        r"^```(?:python|javascript)\n((?:#|//) ([\w.]+).*?)^```$",
        (REPOSITORY / "docs" / "howto" / "agent.md").read_text(),
        re.M | re.S,
    )
}
"""Name -> text: the first line of a block names the file."""


async def play(
    agent: Agent, row: Mapping[str, Any], answers: Sequence[str], *, all_trained: bool = True, **limits: Any
) -> tuple[AgentResult, RolloutCompletion]:
    """A rollout of an agent with these answers of the policy; its tokens are checked if `all_trained`."""
    said = iter(answers)
    policy = FakePolicy(renderer(), lambda _: next(said))
    try:
        async with serving(policy, **limits) as (_, session):
            result = await agent.run(dict(row), session)
            completion = session.completion(RolloutStatus.FINISHED)
    finally:
        await agent.aclose()
    if all_trained:
        check_exact(policy, completion)
    return result, completion


def learn(folder: Path, *overrides: str) -> None:
    """Run the tiny tool model in the embedded engine, in a folder with the page's files: its reward is low at first and rises
    clearly."""
    prepare(REPOSITORY, task="tool")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    run = make_run(folder, "tools.yaml", ["tools=[]", "rewards=[]", "evaluation=null", *overrides])
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    summary, _ = run.complete(timeout_s=900.0, environment={"PYTHONPATH": os.pathsep.join(paths)})
    assert summary["reward_first"] < 0.5, summary  # what it knows before, it has not learned here
    assert summary["reward_last"] > summary["reward_first"] + 0.2, summary
