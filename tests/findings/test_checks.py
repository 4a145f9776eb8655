"""What the figures of a run say about its learning."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_async.findings import Evaluation, Evidence, Finding, Severity, find
from grpo_async.findings.checks import CHECKS
from grpo_async.store.query import parse_query
from grpo_async.viewer.report.chapters import CHAPTERS
from tests.viewer.report.support import steps, wiggle


def _found(evidence: Evidence) -> dict[str, Finding]:
    return {finding.key: finding for finding in find(evidence)}


def _evaluations(*rewards: float, stderr: float = 0.02) -> list[Evaluation]:
    return [
        Evaluation(step=10 * place, when="step", metrics={"reward": reward, "reward_stderr": stderr})
        for place, reward in enumerate(rewards)
    ]


def _flat(**changes: float) -> list[dict[str, float]]:
    return [{**row, "reward": 0.2 + wiggle(int(row["step"]))} for row in steps(20, **changes)]


def test_a_run_that_learns_is_called_so() -> None:
    evidence = Evidence(metrics=steps(20), evaluations=_evaluations(0.2, 0.5, 0.8))
    found = find(evidence)
    assert [finding.severity for finding in found if finding.severity in (Severity.ERROR, Severity.WARNING)] == []
    assert {finding.key for finding in found} == {"reward-trend", "held-out"}
    numbers = {finding.key: finding.numbers for finding in found}
    assert numbers["reward-trend"]["change"] == pytest.approx(0.6, abs=0.03)
    # 2 standard errors of 0.0283 each way
    assert numbers["held-out"]["low"] == pytest.approx(0.6 - 1.97 * 0.0283, abs=1e-2)


def test_a_flat_reward_is_a_warning_and_not_called_learning() -> None:
    assert _found(Evidence(metrics=_flat()))["reward-trend"].what == "The reward is flat"


def test_a_falling_reward_is_bad() -> None:
    finding = _found(Evidence(metrics=steps(20, first=0.8, last=0.3)))["reward-trend"]
    assert (finding.severity, finding.what) == (Severity.ERROR, "The reward fell")
    assert (finding.query, finding.sort) == ("", "reward"), "the lowest rewards first, whatever their range is"


def test_five_steps_are_too_few_for_a_trend() -> None:
    assert _found(Evidence(metrics=steps(5)))["reward-trend"].severity is Severity.NOTE


def test_a_reward_at_its_top_from_the_beginning_has_nothing_to_gain() -> None:
    finding = _found(Evidence(metrics=steps(20, first=1.0, last=1.0, reward_min=0.5)))["reward-trend"]
    assert finding.what == "The reward was at its top from the first step on"


def test_groups_without_variance_at_the_bottom_are_bad_and_name_the_share() -> None:
    metrics = steps(20, first=0.0, last=0.0, frac_reward_zero_std=0.95)
    evidence = Evidence(metrics=metrics, config={"rollout": {"group_size": 8}})
    finding = _found(evidence)["zero-variance"]
    assert finding.severity is Severity.ERROR
    assert "95%" in finding.text
    assert "A group of 8" in finding.text
    assert finding.query == "group_std=0"


def test_groups_without_variance_at_the_top_are_solved() -> None:
    finding = _found(Evidence(metrics=steps(30, first=0.2, last=1.0, frac_reward_zero_std=0.8)))["zero-variance"]
    assert (finding.severity, finding.what) == (Severity.NOTE, "Most groups are solved by now")


def test_rewards_that_are_all_none_are_bad() -> None:
    metrics = [{name: value for name, value in row.items() if name != "reward"} for row in steps(10)]
    finding = _found(Evidence(metrics=metrics, num_sampled=8, num_unscored=8))["unscored"]
    assert finding.severity is Severity.ERROR
    assert "100% of the rollouts (8 of 8)" in finding.text
    assert finding.query == "unscored"


@pytest.mark.parametrize(("share", "level"), [(0.29, None), (0.5, Severity.WARNING), (0.97, Severity.ERROR)])
def test_truncation_is_judged_by_its_share(share: float, level: Severity | None) -> None:
    evidence = Evidence(metrics=_flat(rollout__truncated=share), config={"rollout": {"max_completion_tokens": 64}})
    finding = _found(evidence).get("truncated")
    assert (finding and finding.severity) == level
    if finding is not None:
        assert "rollout.max_completion_tokens is 64" in finding.text


def test_a_held_out_reward_that_does_not_follow_hints_at_a_gamed_reward() -> None:
    found = find(Evidence(metrics=steps(20), evaluations=_evaluations(0.4, 0.41, 0.4)))
    finding = next(each for each in found if each.key == "held-out")
    assert (finding.severity, finding.what) == (
        Severity.WARNING,
        "The training reward rose, the held-out reward did not",
    )
    assert finding.sort == "-reward"
    assert "games the reward" in finding.text


def test_few_held_out_prompts_that_go_along_are_no_sign_of_a_gamed_reward() -> None:
    # chance: 2 x sqrt(0.048^2 + 0.048^2) = 0.136, above the change of 0.12; training changes by about 0.13
    metrics = [{**row, "reward": 0.3 + 0.15 * i / 19 + 0.02 * (-1) ** i} for i, row in enumerate(steps(20))]
    found = find(Evidence(metrics=metrics, evaluations=_evaluations(0.3, 0.42, stderr=0.048)))
    finding = next(each for each in found if each.key == "held-out")
    assert (finding.severity, finding.what) == (Severity.NOTE, "Whether the held-out reward rose cannot be told")
    assert finding.numbers["high"] - finding.numbers["change"] == pytest.approx(0.134, abs=1e-3)  # 1.97 standard errors
    assert "evaluation.num_prompts" in finding.do
    assert "games" not in finding.text


def test_a_held_out_reward_that_stays_far_behind_training_is_a_warning_though_it_rose_a_little() -> None:
    evidence = Evidence(metrics=steps(20), evaluations=_evaluations(0.3, 0.35, stderr=0.048))
    finding = _found(evidence)["held-out"]
    title = "The training reward rose, the held-out reward rose far less"
    assert (finding.severity, finding.what) == (Severity.WARNING, title)
    assert "games the reward" in finding.text


def test_a_held_out_reward_that_falls_is_bad_whether_training_rises_or_not() -> None:
    rising = _found(Evidence(metrics=steps(20), evaluations=_evaluations(0.6, 0.4, 0.3)))
    assert rising["held-out"].severity is Severity.ERROR
    flat = _found(Evidence(metrics=_flat(), evaluations=_evaluations(0.6, 0.4, 0.3)))
    assert (flat["held-out"].severity, flat["held-out"].what) == (Severity.ERROR, "The held-out reward fell")
    assert not {"held-out-peaked"} & (rising.keys() | flat.keys()), "there is no checkpoint of before training"


def test_a_better_checkpoint_in_the_past_is_named() -> None:
    finding = _found(Evidence(metrics=_flat(), evaluations=_evaluations(0.2, 0.7, 0.2)))["held-out-peaked"]
    assert finding.what == "The held-out reward was better before"
    assert "0.7 at step 10" in finding.text


def test_a_held_out_reward_below_its_best_has_risen_all_the_same() -> None:
    found = find(Evidence(metrics=steps(20), evaluations=_evaluations(0.2, 0.8, 0.7, stderr=0.01)))
    levels = {each.key: each.severity for each in found}
    assert (levels["held-out"], levels["held-out-peaked"]) == (Severity.GOOD, Severity.WARNING)


def test_no_evaluation_is_noted() -> None:
    assert _found(Evidence(metrics=steps(20)))["no-evaluation"].severity is Severity.NOTE


def test_a_mismatch_from_the_first_step_on_is_the_servers() -> None:
    finding = _found(Evidence(metrics=_flat(sampling__sampling_logp_difference__mean=0.5)))["off-policy"]
    assert finding.severity is Severity.ERROR
    assert "0.5 nats" in finding.text
    assert "in the first step already" in finding.text


def test_a_ratio_that_drifts_came_with_training() -> None:
    metrics = _flat()
    for row in metrics[5:]:
        row["sampling/importance_sampling_ratio/mean"] = 1.2
    finding = _found(Evidence(metrics=metrics))["off-policy"]
    assert finding.severity is Severity.WARNING
    assert "importance ratio is 1.2" in finding.text
    assert "It came with training" in finding.text


def test_a_ratio_below_one_is_as_far_as_one_above() -> None:
    metrics = _flat(sampling__importance_sampling_ratio__mean=0.5)  # 1 / 0.5 = 2
    assert _found(Evidence(metrics=metrics))["off-policy"].severity is Severity.ERROR


def test_an_entropy_that_collapses_without_reward_is_a_warning_and_with_it_a_note() -> None:
    flat, rising = _flat(), steps(20)
    for rows in (flat, rising):
        for row in rows[8:]:
            row["entropy"] = 0.01
    assert _found(Evidence(metrics=flat))["entropy"].what == "The entropy collapsed"
    assert _found(Evidence(metrics=flat))["entropy"].severity is Severity.WARNING
    assert _found(Evidence(metrics=rising))["entropy"].severity is Severity.NOTE


def test_an_entropy_that_explodes_is_a_warning() -> None:
    metrics = _flat()
    for row in metrics[10:]:
        row["entropy"] = 4.0
    assert _found(Evidence(metrics=metrics))["entropy"].what == "The entropy exploded"


def test_lengths_that_grow_without_reward_are_a_warning() -> None:
    metrics = _flat()
    for row in metrics:
        row["completions/mean_length"] = 40.0 + 10.0 * row["step"]
    finding = _found(Evidence(metrics=metrics))["lengths"]
    assert (finding.severity, finding.sort) == (Severity.WARNING, "-length")
    # the first three steps: 50, 60, 70 -> 60; the last three: 220, 230, 240 -> 230
    assert "from 60 to 230 tokens (3.8 times)" in finding.text


def test_lengths_that_shrink_are_a_warning() -> None:
    metrics = _flat()
    for row in metrics[10:]:
        row["completions/mean_length"] = 4.0
    assert _found(Evidence(metrics=metrics))["lengths"].what == "Completions grew short"


def test_tool_calls_that_cannot_be_read_fail_or_are_not_made() -> None:
    titles = [
        _found(Evidence(metrics=_flat(**changes)))["tools"].what
        for changes in (
            {"tools__parse_error_frequency": 0.3},
            {"tools__failure_frequency": 0.7},
            {"tools__call_frequency": 0.0},
        )
    ]
    assert titles == ["Tool calls cannot be read", "Most tool calls fail", "The tools are hardly ever called"]


def test_failed_groups_are_counted_against_those_started() -> None:
    metrics = _flat(ledger__groups__failed=60.0)
    found = _found(Evidence(metrics=metrics, errors=[("ReadTimeout", 7)]))
    assert found["failed-groups"].severity is Severity.ERROR
    assert "60% of the groups failed" in found["failed-groups"].text
    assert "7 times: ReadTimeout" in found["failed-groups"].text


def test_a_gradient_or_a_learning_rate_of_zero_is_bad() -> None:
    assert _found(Evidence(metrics=_flat(grad_norm=0.0)))["no-gradient"].what == "The gradient is 0"
    assert _found(Evidence(metrics=_flat(lr=0.0)))["no-gradient"].what == "The learning rate is 0"


def test_a_policy_that_an_update_does_not_move_is_told_with_the_learning_rate() -> None:
    still: dict[str, Any] = {
        "sampling__importance_sampling_ratio__min": 0.9999,
        "sampling__importance_sampling_ratio__max": 1.0001,
        "lr": 1e-9,
    }
    finding = _found(Evidence(metrics=_flat(**still)))["hardly-moves"]
    assert finding.severity is Severity.ERROR
    assert (finding.setting, finding.current) == ("optimizer.lr", 1e-9)
    on_policy = {
        **still,
        "lr": 1e-6,
        "async__staleness_mean": 0.0,
    }  # samples of the policy itself have a ratio of 1 whatever the step is
    assert "hardly-moves" not in _found(Evidence(metrics=_flat(**on_policy)))


def test_skipped_updates_and_spikes_are_told() -> None:
    assert (
        "updates were not finite" in _found(Evidence(metrics=_flat(training__skipped_updates=1.0)))["bad-updates"].text
    )
    metrics = _flat()
    metrics[6]["grad_norm"] = 100.0
    finding = _found(Evidence(metrics=metrics))["bad-updates"]
    assert finding.query == "step=7"
    assert "100 at step 7" in finding.text


def test_clipping_masking_and_kl_are_judged_by_the_end_of_the_run() -> None:
    changes = {"clip_ratio__region_mean": 0.4, "masked__off_policy": 0.95, "kl": 8.0}
    found = _found(Evidence(metrics=_flat(**changes)))
    assert [found[name].severity for name in ("clipped", "masked", "kl")] == [
        Severity.WARNING,
        Severity.ERROR,
        Severity.WARNING,
    ]
    assert "loss.off_policy_mask leaves 95%" in found["masked"].text


def test_a_part_of_the_reward_that_never_moves_is_named_where_there_are_others() -> None:
    changes = {"rewards__format__mean": 0.0, "rewards__format__std": 0.0, "rewards__exact__std": 0.3}
    metrics = [{**row, "rewards/exact/mean": row["reward"]} for row in steps(20, **changes)]
    finding = _found(Evidence(metrics=metrics))["reward-parts"]
    assert "format (0)" in finding.text
    assert finding.query == "rewards['format']<=0"
    alone = [{**row, "rewards/format/mean": 0.0, "rewards/format/std": 0.0} for row in steps(20)]
    assert "reward-parts" not in _found(Evidence(metrics=alone))


def test_a_run_without_a_step_says_how_it_ended() -> None:
    found = find(Evidence(status="failed", error="the server died: out of memory\nmore"))
    assert [finding.key for finding in found] == ["no-steps", "no-evaluation"]
    assert "the server died: out of memory" in found[0].text


def test_the_worst_comes_first() -> None:
    levels = [finding.severity.rank for finding in find(Evidence(metrics=_flat(rollout__truncated=0.95, kl=9.0)))]
    assert levels == sorted(levels)
    assert levels[0] == Severity.ERROR.rank


def test_every_check_survives_missing_metrics() -> None:
    for metrics in ([], [{"step": 1.0}], [{"step": float(step)} for step in range(30)]):
        for check in CHECKS:
            check(Evidence(metrics=metrics))


_ALL = (
    Evidence(),
    Evidence(metrics=_flat(rollout__truncated=0.95, kl=9.0, clip_ratio__region_mean=0.4, masked__off_policy=0.95)),
    Evidence(metrics=_flat(sampling__ess=0.1, tools__failure_frequency=0.9, training__skipped_updates=1.0)),
    Evidence(metrics=_flat(ledger__groups__failed=60.0, ledger__groups__stale=30.0, tools__parse_error_frequency=0.5)),
    Evidence(metrics=_flat(grad_norm=0.0, frac_reward_zero_std=1.0, tools__call_frequency=0.0)),
    Evidence(metrics=steps(20, first=0.8, last=0.3, lr=0.0), evaluations=_evaluations(0.3, 0.9, 0.4)),
    Evidence(metrics=steps(20), evaluations=_evaluations(0.6, 0.3)),
)


def test_every_command_holds_a_query_that_can_be_read_and_every_plot_exists() -> None:
    plots = {plot.name for chapter in CHAPTERS for plot in chapter.plots} | {"held-out"}
    found = [finding for evidence in _ALL for finding in find(evidence)]
    assert len({finding.key for finding in found}) >= 15
    for finding in found:
        parse_query(finding.query or "")
        assert finding.plot is None or finding.plot in plots, finding.key
