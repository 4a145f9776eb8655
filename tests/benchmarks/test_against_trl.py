"""benchmarks/against_trl.py without a run: both sides get the same, the figures add up, and what is replaced in TRL
is there."""

from __future__ import annotations

import argparse
import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import _trl_train as train
from benchmarks import against_trl
from benchmarks._trl_setting import Setting, Step
from benchmarks._trl_train import CpuKernel, EqualPush
from benchmarks.against_trl import make_setting, outcome
from grpo_async.config.loader import load_config


def _options(*arguments: str) -> argparse.Namespace:
    return against_trl._parser().parse_args(arguments)


def _step(**changed: float) -> Step:
    known = {"wall_s": 2.0, "samples": 16.0, "tokens": 960.0, "waiting_s": 0.5, "forward_s": 0.4,
               "backward_s": 0.6, "optimizer_s": 0.1, "sync_s": 0.2, "staleness": 1.0, "thrown_away": 0.0}  # fmt: skip
    return Step(**{**known, **changed})


def _setting(folder: Path, *arguments: str) -> Setting:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (folder / "prompts.jsonl").write_text('{"prompt": [{"role": "user", "content": "1 + 1 = ?"}]}\n')
    return make_setting(folder, _options(*arguments))


def test_the_two_configurations_ask_for_the_same_training(tmp_path: Path) -> None:
    setting = _setting(tmp_path)
    config = load_config(against_trl.write_config(setting))
    options = train.trainer_options(setting)
    assert config.rollout.group_size == options["num_generations"]
    assert config.rollout.group_size * config.rollout.groups_per_step == options["per_device_train_batch_size"]
    assert config.rollout.max_completion_tokens == options["max_completion_length"]
    assert config.rollout.temperature == options["temperature"]
    assert config.optimizer.lr == options["learning_rate"]
    assert config.optimizer.weight_decay == options["weight_decay"]
    assert config.optimizer.max_grad_norm == options["max_grad_norm"]
    assert (config.loss.epsilon, config.loss.epsilon_high) == (options["epsilon"], options["epsilon"])
    assert config.training.max_steps == options["max_steps"]
    assert config.inference.threads == config.launch.trainer_threads == setting.threads
    assert config.model.dtype == "float32"
    assert not options["bf16"]


@pytest.mark.nightly
def test_trl_takes_our_options_and_has_what_is_replaced(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    import importlib.metadata

    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
    from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

    assert importlib.metadata.version("trl") == against_trl.TRL_VERSION
    config = AsyncGRPOConfig(**train.trainer_options(_setting(tmp_path)))
    assert config.token_budget == 0
    assert not config.gradient_checkpointing
    assert "weight_transfer" in inspect.signature(AsyncGRPOTrainer).parameters
    for method in ("init_weight_transfer", "pause", "send_weights", "resume", "destroy"):
        theirs, replaced = getattr(WeightTransferClient, method), getattr(EqualPush, method)
        assert list(inspect.signature(replaced).parameters) == list(inspect.signature(theirs).parameters)
    assert list(inspect.signature(train.no_peak_flops).parameters) == list(
        inspect.signature(async_grpo_trainer.get_peak_flops_per_device).parameters
    )
    source = inspect.getsource(packing.tree_attention)
    assert "_flash_attn().flash_attn_varlen_func(" in source


@pytest.mark.nightly
def test_the_stand_in_for_the_kernel_gives_what_each_sample_gives_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples share a prompt of 3 tokens: the tree holds [p p p | a a | b], the second segment attends to p and a."""
    packing = pytest.importorskip("trl.experimental.async_grpo.packing")
    monkeypatch.setattr(packing, "_flash_attn", CpuKernel)
    torch.manual_seed(0)
    heads, kv_heads, width = 4, 2, 8
    query = torch.randn(1, heads, 6, width)
    key, value = torch.randn(2, 1, kv_heads, 6, width)
    layout = SimpleNamespace(index=[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5], q=[0, 3, 5, 6], k=[0, 3, 8, 12])
    layer = torch.nn.Linear(1, 1)
    layer.config = SimpleNamespace()  # asked for the dtype that a quantized layer computes in
    output, _ = packing.tree_attention(
        layer, query, key, value, None, tree_kv_index=torch.tensor(layout.index),
        tree_cu_seqlens_q=torch.tensor(layout.q), tree_cu_seqlens_k=torch.tensor(layout.k),
        tree_max_seqlen_q=3, tree_max_seqlen_k=5,
    )  # fmt: skip
    for sample, own in (([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), ([0, 1, 2, 5], [5])):
        alone = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, sample], key[:, :, sample], value[:, :, sample], is_causal=True, enable_gqa=True
        )
        expected = alone[0].transpose(0, 1)[[sample.index(token) for token in own]]
        torch.testing.assert_close(output[0, own], expected)


def test_the_steady_state_leaves_out_warm_up_and_end(tmp_path: Path) -> None:
    setting = _setting(tmp_path, "--warmup", "2", "--steps", "3", "--staleness", "1")
    assert setting.max_steps == 2 + 3 + 2
    steps = [_step(thrown_away=4.0 * number, wall_s=1.0 + number) for number in range(7)]
    found = outcome(steps, setting)
    assert [step.wall_s for step in found.steps] == [3.0, 4.0, 5.0]
    assert found.thrown_away == 4.0 * 4 - 4.0 * 1
    figures = {name.strip(): value for name, (value, _) in found.statistics().items()}
    assert figures["trained samples"] == pytest.approx(48 / 12)
    assert figures["trained tokens"] == pytest.approx(3 * 960 / 12)
    assert figures["step"] == pytest.approx(4000)
    assert {part: figures[part] for part in against_trl.PARTS[:-1]} == pytest.approx(
        {"waiting": 500.0, "forward": 400.0, "backward": 600.0, "optimizer": 100.0, "sync": 200.0}
    )
    assert figures["other"] == pytest.approx(1000 * (4.0 - 1.8))
    assert figures["thrown away"] == pytest.approx(12 / 60)
    with pytest.raises(ValueError, match="4 steps were made, 5 are needed"):
        outcome(steps[:4], setting)


def test_our_steps_are_read_from_metrics_and_timeline() -> None:
    spans = [
        ("wait for samples", "trainer", 0.0, 1.0), ("forward", "trainer", 1.0, 1.5), ("step", "trainer", 0.0, 3.0),
        ("wait for samples", "trainer", 3.0, 3.25), ("forward", "trainer", 3.25, 3.5), ("forward", "trainer", 3.5, 4.0),
        ("push", "trainer", 4.0, 4.5), ("push", "weights", 4.0, 4.5), ("step", "trainer", 3.0, 5.0),
    ]  # fmt: skip
    lost = {"ledger/groups/stale": 0.0, "ledger/groups/filtered": 0.0, "ledger/groups/failed": 0.0}
    lines = [
        {"num_tokens": 100.0, "ledger/groups/trained": 2.0, **lost, "async/staleness_mean": 0.0},
        {"num_tokens": 90.0, "ledger/groups/trained": 3.0, **dict.fromkeys(lost, 1.0), "async/staleness_mean": 0.5},
    ]
    first, second = against_trl.steps_of(lines, spans, group_size=8)
    assert (first.samples, first.wall_s) == (16.0, 0.0)
    assert (second.samples, second.tokens, second.wall_s, second.thrown_away) == (8.0, 90.0, 2.0, 24.0)
    assert (first.staleness, second.staleness) == (0.0, 0.5)
    assert (second.waiting_s, second.forward_s, second.sync_s, second.other_s) == (0.25, 0.75, 0.5, 0.5)


def test_what_trl_drops_is_counted_from_the_beginning(tmp_path: Path) -> None:
    """TRL logs how many it dropped since the last step, None where none were, and a summary at the end, which is no step."""
    writer = train.step_writer(tmp_path / "steps")
    logs = {"perf/step_s": 2.0, "perf/fwd_s": 0.4, "perf/fwd_bwd_s": 1.0, "perf/optimizer_s": 0.1, "perf/rollout_wait_s": 0.5,
            "perf/weight_sync_s": 0.2, "batch/samples_per_step": 16.0, "batch/trained_tokens_per_step": 960.0,
            "sample/staleness_mean": 1.0}  # fmt: skip
    for dropped in ({"sample/dropped_stale_total": 8.0}, {}, {"sample/dropped_stale_total": 3.0}):
        writer.on_log(None, None, None, logs | dropped)
    writer.on_log(None, None, None, {"train_runtime": 60.0})
    steps = [Step(**json.loads(line)) for line in (tmp_path / "steps").read_text().splitlines()]
    assert [step.thrown_away for step in steps] == [8.0, 8.0, 11.0]
    assert steps[0] == _step(samples=16, backward_s=pytest.approx(0.6), thrown_away=8.0)
    assert steps[0].other_s == pytest.approx(0.2)
