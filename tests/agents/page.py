"""The files of docs/howto/agent.md, and rollouts of their agents with a policy whose answers are given."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_async.agents.agent import Agent, AgentResult
from grpo_async.agents.session import AgentSession
from grpo_async.quickstart.prepare import prepare
from grpo_async.records import RolloutCompletion, RolloutStatus
from tests.agents.support import FakePolicy, check_exact, renderer, serving, settings
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


async def play_in_turn(
    agent: Agent, *rollouts: tuple[Mapping[str, Any], Sequence[str]], all_trained: bool = True, **limits: Any
) -> list[tuple[AgentResult, RolloutCompletion]]:
    """Rollouts of one agent, each with its row and the policy's answers, whose tokens are checked if `all_trained`."""
    found = []
    said: Iterator[str] = iter(())
    policy = FakePolicy(renderer(), lambda _: next(said))
    try:
        async with serving(policy, **limits) as (endpoint, _):
            given = settings(stop_token_ids=policy.chat.end_of_turn_ids, **limits)
            for number, (row, answers) in enumerate(rollouts):
                said = iter(answers)
                session = AgentSession(endpoint.sessions, f"g8-r{number}", settings=given, seed=number)
                result = await agent.run(dict(row), session)
                found.append((result, session.completion(RolloutStatus.FINISHED)))
                policy.served = [each for each in policy.served if each.request.request_id.startswith(f"g8-r{number}")]
                if all_trained:
                    check_exact(policy, found[-1][1])
    finally:
        await agent.aclose()
    return found


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
