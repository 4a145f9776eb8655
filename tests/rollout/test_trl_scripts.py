"""Rewards, tools and environments in the shapes of TRL's example scripts: rollouts are made and scored, with TRL's numbers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_async.chat.renderer import PolicyTurn
from grpo_async.config.sections import AdvantageSection, EnvironmentSection, JsonlSource, RewardSection, ToolSection
from grpo_async.data import load_rows, make_prompt
from grpo_async.envs import load_environments
from grpo_async.inference.sampling import SamplingSettings
from grpo_async.records import ScoredGroup, ToolCall
from grpo_async.rewards import load_rewards
from grpo_async.rollout.components import Components
from grpo_async.rollout.conversation import ConversationProducer
from grpo_async.rollout.group import ErrorLog
from grpo_async.scoring.scorer import Scorer
from grpo_async.tools import load_tools
from tests.rollout.fakes import EOS, FakeRenderer, ScriptedClient, open_group, stop

HERE = "tests.rollout.trl_scripts"
Calls = Sequence[tuple[str, dict[str, Any]]]


class _Renderer(FakeRenderer):
    """Reads the n-th turn as the n-th call, and the turn after the last one as an answer."""

    calls: Calls = ()

    def parse(self, token_ids: Sequence[int], *, turn: int = 0, **_: Any) -> PolicyTurn:
        if turn >= len(self.calls):
            return PolicyTurn(text="*yes*", content="*yes*")
        name, arguments = self.calls[turn]
        made = ToolCall(tool_call_id=f"call{turn:05d}", name=name, arguments=arguments)
        return PolicyTurn(text="", content="", tool_calls=[made])


def play(
    rows: Sequence[dict[str, Any]],
    calls: Calls,
    *,
    folder: Path,
    rewards: Sequence[RewardSection] = (),
    tools: Sequence[ToolSection] = (),
    **environments: EnvironmentSection,
) -> list[ScoredGroup]:
    """Two rollouts of each row, in which the policy makes these calls and then answers."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_rows(JsonlSource(path=folder / "rows.jsonl"), needs_prompt=not environments)
    functions, made = load_rewards(rewards), load_tools(tools)
    pools = load_environments(environments) if environments else None
    components = Components(tools=made, environments=pools, function=None)
    renderer: Any = _Renderer()
    renderer.calls = calls
    client: Any = ScriptedClient(*[stop(5 + turn, EOS) for turn in range(len(calls) + 1)])
    settings = SamplingSettings(temperature=1.0, max_completion_tokens=500, max_model_len=2000, max_turns=9)
    producer = ConversationProducer(
        client, renderer, settings, slots=asyncio.Semaphore(8), rollout_timeout_s=120.0, max_result_chars=500,
        errors=ErrorLog(), tools=made, environments=pools,
    )  # fmt: skip
    weights = components.reward_weights
    scorer = Scorer(functions, advantage=AdvantageSection(), train_zero_variance=True, environment_weights=weights)

    async def run() -> list[ScoredGroup]:
        scored = []
        try:
            for number, row in enumerate(loaded):
                group = open_group(make_prompt(row, number, None))
                async with producer.produce(group):
                    scored.append(await scorer.score(group.record, environments=group.environments))
        finally:
            await components.aclose()
            for function in functions:
                function.close()
        return scored

    return asyncio.run(run())


def _rows(*columns: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": "Begin."}], **each} for each in columns]


def _rewards(*names: str) -> list[RewardSection]:
    return [RewardSection(function=f"{HERE}:{name}") for name in names]


def test_a_tool_with_an_alarm_gives_rewards_the_rows_that_it_returned(tmp_path: Path) -> None:
    """Each query adds 0.1: its rows are there, and the answer is yes: 2.1; no: -1.4."""
    rows = _rows({"answer": "yes"}, {"answer": "no"})
    tool = ToolSection(function=f"{HERE}:query", run_in="process")
    calls = [("query", {"sql": "SELECT 1, 'a'"})]
    scored = play(rows, calls, folder=tmp_path, rewards=_rewards("evidence"), tools=[tool])
    assert [group.rewards for group in scored] == [[pytest.approx(2.1)] * 2, [pytest.approx(-1.4)] * 2]
    message = scored[0].group.completions[0].completion_messages()[1]
    assert message.content == "[(1, 'a')]"
    failed = play(
        rows[:1], [("query", {"sql": "SELECT x"})], folder=tmp_path, rewards=_rewards("evidence"), tools=[tool]
    )
    assert failed[0].rewards == [-2.0, -2.0]


@pytest.mark.parametrize("run_in", ["thread", "process"])
def test_rewards_read_the_state_of_environments_wherever_these_live(tmp_path: Path, run_in: Any) -> None:
    """up, down: 2 + 1 = 3 and the game is over; the third call fails. With 2 moves on the board: 5."""
    calls = [("move", {"direction": each}) for each in ("up", "down", "up")]
    section = EnvironmentSection(factory=f"{HERE}:Board", run_in=run_in)
    (scored,) = play(_rows({}), calls, folder=tmp_path, rewards=_rewards("score"), board=section)
    assert scored.rewards == [5.0, 5.0]
    last = scored.group.completions[0].turns[2].tool_calls[0]
    assert (last.failed, json.loads(last.result)) == (True, {"error": "ValueError: Game over."})


def test_rewards_of_games_behind_one_class_apply_to_their_own_rows(tmp_path: Path) -> None:
    section = EnvironmentSection(factory=f"{HERE}:Two")
    rows = _rows({"env": "first"}, {"env": "second"})
    scored = play(
        rows, [("guess", {"word": "crane"})], folder=tmp_path, rewards=_rewards("first", "second"), two=section
    )
    assert [group.reward_parts[0] for group in scored] == [
        {"first": 1.0, "second": None},
        {"first": None, "second": 0.5},
    ]


def test_environments_that_own_their_data_need_the_column_environment_alone(tmp_path: Path) -> None:
    rows = [{"environment": "owning"}, {"environment": "board"}]
    sections = {name: EnvironmentSection(factory=f"{HERE}:{name.title()}") for name in ("owning", "board")}
    calls = [("compute", {"code": "1"}), ("move", {"direction": "up"})]
    owned, board = play(rows, calls, folder=tmp_path, **sections)
    assert owned.reward_parts == [{"Owning": 1.0}] * 2
    assert board.rewards == [None, None]
    (prompt,) = owned.group.completions[0].prompt_messages or ()
    assert prompt.content.startswith("Compute the ")
    results = [[turn.tool_calls[0].failed for turn in each.group.completions[0].turns[:2]] for each in (owned, board)]
    assert results == [[False, True], [True, False]]  # only its own environment's tools are a rollout's
