"""Each optimizer against its formula, on two ranks against one, and through a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from grpo_async.config.model_sections import LoraSection, ModelSection, OptimizerSection
from grpo_async.errors import ConfigError
from grpo_async.training import optimizer as optimizers
from grpo_async.training.load import load_policy
from grpo_async.training.optimizer import AdamW8bit, Muon, block_size, give_state_to_all, make_optimizer, orthogonalise
from tests.support.ranks import run_on_ranks
from tests.training.load_models import save_model
from tests.training.shard_jobs import MODULE

_LOOSE = StateDictOptions(strict=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True, vocab_size=320)


def _policy(folder: Path, **settings: Any) -> Any:
    return load_policy(ModelSection(path=str(folder), **settings), temperature=1.0, chunk_tokens=16, max_model_len=64)


def _names(policy: Any, group: dict[str, Any]) -> set[str]:
    chosen = {id(parameter) for parameter in group["params"]}
    return {name for name, parameter in policy.named_parameters() if id(parameter) in chosen}


def test_matrices_are_decayed_and_norms_are_not(folder: Path) -> None:
    policy = _policy(folder)
    matrices, norms = make_optimizer(policy, OptimizerSection(weight_decay=0.1)).param_groups
    assert (matrices["weight_decay"], norms["weight_decay"]) == (0.1, 0.0)
    assert all("norm" in name for name in _names(policy, norms))
    assert not any("norm" in name for name in _names(policy, matrices))


def test_muon_gets_the_matrices_of_the_layers_and_adamw_the_rest(folder: Path) -> None:
    policy = _policy(folder)
    muon, decayed, norms = make_optimizer(policy, OptimizerSection(type="muon", weight_decay=0.1)).param_groups
    assert [group["is_muon"] for group in (muon, decayed, norms)] == [True, False, False]
    assert all("proj" in name for name in _names(policy, muon))
    assert _names(policy, decayed) == {"model.model.embed_tokens.weight"}
    assert (muon["weight_decay"], norms["weight_decay"]) == (0.1, 0.0)


def test_only_adapters_are_moved(folder: Path) -> None:
    policy = _policy(folder, lora=LoraSection(rank=4))
    for kind in ("adamw", "adamw_8bit", "muon"):
        optimizer = make_optimizer(policy, OptimizerSection(type=kind))  # type: ignore[arg-type]
        names = set().union(*(_names(policy, group) for group in optimizer.param_groups))
        assert names == {name for name, _ in policy.named_parameters() if "lora_" in name}


def test_what_is_not_installed_is_named_with_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "find_spec", lambda _: None)
    with pytest.raises(
        ConfigError, match=r"optimizer\.type: adamw_8bit needs bitsandbytes.*grpo-async\[quantization\]"
    ):
        make_optimizer(_policy(folder), OptimizerSection(type="adamw_8bit"))


def test_newton_schulz_makes_singular_values_about_one() -> None:
    torch.manual_seed(0)
    for shape in [(32, 96), (96, 32), (4, 16, 40)]:
        update = torch.randn(*shape)
        values = torch.linalg.svdvals(orthogonalise(update).float())
        assert 0.5 < values.min() <= values.max() < 1.3
        u, _, v = torch.linalg.svd(update, full_matrices=False)
        aligned = (orthogonalise(update).float() * (u @ v)).sum((-2, -1)) / (u @ v).square().sum((-2, -1))
        assert aligned.min() > 0.75


def test_muon_follows_its_formula() -> None:
    weight = nn.Parameter(torch.full((8, 2), 0.5))
    gradient = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    optimizer = Muon(
        [{"params": [weight], "is_muon": True, "weight_decay": 0.1}], lr=0.01, momentum=0.9, betas=(0.9, 0.99), eps=1e-8
    )
    momentum = torch.zeros(8, 2)
    expected = weight.detach().clone()
    for _ in range(2):
        weight.grad = gradient.clone()
        optimizer.step()
        momentum = 0.9 * momentum + 0.1 * gradient
        nesterov = 0.1 * gradient + 0.9 * momentum
        # 0.2 sqrt(max(8, 2)) = 0.566
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * 0.2 * math.sqrt(8) * orthogonalise(nesterov).float()
    torch.testing.assert_close(weight.detach(), expected)
    # as large as AdamW's: about 0.2 an element
    assert (weight - 0.5).square().mean().sqrt().item() == pytest.approx(2 * 0.01 * 0.2, rel=0.3)


def test_muon_and_torchs_own_agree_but_for_the_scale() -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(16, 24)) for _ in range(2))
    own = Muon([{"params": [ours], "is_muon": True}], lr=0.01, momentum=0.95, betas=(0.9, 0.99), eps=1e-8)
    torchs = torch.optim.Muon([theirs], lr=0.01, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = torch.randn(16, 24)
        theirs.grad = ours.grad.clone()
        own.step()
        torchs.step()
    # the products are rounded to bfloat16 in another order; three steps move by 3 x 0.01 x 0.2 = 6e-3
    assert (ours - theirs).abs().max() < 1e-3
    assert (ours - theirs).abs().mean() < 2e-4


def test_muons_other_groups_are_torchs_adamw() -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(5)) for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6}
    own = Muon([{"params": [ours], "is_muon": False, "weight_decay": 0.1}], momentum=0.9, **settings)
    torchs = torch.optim.AdamW([theirs], weight_decay=0.1, **settings)
    for _ in range(3):
        ours.grad = torch.randn(5)
        theirs.grad = ours.grad.clone()
        own.step()
        torchs.step()
    torch.testing.assert_close(ours, theirs)


def test_eight_bit_moments_follow_adamw_in_a_quarter_of_the_memory() -> None:
    torch.manual_seed(0)
    start = torch.randn(64, 128)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    small, small_theirs = (nn.Parameter(torch.ones(7)) for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}
    own = AdamW8bit([{"params": [ours, small], "weight_decay": 0.1}], **settings)
    torchs = torch.optim.AdamW([theirs, small_theirs], weight_decay=0.1, **settings)
    for _ in range(20):
        ours.grad = torch.randn(64, 128) + start
        theirs.grad = ours.grad.clone()
        small.grad = torch.randn(7)
        small_theirs.grad = small.grad.clone()
        own.step()
        torchs.step()
    torch.testing.assert_close(small, small_theirs)  # kept in float32
    moved = (theirs - start).abs().mean()
    assert (ours - theirs).abs().mean() < 0.05 * moved
    state = own.state[ours]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.uint8
    size = sum(tensor.nbytes for tensor in state.values())
    assert size == 4 + 2 * (64 * 128 + 4 * 64)  # step, codes, a magnitude a row
    assert size < 0.27 * 8 * 64 * 128


def test_blocks_divide_the_rows() -> None:
    shapes = {(64, 768): 256, (64, 128): 128, (128, 96): 0, (2, 64): 0, (5000,): 0, (4, 32, 64): 64}
    assert {shape: block_size(torch.empty(shape)) for shape in shapes} == shapes


def test_moments_of_bfloat16_parameters_come_back_to_the_last_bit() -> None:
    """Through torch's own path and through that of its distributed checkpoint; `small` has float32 moments, the other scales."""
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}

    def make() -> tuple[nn.Module, AdamW8bit]:
        module = nn.Module()
        module.large, module.small = (nn.Parameter(torch.ones(n, 64, dtype=torch.bfloat16)) for n in (64, 2))
        return module, AdamW8bit([{"params": [module.large]}, {"params": [module.small]}], **settings)

    torch.manual_seed(0)
    module, optimizer = make()
    for _ in range(3):
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    direct, direct_optimizer = make()
    direct_optimizer.load_state_dict(optimizer.state_dict())
    through, through_optimizer = make()
    _, state = get_state_dict(module, optimizer)
    set_state_dict(through, through_optimizer, model_state_dict={}, optim_state_dict=state, options=_LOOSE)
    for other, other_optimizer in ((direct, direct_optimizer), (through, through_optimizer)):
        for name, parameter in module.named_parameters():
            saved, loaded = optimizer.state[parameter], other_optimizer.state[other.get_parameter(name)]
            assert saved.keys() == loaded.keys()
            for key, value in saved.items():
                assert loaded[key].dtype == value.dtype, key
                assert torch.equal(loaded[key], value), key
                assert key == "step" or loaded[key].data_ptr() != value.data_ptr(), key


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon"])
def test_parameters_without_a_gradient_get_the_state_that_their_first_update_begins_with(
    folder: Path, kind: Any
) -> None:
    def step(policy: Any, optimizer: torch.optim.Optimizer, *, every: int) -> None:
        generator = torch.Generator().manual_seed(every)
        for number, parameter in enumerate(policy.parameters()):
            if number % every == 0:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    section = OptimizerSection(type=kind, lr=1e-3, weight_decay=0.1)
    policy, other = _policy(folder), _policy(folder)
    optimizer, expected = make_optimizer(policy, section), make_optimizer(other, section)
    step(policy, optimizer, every=2)
    step(other, expected, every=2)
    give_state_to_all(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3] * len(optimizer.param_groups)
    for parameter, same in zip(policy.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, same)
        assert parameter.grad is None
        assert optimizer.state[parameter]
        for key, value in expected.state.get(same, {}).items():
            assert torch.equal(optimizer.state[parameter][key], value), key
    step(policy, optimizer, every=1)
    step(other, expected, every=1)
    for parameter, same in zip(policy.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, same)  # as if there had been no state before


def test_state_is_not_begun_while_gradients_wait_for_an_update(folder: Path) -> None:
    policy = _policy(folder)
    optimizer = make_optimizer(policy, OptimizerSection())
    next(iter(policy.parameters())).grad = torch.ones_like(next(iter(policy.parameters())))
    with pytest.raises(ValueError, match="gradients are waiting"):
        give_state_to_all(optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw_8bit", "muon"])
def test_two_ranks_move_as_one_and_a_checkpoint_goes_on_with_either_number(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    optimizer = {"type": kind}
    runs: dict[int, Any] = {}
    for ranks in (1, 2):
        out, state = tmp_path / f"{ranks}.pt", tmp_path / f"state_{ranks}"
        result = run_on_ranks(
            "train_save_and_go_on", ranks, tmp_path / f"run{ranks}", module=MODULE,
            model=folder, optimizer=optimizer, out=out, state=state,
        )  # fmt: skip
        runs[ranks] = result, torch.load(out, weights_only=True)
    assert runs[2][0]["losses"] == pytest.approx(runs[1][0]["losses"], rel=1e-3, abs=1e-5)
    for name, tensor in runs[1][1].items():
        far = (runs[2][1][name] - tensor).abs() > 5e-4
        assert far.float().mean() < 1e-2, name
    # saved by two ranks, loaded by one: the next step is the same
    again = run_on_ranks(
        "load_and_go_on", 1, tmp_path / "again", module=MODULE, model=folder, optimizer=optimizer,
        state=tmp_path / "state_2", out=tmp_path / "again.pt",
    )  # fmt: skip
    assert again["losses"][-1] == pytest.approx(runs[2][0]["losses"][-1], rel=1e-4)
    for name, tensor in torch.load(tmp_path / "again.pt", weights_only=True).items():
        far = (runs[2][1][name] - tensor).abs() > 1e-4
        assert far.float().mean() < 5e-3, name
