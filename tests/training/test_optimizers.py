"""Each optimizer against its formula; the learning rate over a run, against transformers' own schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import get_scheduler

from grpo_async.config.sections import OptimizerSection
from grpo_async.training.optimizer import AdamW8bit, Muon, lr_factors, make_optimizer
from tests.trainer.fakes import loop_config
from tests.training.tiny_models import load_tiny, save_model


def _names(policy: Any, group: dict[str, Any]) -> set[str]:
    chosen = {id(parameter) for parameter in group["params"]}
    return {name for name, parameter in policy.named_parameters() if id(parameter) in chosen}


def test_matrices_are_decayed_and_norms_are_not_and_muon_gets_those_of_the_layers(tied_model: Path) -> None:
    policy = load_tiny(tied_model)
    matrices, norms = make_optimizer(policy, OptimizerSection(weight_decay=0.1)).param_groups
    assert (matrices["weight_decay"], norms["weight_decay"]) == (0.1, 0.0)
    assert all("norm" in name for name in _names(policy, norms))
    assert not any("norm" in name for name in _names(policy, matrices))
    muon, decayed, norms = make_optimizer(policy, OptimizerSection(type="muon", weight_decay=0.1)).param_groups
    assert [group["is_muon"] for group in (muon, decayed, norms)] == [True, False, False]
    assert all("proj" in name for name in _names(policy, muon))
    assert _names(policy, decayed) == {"model.model.embed_tokens.weight"}
    assert (muon["weight_decay"], norms["weight_decay"]) == (0.1, 0.0)


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon"])
def test_biases_of_fused_experts_are_no_matrices(tmp_path: Path, kind: Any) -> None:
    """They have two dimensions: experts, columns."""
    policy = load_tiny(save_model(tmp_path, "gpt_oss", num_local_experts=4, num_experts_per_tok=2))
    for group in make_optimizer(policy, OptimizerSection(type=kind, weight_decay=0.1)).param_groups:
        has_biases = any(name.endswith("bias") for name in _names(policy, group))
        assert has_biases == (group["weight_decay"] == 0.0)
        assert not (has_biases and group.get("is_muon"))


def test_muon_is_torchs_own_with_updates_as_large_as_those_of_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's computes in bfloat16 on CPUs, too, where the order of a sum decides about several percent of an element."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(16, 24)) for _ in range(2))
    own = Muon(
        [{"params": [ours], "is_muon": True, "weight_decay": 0.1}], lr=0.01, momentum=0.95, betas=(0.9, 0.99), eps=1e-8
    )
    torchs = torch.optim.Muon([theirs], lr=0.01, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = torch.randn(16, 24)
        theirs.grad = ours.grad.clone()
        own.step()
        torchs.step()
    # float32's eps, 1.2e-7, times 485 for the smallest singular values; three steps move by 3 x 0.01 x 0.2 x sqrt(24) = 3e-2
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=3e-2 * 485 * torch.finfo(torch.float32).eps)


def test_moments_of_8_bits_take_a_quarter_of_the_memory_and_move_weights_as_those_of_32_do() -> None:
    """Gradients whose sizes are 100 times as large in one place as in another of a row, and 10,000 times in one row as in another,
    some of them rare, over 60 steps."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(24, 700, generator=generator)
    sizes = 10.0 ** -(2 * torch.rand(24, 700, generator=generator) + 4 * torch.rand(24, 1, generator=generator))
    ours, exact = (nn.Parameter(start.clone()) for _ in range(2))
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-12, "weight_decay": 0.1}
    own, torchs = AdamW8bit([ours], settings), torch.optim.AdamW([exact], **settings)
    for step in range(60):
        gradient = sizes * (torch.randn(24, 700, generator=generator) + 0.5)
        if step % 10:
            gradient[:8] = 0.0
        ours.grad, exact.grad = gradient, gradient.clone()
        own.step()
        torchs.step()
    moved, error = exact - start, ours - exact
    assert error.norm() < 0.1 * moved.norm()
    assert error.abs().max() < 0.5 * moved.abs().max(), "no element runs away"
    own_bytes, exact_bytes = (
        sum(value.nbytes for value in optimizer.state[parameter].values())
        for optimizer, parameter in ((own, ours), (torchs, exact))
    )
    assert own_bytes < 0.27 * exact_bytes


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon"])
def test_every_parameter_has_the_state_from_the_start_that_its_first_update_begins_with(
    tied_model: Path, kind: Any
) -> None:
    def step(policy: Any, optimizer: torch.optim.Optimizer, *, every: int) -> None:
        generator = torch.Generator().manual_seed(every)
        for number, parameter in enumerate(policy.parameters()):
            if number % every == 0:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    section = OptimizerSection(type=kind, lr=1e-3, weight_decay=0.1)
    policy, other = load_tiny(tied_model), load_tiny(tied_model)
    optimizer, expected = make_optimizer(policy, section), make_optimizer(other, section)
    assert all(optimizer.state[parameter] for parameter in policy.parameters())
    expected.state.clear()  # made with the first gradient
    for every in (2, 1):
        step(policy, optimizer, every=every)
        step(other, expected, every=every)
    for parameter, same in zip(policy.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, same)


STEPS, WARMUP, LR = 12, 3, 2e-4


def _factors(**optimizer: Any) -> list[float]:
    config = loop_config(optimizer={"lr": LR, **optimizer}, training={"max_steps": STEPS})
    factor = lr_factors(config)
    return [factor(step) for step in range(STEPS)]


@pytest.mark.parametrize(
    ("schedule", "arguments"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("cosine_with_restarts", {"num_cycles": 3}),
        ("polynomial", {"power": 2.0, "lr_end": 1e-5}),
        ("inverse_sqrt", {"timescale": 5}),
        ("warmup_stable_decay", {"num_decay_steps": 4, "decay_type": "linear"}),
    ],
)
def test_a_schedule_is_that_of_transformers_behind_its_warm_up(schedule: str, arguments: dict[str, Any]) -> None:
    """Theirs begins at 0, ours with the first step above it: (step + 1) / 3."""
    for warmup in (0, WARMUP):
        known = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
        theirs: Any = get_scheduler(
            schedule,
            known,
            num_warmup_steps=warmup,
            num_training_steps=STEPS,
            scheduler_specific_kwargs=arguments or None,
        )
        expected = [theirs.lr_lambdas[0](step) for step in range(STEPS)]
        found = _factors(schedule=schedule, schedule_kwargs=arguments, warmup_steps=warmup)
        assert found[:warmup] == pytest.approx([1 / 3, 2 / 3, 1.0][:warmup])
        assert found[warmup:] == pytest.approx(expected[warmup:], abs=1e-12)


def test_a_floor_is_where_a_schedule_ends() -> None:
    """Nine steps behind the warmup: the last one is at 8/9 of the way."""
    assert _factors(schedule="linear", min_lr_ratio=0.1, warmup_steps=3)[-1] == pytest.approx(1 - 0.9 * 8 / 9)
    assert _factors(schedule="cosine", min_lr_ratio=0.5)[6] == pytest.approx(0.75)
