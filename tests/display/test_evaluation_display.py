"""What the user sees of evaluations: a line when one ends, the last ones in the panel, a table at the end."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from grpo_async.display.progress import Progress, evaluation_line, evaluations_text
from grpo_async.display.summary import print_summary

METRICS = {"reward": 0.5, "reward_std": 0.1, "pass@4": 0.75, "majority@4": 0.6, "mean_length": 20.0, "version_min": 4.0,
           "version_max": 6.0, "mixed": 1.0, "reward/gsm8k": 0.25, "pass@4/gsm8k": 0.5}  # fmt: skip


def test_a_line_has_the_numbers_over_everything_and_says_which_versions_made_them() -> None:
    assert evaluation_line("step 4", METRICS) == (
        "held-out at step 4: reward 0.500  pass@4 0.750  majority@4 0.600  mean_length 20.000  versions 4 to 6"
    )
    assert evaluation_line("after", {"reward": 1.0, "mixed": 0.0}) == "held-out after training: reward 1.000"


def test_the_panel_shows_the_first_evaluation_and_the_last_three() -> None:
    progress = Progress(max_steps=9)
    assert evaluations_text(progress) is None
    for number, when in enumerate(("before", "step 2", "step 4", "step 6", "step 8")):
        progress.evaluations[when] = {"reward": number / 10}
    progress.evaluations["after"] = {}
    assert evaluations_text(progress) == "before 0.000  step 4 0.200  step 6 0.300  step 8 0.400"


def test_the_summary_ends_with_a_table_where_it_says_more_than_a_line() -> None:
    def shown(evaluation: dict[str, object]) -> str:
        console = Console(file=io.StringIO(), width=80, highlight=False)
        print_summary(console, {"status": "finished", "evaluation": evaluation}, Path("runs/x"))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    samples = {"num_prompts": 8.0, "reward": 0.5, "pass@1": 0.5, "pass@2": 0.625}
    parts = {"gsm8k": {**samples, "reward": 0.125}}
    text = shown({"before": None, "after": samples, "by_group": {"after": parts}, "group_by": "source"})
    assert "held out, after training" in text
    assert "gsm8k" in text
    assert "0.125" in text
    greedy = {"num_prompts": 8.0, "reward": 0.5, "pass@1": 0.5}
    assert "held out, " not in shown({"before": greedy, "after": greedy, "by_group": {"after": {}}, "group_by": None})
    stopped = shown({"before": samples, "after": None, "by_group": {}, "group_by": None})
    assert "held out, before training" in stopped
