"""What bounds a run and what to change: each rule with numbers worked by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from grpo_async.config.keys import ROOT
from grpo_async.findings import Finding
from grpo_async.findings.speed import PipelineMetrics, PipelineSetup, advise, pipeline_metrics
from tests.findings.support import pipeline_setup

SETUP = pipeline_setup()
BUSY = PipelineMetrics(
    num_steps=20, step_s=10.0, trainer_idle=0.05, generator_idle=0.05, running=60.0, waiting=0.0, kv_usage=0.5
)


def _advice(setup: PipelineSetup = SETUP, **metrics: Any) -> Finding:
    advice = advise(replace(BUSY, **metrics), setup)
    assert advice is not None
    return advice


@pytest.mark.parametrize(
    "missing", [{"num_steps": 2}, {"step_s": None}, {"trainer_idle": None}, {"generator_idle": None}]
)
def test_few_steps_and_missing_metrics_say_nothing(missing: dict[str, Any]) -> None:
    assert advise(replace(BUSY, **missing), SETUP) is None


IN_FLIGHT, STALENESS, SERVERS, RANKS = (
    "rollout.max_in_flight", "rollout.max_staleness", "inference.replicas", "launch.num_trainer_ranks"
)  # fmt: skip
BOUND = {"trainer_idle": 0.45, "kv_usage": 0.9}  # by generation: t = 5.5 s, g = 9.5 s
FED = {"generator_idle": 0.7}  # by training: t = 9.5 s, g = 3 s
Change = tuple[str, object, object] | None

# in what the settings and metrics differ from SETUP and BUSY, what bounds the run, the change of a setting, words of the sentence
CASES: list[tuple[dict[str, Any], dict[str, Any], str, Change, str]] = [
    ({}, {}, "nothing", None, "trainer idle 5%, servers idle 5%"),
    # 0.85 / 0.5 = 1.7; 64 x 1.7 = 108.8, in whole groups of 8: 104. 0.85 / 0.2 = 4.25: twice as many at most
    ({}, {"trainer_idle": 0.41}, "too few rollouts in flight", (IN_FLIGHT, 64, 104), "raise rollout.max_in_flight 64 -> 104"),
    ({}, {"trainer_idle": 0.41, "kv_usage": 0.2}, "too few rollouts in flight", (IN_FLIGHT, 64, 128), ""),
    # never more than may be started ahead (256), nor than the embedded engine has slots
    ({"max_in_flight": 200}, {"trainer_idle": 0.41, "kv_usage": 0.2, "running": 190.0}, "too few rollouts in flight",
     (IN_FLIGHT, 200, 256), ""),
    ({"max_in_flight": 256, "on_gpu": False}, {"trainer_idle": 0.41, "kv_usage": 0.2, "running": 250.0}, "generation", None, ""),
    ({"embedded_slots": 80, "on_gpu": False}, {"trainer_idle": 0.41, "kv_usage": 0.1}, "too few rollouts in flight",
     (IN_FLIGHT, 64, 80), ""),
    ({"embedded_slots": 80, "on_gpu": False, "replicas": 2}, {"trainer_idle": 0.41, "kv_usage": 0.1},
     "too few rollouts in flight", (IN_FLIGHT, 64, 128), ""),
    # a full cache: 45 run, 5 whole groups of 8; full, and nobody waits
    ({}, {"kv_usage": 0.98, "running": 45.0, "waiting": 19.0}, "the KV cache", (IN_FLIGHT, 64, 40),
     "98% full, with 19 requests waiting for room and 45 running"),
    ({}, {"kv_usage": 0.98, "running": 45.0, "waiting": 0.5}, "nothing", None, ""),
    # dropped groups
    ({}, {"stale_fraction": 0.12}, "dropped groups", (STALENESS, 1, 2), "because they are older than 1 step:"),
    ({"max_staleness": 4}, {"stale_fraction": 0.5}, "nothing", None, ""),
    # 1 x 0.3 / 0.1 = 3 steps between pushes; max_staleness 1 allows 2, max_staleness 3 the 3
    ({}, {"push_fraction": 0.3}, "weight pushes", ("training.weight_sync_steps", 1, 2), ""),
    ({"max_staleness": 3}, {"push_fraction": 0.3}, "weight pushes", ("training.weight_sync_steps", 1, 3), ""),
    ({"weight_sync_steps": 2}, {"push_fraction": 0.3}, "weight pushes", None, "rollout.max_staleness 1 does not allow fewer"),
    # 60 s of 50 steps of 10 s: 0.12; 50 x 0.12 / 0.05 = 120
    ({}, {"checkpoint_s": 60.0}, "checkpoints", ("checkpoint.every_steps", 50, 120), ""),
    # synchronous: t = 4 s, g = 6 s
    ({"max_staleness": 0}, {"trainer_idle": 0.6, "generator_idle": 0.4}, "waiting for each other", (STALENESS, 0, 1),
     "a step of 10 s could take 6 s"),
    # t = 0.5 s, g = 9.5 s: overlapped, a step would take 9.5 s and not 10
    ({"max_staleness": 0, "max_in_flight": 128}, {"trainer_idle": 0.95, "kv_usage": 0.9, "running": 120.0}, "generation",
     (SERVERS, 1, 2), "asynchrony cannot help here: generation takes 9.5 s of a step of 10 s, training 0.5 s"),
    ({"max_staleness": 0, "max_in_flight": 128, "on_gpu": False}, {"trainer_idle": 0.95, "kv_usage": 0.9, "running": 120.0},
     "generation", None, "asynchrony cannot help here"),
    # 4 x 9.5 / 5.5 = 6.9 -> 7 servers; twice as many at most
    ({"replicas": 4, "num_trainer_ranks": 2}, BOUND, "generation", (SERVERS, 4, 7), ""),
    ({"replicas": 4, "spawns_servers": False}, BOUND, "generation", None, "4 -> 7 servers in inference.urls would keep up"),
    # 64 / (1 - 0.6) = 160 in flight keep 64 generating; of 640, 256 may be started; nobody waits for the tools
    ({}, {"trainer_idle": 0.5, "tool_fraction": 0.6}, "tools", (IN_FLIGHT, 64, 160), ""),
    ({}, {"trainer_idle": 0.5, "tool_fraction": 0.9}, "tools", (IN_FLIGHT, 64, 256), ""),
    ({"max_in_flight": 256}, {"trainer_idle": 0.5, "tool_fraction": 0.9}, "tools", None, "faster tools"),
    ({}, {"trainer_idle": 0.5, "scoring_fraction": 0.5}, "scoring", None, "scoring takes 50%"),
    ({}, {"trainer_idle": 0.3, "generator_idle": 0.3, "kv_usage": None}, "the staleness limit", (STALENESS, 1, 2), ""),
    # 9.5 / 3 = 3.2 -> 7 ranks; twice as many at most
    ({"num_trainer_ranks": 2}, FED, "training", (RANKS, 2, 4), ""),
    ({"on_gpu": False}, FED, "training", None, "a faster trainer would help"),
    # 7 servers would keep up; 1 rank on 6 GPUs leaves room for 5
    ({"replicas": 4, "num_gpus": 6}, BOUND, "generation", (SERVERS, 4, 5), ""),
    ({"tensor_parallel_size": 2, "num_gpus": 4}, BOUND, "generation", None, "there is no room for another server"),
    # 2 ranks and one server on 4 GPUs: one is free; on 3, none; others' servers take none
    ({"num_trainer_ranks": 2, "num_gpus": 4}, FED, "training", (RANKS, 2, 3), ""),
    ({"num_trainer_ranks": 2, "num_gpus": 3}, FED, "training", None, "GPUs for more ranks"),
    ({"num_trainer_ranks": 2, "spawns_servers": False, "num_gpus": 3}, FED, "training", (RANKS, 2, 3), ""),
    ({"colocate": True, "num_gpus": 2}, FED, "training", (RANKS, 1, 2), ""),
    # servers on the CPU beside a trainer on a GPU take none
    ({"embedded_slots": 64, "num_gpus": 2}, FED, "training", (RANKS, 1, 2), ""),
    ({"embedded_slots": 64, "num_gpus": 3}, BOUND, "generation", None, "faster or more cores would help"),
    # 3 machines with 2 ranks: t = 9.5 s, g = 6 s: 2 x 9.5 / 6 = 3.2 -> 4 ranks of each
    ({"trainer_nodes": 3, "ray": "auto", "num_trainer_ranks": 2},
     {"generator_idle": 0.4}, "training", (RANKS, 2, 4), "2 -> 4, of each"),
    # 4 servers anywhere in a cluster: 7 would keep up
    ({"ray": "auto", "replicas": 4}, BOUND, "generation", (SERVERS, 4, 7), ""),
    # what is wasted comes before who waits
    ({}, {"stale_fraction": 0.5, "push_fraction": 0.5, "trainer_idle": 0.6}, "dropped groups",
     (STALENESS, 1, 2), ""),
]  # fmt: skip


@pytest.mark.parametrize(("setup", "metrics", "key", "change", "words"), CASES)
def test_what_bounds_a_run_and_the_change_that_would_help(
    setup: dict[str, Any], metrics: dict[str, Any], key: str, change: Change, words: str
) -> None:
    advice = _advice(pipeline_setup(**setup), **metrics)
    assert advice.key == key
    assert (advice.setting and (advice.setting, advice.current, advice.suggested)) == change
    assert words in advice.text
    for name in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", advice.text):
        assert ROOT.find(tuple(name.split("."))) is not None, name


def test_what_comes_less_often_than_the_metrics_reach_counts_for_its_whole_interval() -> None:
    def key(setup: PipelineSetup, **rare: float) -> str:
        line = {"step_time": 10.0, "pipeline/trainer_idle_ratio": 0.05, "pipeline/generator_idle_ratio": 0.05}
        advice = advise(pipeline_metrics([{**line, **rare}, *[line] * 19]), setup)
        assert advice is not None
        return f"{advice.key} {advice.suggested or ''}".strip()

    # one checkpoint of 30 s in 20 steps of 10 s is 15% of them, and 6% of the 50 steps between two
    saved = {"checkpoint/staged_s": 30.0}
    assert key(SETUP, **saved) == "nothing"
    assert key(pipeline_setup(checkpoint_every_steps=20), **saved) == "checkpoints 60"  # 20 x 0.15 / 0.05
    # the same for a push of 50 s: 25% of 20 steps, 12.5% of 40; every 20 steps it is measured
    pushed = {"sync/push_s": 50.0}
    assert key(pipeline_setup(weight_sync_steps=40, max_staleness=39), **pushed) == "nothing"
    assert key(pipeline_setup(weight_sync_steps=20, max_staleness=39), **pushed).startswith("weight pushes")


def test_metrics_are_weighted_by_the_time_of_their_steps() -> None:
    common = {"pipeline/generator_idle_ratio": 0.25, "sync/push_s": 1.0}
    first = {"step_time": 8.0, "pipeline/trainer_idle_ratio": 0.0, "servers/kv_usage": 0.5,
             "ledger/groups/trained": 90.0, "ledger/groups/stale": 10.0,
             "rollout/duration_s": 2.0, "tools/duration_s/per_rollout": 1.0}  # fmt: skip
    second = {"step_time": 12.0, "pipeline/trainer_idle_ratio": 0.5, "servers/kv_usage": None,
              "ledger/groups/trained": 98.0, "ledger/groups/stale": 12.0, "servers/running": float("nan")}  # fmt: skip
    metrics = pipeline_metrics([{**common, **first}, {**common, **second}])
    assert metrics == PipelineMetrics(
        num_steps=2, step_s=10.0,
        trainer_idle=pytest.approx(0.3),  # 6 of 20 s
        generator_idle=0.25,
        push_fraction=pytest.approx(0.1), push_s=1.0,  # 2 of 20 s
        stale_fraction=pytest.approx(0.2),  # 2 of 8 + 2
        kv_usage=0.5, tool_fraction=0.5,
    )  # fmt: skip
    assert (metrics.train_s, metrics.generation_s) == (pytest.approx(7.0), pytest.approx(7.5))
    assert pipeline_metrics([]) == PipelineMetrics(num_steps=0)
