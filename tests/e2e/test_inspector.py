"""The inspector on a run of the real quickstart: what the trainer found for each token reaches its page."""

from __future__ import annotations

from grpo_async.run_directory import RunDir
from tests.e2e.conftest import GoldenRun
from tests.support.stored import read_groups
from tests.viewer.web.serving import serving


def test_a_real_run_is_looked_at_from_its_steps_down_to_its_tokens(golden_run: GoldenRun) -> None:
    folder = golden_run.run.folder
    stored = {each.rollout_id: each for group in read_groups(RunDir(folder).rollouts) for each in group.rollouts}
    with serving(folder) as inspector:
        steps = inspector.json("api/steps", q="trained")["steps"]
        assert sorted(each["step"] for each in steps) == [1, 2, 3, 4, 5, 6]
        row = inspector.json("api/rollouts", q="trained and step=6", limit=1)["rows"][0]
        tokens = inspector.json("api/rollout", id=row["rollout_id"], seq=row["seq"])["tokens"]
        rollout = stored[row["rollout_id"]]
        assert tokens["trainer_logprobs"] == rollout.trainer_logprobs
        assert isinstance(tokens["trainer_logprobs"][0], float)
        assert tokens["entropies"] == rollout.entropies
        assert (tokens["texts"][0], tokens["texts_missing"]) == ("<think>", None)
        (run,) = inspector.json("api/runs")["runs"]
        evaluation = run["evaluations"][-1]
        assert evaluation["step"] == 6
        assert inspector.json("api/summary", run=evaluation["name"])["counts"]["groups"] == 16
