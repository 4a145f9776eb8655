"""The inspector on a run of the real quickstart: what the trainer found for each token is on the screen."""

from __future__ import annotations

from textual.pilot import Pilot

from grpo_async.run_directory import RunDir
from grpo_async.store.summaries import StepSummary
from grpo_async.viewer.runs import find_evaluation
from grpo_async.viewer.terminal.app import Inspector
from grpo_async.viewer.terminal.browse import BrowseScreen
from grpo_async.viewer.terminal.rollout import RolloutScreen
from grpo_async.viewer.token_text import TokenTexts, load_token_texts
from tests.e2e.conftest import GoldenRun
from tests.support.stored import read_groups
from tests.viewer.terminal.support import drive, on, press, shown


def test_a_real_run_is_looked_at_from_its_steps_down_to_its_tokens(golden_run: GoldenRun) -> None:
    run = golden_run.run
    folder = RunDir(run.folder)
    texts = load_token_texts(folder)
    assert isinstance(texts, TokenTexts)
    rows = {rollout.rollout_id: rollout for group in read_groups(folder.rollouts) for rollout in group.rollouts}

    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await press(pilot, "v", "v")
        table = on(app, BrowseScreen).table
        steps = [table.peek(position) for position in range(table.total)]
        assert [step.step for step in steps if isinstance(step, StepSummary) and step.step is not None] == [
            6,
            5,
            4,
            3,
            2,
            1,
        ]
        await press(pilot, "enter", "enter")  # the groups of step 6, its first group side by side
        assert "step 6" in shown(app)
        assert "answer = " in shown(app)
        await press(pilot, "enter", "right")
        rollout = rows[on(app, RolloutScreen).rollout_id]
        assert rollout.trainer_logprobs is not None
        assert rollout.trainer_logprobs[1] is not None
        page = shown(app)
        assert f"token 2 of {len(rollout.completion_ids)}" in page
        assert f"sampler {rollout.logprobs[1]:.4f}" in page
        assert f"trainer {rollout.trainer_logprobs[1]:.4f}" in page
        assert "not recorded" not in page
        assert texts.of(rollout.completion_ids[0]) == "<think>"
        assert "<think>" in page
        for _ in range(6):
            await press(pilot, "c")

    drive(run.folder, scenario, texts=texts, text="trained")

    async def evaluation(app: Inspector, pilot: Pilot[None]) -> None:
        assert "evaluation of step 6" in shown(app)
        assert "16 groups" in shown(app)
        await press(pilot, "Y")
        assert "--evaluation 6" in app.clipboard
        await press(pilot, "enter", "enter")
        assert "turn 1" in shown(app)

    drive(find_evaluation(folder, "latest"), evaluation, texts=texts)
