"""What bounds a run and what to change: each rule with figures worked by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from inspect import getsource
from typing import Any

import pytest

from grpo_async.config import ExperimentConfig
from grpo_async.findings import Finding, speed
from grpo_async.findings.pipeline_figures import PipelineFigures, PipelineSetup, figures_of, setup_of
from grpo_async.findings.speed import RULES, advise

# 16 groups of 8, one step ahead: at most 2 x 16 x 8 = 256 rollouts
SETUP = PipelineSetup(group_size=8, groups_per_step=16, max_staleness=1, max_in_flight=64)
BUSY = PipelineFigures(
    num_steps=20, step_s=10.0, trainer_idle=0.05, generator_idle=0.05, running=60.0, waiting=0.0, kv_usage=0.5
)


def _advice(setup: PipelineSetup = SETUP, **figures: Any) -> Finding:
    advice = advise(replace(BUSY, **figures), setup)
    assert advice is not None
    return advice


def _change(advice: Finding) -> tuple[str | None, object, object]:
    return advice.setting, advice.current, advice.suggested


def test_few_steps_and_missing_figures_say_nothing() -> None:
    assert advise(replace(BUSY, num_steps=2), SETUP) is None
    assert advise(replace(BUSY, step_s=None), SETUP) is None
    assert advise(replace(BUSY, trainer_idle=None), SETUP) is None
    assert advise(replace(BUSY, generator_idle=None), SETUP) is None
    assert advise(PipelineFigures(num_steps=0), SETUP) is None


def test_a_run_that_is_busy_on_both_sides_has_nothing_to_gain() -> None:
    advice = _advice()
    assert (advice.key, advice.setting) == ("nothing", None)
    assert "trainer idle 5%, servers idle 5%" in advice.text


def test_servers_with_room_and_an_idle_trainer_ask_for_more_in_flight() -> None:
    advice = _advice(trainer_idle=0.41, kv_usage=0.5)
    # 0.85 / 0.5 = 1.7; 64 x 1.7 = 108.8, in whole groups of 8: 104
    assert _change(advice) == ("rollout.max_in_flight", 64, 104)
    assert advice.text == "trainer idle 41%, server KV 50%: raise rollout.max_in_flight 64 -> 104"
    assert _change(_advice(trainer_idle=0.41, kv_usage=0.2))[2] == 128, "twice as many at most: 0.85 / 0.2 = 4.25"


def test_more_in_flight_is_never_more_than_may_be_started_ahead() -> None:
    setup = replace(SETUP, max_in_flight=200)
    assert setup.most_in_flight == 256
    advice = _advice(setup, trainer_idle=0.41, kv_usage=0.2, running=190.0)
    assert _change(advice) == ("rollout.max_in_flight", 200, 256)
    at_the_limit = replace(SETUP, max_in_flight=256)
    assert _advice(at_the_limit, trainer_idle=0.41, kv_usage=0.2, running=250.0).setting != "rollout.max_in_flight"


def test_more_in_flight_is_never_more_than_the_embedded_engine_has_slots() -> None:
    setup = replace(SETUP, embedded_slots=80, on_gpu=False)
    assert _change(_advice(setup, trainer_idle=0.41, kv_usage=0.1)) == ("rollout.max_in_flight", 64, 80)
    assert _change(_advice(replace(setup, replicas=2), trainer_idle=0.41, kv_usage=0.1))[2] == 128


def test_a_full_cache_with_a_queue_asks_for_fewer_in_flight() -> None:
    advice = _advice(kv_usage=0.98, running=45.0, waiting=19.0)
    # 45 run: 5 whole groups of 8
    assert _change(advice) == ("rollout.max_in_flight", 64, 40)
    assert "98% full and 19 requests wait" in advice.text
    assert "lower rollout.max_in_flight 64 -> 40" in advice.text
    assert _advice(kv_usage=0.98, running=45.0, waiting=0.5).key == "nothing", "full, and nobody waits"


def test_dropped_groups_ask_for_more_staleness_up_to_a_limit() -> None:
    assert _change(_advice(stale_share=0.12)) == ("rollout.max_staleness", 1, 2)
    assert _advice(stale_share=0.09).key == "nothing"
    assert _advice(replace(SETUP, max_staleness=4), stale_share=0.5).setting is None


def test_long_pushes_ask_for_fewer_as_far_as_staleness_allows() -> None:
    # 1 x 0.3 / 0.1 = 3 steps between pushes; max_staleness 1 allows 2, max_staleness 3 the 3
    assert _change(_advice(push_share=0.3)) == ("training.weight_sync_steps", 1, 2)
    assert _change(_advice(replace(SETUP, max_staleness=3), push_share=0.3)) == ("training.weight_sync_steps", 1, 3)
    advice = _advice(replace(SETUP, weight_sync_steps=2), push_share=0.3)
    assert advice.key == "weight pushes"
    assert advice.setting is None
    assert "rollout.max_staleness 1 allows no fewer" in advice.text
    assert _advice(push_share=0.19).key == "nothing"


def test_checkpoints_that_hold_up_training_ask_for_fewer() -> None:
    # 60 s of 50 steps of 10 s: 0.12; 50 x 0.12 / 0.05 = 120
    assert _change(_advice(checkpoint_s=60.0)) == ("checkpoint.every_steps", 50, 120)
    assert _advice(checkpoint_s=45.0).key == "nothing"


def test_what_comes_less_often_than_the_figures_reach_counts_for_its_whole_interval() -> None:
    # one checkpoint of 30 s in 20 steps of 10 s is 15% of them, and 6% of the 50 steps between two
    lines: list[dict[str, float | None]] = [
        {"step_time": 10.0, "pipeline/trainer_idle_ratio": 0.05, "pipeline/generator_idle_ratio": 0.05}
        for _ in range(20)
    ]
    lines[9]["checkpoint/staged_s"] = 30.0
    advice = advise(figures_of(lines), SETUP)
    assert advice is not None
    assert advice.key == "nothing"
    often = advise(figures_of(lines), replace(SETUP, checkpoint_every_steps=20))
    assert often is not None
    assert _change(often) == ("checkpoint.every_steps", 20, 60)  # 20 x 0.15 / 0.05
    # the same for a push of 50 s: 25% of 20 steps, 12.5% of 40; every 20 steps it is measured
    lines[9] = {**lines[9], "checkpoint/staged_s": None, "sync/push_s": 50.0}
    setup = replace(SETUP, weight_sync_steps=40, max_staleness=4)
    rare, measured = advise(figures_of(lines), setup), advise(figures_of(lines), replace(setup, weight_sync_steps=20))
    assert rare is not None
    assert measured is not None
    assert (rare.key, measured.key) == ("nothing", "weight pushes")


def test_a_synchronous_run_is_told_what_overlap_would_give() -> None:
    setup = replace(SETUP, max_staleness=0)
    advice = _advice(setup, trainer_idle=0.6, generator_idle=0.4)  # t = 4 s, g = 6 s
    assert _change(advice) == ("rollout.max_staleness", 0, 1)
    assert advice.text.endswith("raise rollout.max_staleness 0 -> 1, a step of 10.0 s could take 6.0 s")


def test_asynchrony_cannot_help_where_generation_dominates() -> None:
    setup = replace(SETUP, max_staleness=0, max_in_flight=128)
    # t = 0.5 s, g = 9.5 s: overlapped, a step would take 9.5 s and not 10
    advice = _advice(setup, trainer_idle=0.95, generator_idle=0.05, kv_usage=0.9, running=120.0)
    assert advice.text.startswith(
        "asynchrony cannot help here: generation takes 9.5 s of a step of 10.0 s, training 0.50 s"
    )
    assert _change(advice) == ("inference.replicas", 1, 2)
    on_cpu = _advice(replace(setup, on_gpu=False), trainer_idle=0.95, generator_idle=0.05, kv_usage=0.9, running=120.0)
    assert on_cpu.setting is None
    assert on_cpu.text.startswith("asynchrony cannot help here")


def test_saturated_servers_ask_for_as_many_more_as_the_trainer_could_feed_on() -> None:
    # t = 5.5 s, g = 9.5 s: 4 x 9.5 / 5.5 = 6.9 -> 7 servers
    setup = replace(SETUP, replicas=4, num_trainer_ranks=2)
    advice = _advice(setup, trainer_idle=0.45, generator_idle=0.05, kv_usage=0.9)
    assert _change(advice) == ("inference.replicas", 4, 7)
    assert advice.text.endswith("or move one GPU from the trainer to a server")
    assert _change(_advice(replace(setup, replicas=1), trainer_idle=0.8, kv_usage=0.9))[2] == 2, "twice at most"
    others = _advice(replace(setup, spawns_servers=False), trainer_idle=0.45, kv_usage=0.9)
    assert others.setting is None
    assert others.text.endswith("4 -> 7 servers in inference.urls would keep up")


def test_waiting_for_a_slot_asks_for_more_slots() -> None:
    setup = replace(SETUP, embedded_slots=24, on_gpu=False)
    advice = _advice(setup, trainer_idle=0.4, running=24.0, waiting=40.0, kv_usage=0.6)
    assert _change(advice) == ("inference.embedded.max_slots", 24, 64)  # 24 + 40, and 64 may be in flight
    two = _advice(replace(setup, replicas=2), trainer_idle=0.4, running=48.0, waiting=10.0, kv_usage=0.6)
    assert _change(two)[2] == 29  # 24 + 10 / 2
    capped = _advice(replace(setup, max_in_flight=32), trainer_idle=0.4, running=24.0, waiting=40.0, kv_usage=0.6)
    assert _change(capped)[2] == 32


def test_tools_that_take_most_of_a_rollout_ask_for_more_rollouts() -> None:
    # 64 / (1 - 0.6) = 160 in flight keep 64 generating
    advice = _advice(trainer_idle=0.5, tool_share=0.6)
    assert _change(advice) == ("rollout.max_in_flight", 64, 160)
    assert advice.key == "tools"
    capped = _advice(trainer_idle=0.5, tool_share=0.9)  # 640, of which 256 may be started
    assert _change(capped)[2] == 256
    slow = _advice(replace(SETUP, max_in_flight=256), trainer_idle=0.5, tool_share=0.9)
    assert slow.setting is None
    assert "faster tools" in slow.text
    assert _advice(trainer_idle=0.05, tool_share=0.9).key == "nothing", "nobody waits for them"


def test_slow_rewards_are_named() -> None:
    advice = _advice(trainer_idle=0.5, scoring_share=0.5)
    assert advice.key == "scoring"
    assert "scoring takes 50%" in advice.text


def test_both_idle_although_generation_may_run_ahead_ask_for_more_of_it() -> None:
    advice = _advice(trainer_idle=0.3, generator_idle=0.3, kv_usage=None)
    assert _change(advice) == ("rollout.max_staleness", 1, 2)


def test_idle_servers_give_their_gpus_to_the_trainer() -> None:
    # t = 9.5 s on 1 GPU, g = 3 s on 3: work 9.5 and 9, so 2 and 2 of the 4 GPUs
    advice = _advice(replace(SETUP, replicas=3), generator_idle=0.7)
    assert _change(advice) == ("inference.replicas", 3, 2)
    assert advice.text.endswith("lower inference.replicas 3 -> 2, and launch.num_trainer_ranks 1 -> 2")
    # one server is the least: 9.5 / 3 = 3.2 -> 4 ranks, of 2 twice as many at most
    alone = _advice(replace(SETUP, num_trainer_ranks=2), generator_idle=0.7)
    assert _change(alone) == ("launch.num_trainer_ranks", 2, 4)
    assert _advice(replace(SETUP, on_gpu=False), generator_idle=0.7).setting is None


def test_no_more_servers_are_suggested_than_there_are_gpus_for() -> None:
    # t = 5.5 s, g = 9.5 s: 7 servers would keep up; 1 rank on 6 GPUs leaves room for 5
    setup = replace(SETUP, replicas=4, num_gpus=6)
    assert _change(_advice(setup, trainer_idle=0.45, kv_usage=0.9)) == ("inference.replicas", 4, 5)
    two_each = replace(setup, tensor_parallel_size=2, replicas=1, num_gpus=4)
    full = _advice(two_each, trainer_idle=0.45, kv_usage=0.9)
    assert full.setting is None
    assert (
        "; 4 GPUs have no room for another server, so servers on another machine (inference.urls) would help"
        in full.text
    )
    # 3 ranks and 1 server on 4 GPUs: t = 4 s would be 6 s on 2 ranks, still below g = 9.5 s
    moved = _advice(replace(setup, replicas=1, num_trainer_ranks=3, num_gpus=4), trainer_idle=0.6, kv_usage=0.9)
    assert _change(moved) == ("launch.num_trainer_ranks", 3, 2)
    assert moved.text.endswith("lower launch.num_trainer_ranks 3 -> 2, and inference.replicas 1 -> 2")
    # t = 7.5 s would be 11.25 s: no gain
    kept = _advice(replace(setup, replicas=1, num_trainer_ranks=3, num_gpus=4), trainer_idle=0.25, kv_usage=0.9)
    assert kept.setting is None
    shared = _advice(replace(setup, replicas=1, num_gpus=1), trainer_idle=0.6, kv_usage=0.9)
    assert shared.setting is None
    assert "; one GPU has no room for another server" in shared.text
    both = _advice(replace(setup, replicas=1, num_trainer_ranks=3, num_gpus=3), trainer_idle=0.6, kv_usage=0.9)
    assert both.setting is None, "a rank and a server share a GPU: none is there to be moved"


def test_no_more_ranks_are_suggested_than_there_are_gpus_for() -> None:
    setup = replace(SETUP, num_trainer_ranks=2, num_gpus=4)  # and one server: one GPU is free
    assert _change(_advice(setup, generator_idle=0.7)) == ("launch.num_trainer_ranks", 2, 3)
    full = _advice(replace(setup, num_gpus=3), generator_idle=0.7)
    assert full.setting is None
    assert "; 3 GPUs have no room for another rank, so" in full.text
    shared = replace(setup, replicas=3, num_gpus=2)
    assert _advice(shared, generator_idle=0.7).setting is None, "they share GPUs: nothing is freed by fewer servers"
    others = _advice(replace(setup, spawns_servers=False, num_gpus=3), generator_idle=0.7)
    assert _change(others) == ("launch.num_trainer_ranks", 2, 3), "those servers take no GPU of this machine"


def test_ranks_are_counted_over_all_machines_and_suggested_for_each() -> None:
    # 3 machines with 2 ranks: t = 9.5 s, g = 6 s: 6 x 9.5 / 6 = 9.5 ranks, 4 for each machine
    setup = replace(SETUP, nodes=3, num_trainer_ranks=2)
    assert setup.world_size == 6
    advice = _advice(setup, generator_idle=0.4)
    assert _change(advice) == ("launch.num_trainer_ranks", 2, 4)
    assert advice.text.endswith("launch.num_trainer_ranks 2 -> 4, of each machine")
    # a server that is given up frees a GPU of one machine, not of each
    assert _change(_advice(replace(setup, replicas=3), generator_idle=0.4))[0] == "launch.num_trainer_ranks"


def test_padding_asks_for_packed_samples() -> None:
    unpacked = replace(SETUP, pack=False)
    advice = _advice(unpacked, padding_share=0.4)
    assert _change(advice) == ("training.pack", "false", "true")
    assert advice.text.endswith("padding: set training.pack false -> true")
    assert _advice(unpacked, padding_share=0.2).setting is None
    assert _advice(padding_share=0.4).setting is None


def test_equal_rewards_ask_for_more_groups() -> None:
    # 16 / (1 - 0.5) = 32
    assert _change(_advice(filtered_share=0.5)) == ("rollout.groups_per_step", 16, 32)
    assert _change(_advice(filtered_share=0.9))[2] == 32, "twice as many at most"
    assert _advice(replace(SETUP, zero_variance="resample"), filtered_share=0.9).setting is None


def test_equal_rewards_may_be_all_right_or_all_wrong_so_prompts_are_not_to_be_harder() -> None:
    text = _advice(filtered_share=0.9).text
    assert text.endswith("or choose prompts that are neither always nor never solved")
    assert "harder" not in text


def test_the_order_of_the_rules_is_what_is_wasted_then_who_waits() -> None:
    assert [rule.__name__ for rule in RULES] == [
        *("full_cache", "stale_groups", "weight_pushes", "checkpoints"),
        *("synchronous", "slow_tools", "slow_scoring", "full_slots", "few_in_flight", "held_back", "generation"),
        *("padding", "training", "filtered_groups", "nothing_to_gain"),
    ]
    everything: dict[str, Any] = {"stale_share": 0.5, "push_share": 0.5, "trainer_idle": 0.6, "filtered_share": 0.9}
    assert _advice(**everything).setting == "rollout.max_staleness"


def test_every_suggestion_differs_from_what_is_set_and_every_sentence_is_one_line() -> None:
    shares = (None, 0.0, 0.3, 0.6, 0.97)
    seen = set()
    for trainer in (0.0, 0.3, 0.6, 0.97):
        for generator in (0.0, 0.3, 0.97):
            for usage in shares:
                for waiting in (None, 0.0, 30.0):
                    for staleness in (0, 1, 4):
                        for slots in (None, 64):
                            setup = replace(SETUP, max_staleness=staleness, embedded_slots=slots)
                            advice = _advice(
                                setup, trainer_idle=trainer, generator_idle=generator, kv_usage=usage, waiting=waiting
                            )
                            seen.add(advice.key)
                            assert "\n" not in advice.text
                            assert advice.current != advice.suggested or advice.setting is None
                            if advice.setting == "rollout.max_in_flight":
                                assert isinstance(advice.suggested, int)
                                assert 8 <= advice.suggested <= setup.most_in_flight
                                assert advice.suggested % 8 == 0
    assert len(seen) >= 7


def test_figures_are_weighted_by_the_time_of_their_steps() -> None:
    def line(step_time: float, idle: float, trained: float, stale: float, **more: float) -> dict[str, float | None]:
        return {
            "step_time": step_time,
            "pipeline/trainer_idle_ratio": idle,
            "pipeline/generator_idle_ratio": 0.25,
            "sync/push_s": 1.0,
            "ledger/groups/trained": trained,
            "ledger/groups/filtered": 0.0,
            "ledger/groups/stale": stale,
            "ledger/groups/failed": 0.0,
            "servers/kv_usage": 0.5,
            **more,
        }

    figures = figures_of(
        [
            line(8.0, 0.0, 90.0, 10.0, **{"rollout/duration_s": 2.0, "tools/duration_s/per_rollout": 1.0}),
            {**line(12.0, 0.5, 98.0, 12.0), "servers/kv_usage": None, "servers/running": float("nan")},
        ]
    )
    assert figures.num_steps == 2
    assert figures.step_s == 10.0
    assert figures.trainer_idle == pytest.approx(0.3)  # 6 of 20 s
    assert figures.generator_idle == 0.25
    assert figures.push_share == pytest.approx(0.1)  # 2 of 20 s
    assert (figures.push_s, figures.checkpoint_s) == (1.0, None)
    assert figures.stale_share == pytest.approx(0.2)  # 2 of 8 + 2
    assert figures.kv_usage == 0.5
    assert figures.running is None
    assert figures.tool_share == 0.5
    assert figures.train_s == pytest.approx(7.0)
    assert figures.generation_s == pytest.approx(7.5)
    assert figures_of([]) == PipelineFigures(num_steps=0)


def test_the_setup_is_read_from_the_configuration() -> None:
    base: dict[str, Any] = {
        "run": {"name": "x"},
        "model": {"path": "m"},
        "data": {"train": {"type": "jsonl", "path": "t"}},
        "rewards": [{"function": "a:b"}],
        "rollout": {"group_size": 4, "groups_per_step": 2, "max_staleness": 2, "max_in_flight": 10},
        "inference": {"engine": "embedded", "replicas": 2, "embedded": {"max_slots": 5}},
    }
    setup = setup_of(ExperimentConfig.model_validate(base))
    assert setup.most_in_flight == 24  # (2 + 1) x 2 x 4
    assert (setup.embedded_slots, setup.replicas, setup.spawns_servers, setup.on_gpu) == (5, 2, True, False)
    assert setup_of(ExperimentConfig.model_validate(base), engine="vllm", on_gpu=True).embedded_slots is None
    assert (setup.num_trainer_ranks, setup.nodes, setup.num_gpus) == (1, 1, None)
    machines = {**base, "launch": {"num_trainer_ranks": 2, "nodes": 3, "rdzv": "h:1", "device": "cuda"}}
    setup = setup_of(ExperimentConfig.model_validate(machines), num_gpus=8)
    assert (setup.num_trainer_ranks, setup.nodes, setup.world_size, setup.num_gpus) == (2, 3, 6, 8)
    others = {**base, "inference": {"urls": ["http://a:1", "http://b:1", "http://c:1"]}}
    setup = setup_of(ExperimentConfig.model_validate(others))
    assert (setup.replicas, setup.spawns_servers, setup.embedded_slots) == (3, False, None)


def test_settings_that_are_named_exist() -> None:
    names = set(
        re.findall(r"\b(?:rollout|training|inference|launch|checkpoint|weights)(?:\.[a-z_]+)+", getsource(speed))
    )
    assert len(names) >= 10
    for name in names:
        model: Any = ExperimentConfig
        for part in name.split("."):
            model = model.model_fields[part].annotation
