"""Chunked log-probabilities and entropies against full logits: values, gradients, and what is held."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from grpo_async.training import logprobs as logprobs_module
from grpo_async.training.logprobs import LogitTransform, TokenObjective, chunked_logprobs

ROOT = Path(__file__).resolve().parents[2]
N, H, VOCAB = 7, 8, 50
TRANSFORMS = {"plain": LogitTransform(), "scaled-softcap": LogitTransform(scale=3.0, softcap=1.5)}


def _full(
    hidden: torch.Tensor, targets: torch.Tensor, head: nn.Linear, *, temperature: Any, transform: LogitTransform
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definitions, on full logits."""
    logits = head(hidden) * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def _case(dtype: torch.dtype = torch.float32, *, bias: bool = False) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(H, VOCAB, bias=bias, dtype=dtype)
    return head, torch.randn(N, H, dtype=dtype, requires_grad=True), torch.randint(0, VOCAB, (N,))


def _weighted(dtype: torch.dtype = torch.float32) -> TokenObjective:
    """A sum over tokens that depends on both, differently on each."""
    weights = torch.randn(N, generator=torch.Generator().manual_seed(1)).to(dtype)
    return lambda logprobs, entropy, rows, _: (weights[rows] * (torch.exp(logprobs) + entropy.square())).sum()


def test_certain_and_uniform_distributions() -> None:
    """Logits 200 apart: probability 1, logprob 0, entropy 0; equal logits: -log 50 and log 50. No NaN in any gradient."""
    head = nn.Linear(1, VOCAB, bias=False)
    with torch.no_grad():
        head.weight.zero_()
        head.weight[3] = 200.0
    hidden = torch.tensor([[1.0], [0.0]], requires_grad=True)
    found = chunked_logprobs(
        hidden, torch.tensor([3, 3]), head, temperature=1.0, chunk_tokens=1, objective=_sum_of_both
    )
    assert found.logprobs.tolist() == pytest.approx([0.0, -math.log(VOCAB)], abs=1e-6)
    assert found.entropy.tolist() == pytest.approx([0.0, math.log(VOCAB)], abs=1e-4)
    torch.autograd.backward(found.objective)
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(head.weight.grad).all()


def _sum_of_both(logprobs: torch.Tensor, entropy: torch.Tensor, rows: slice, others: torch.Tensor) -> torch.Tensor:
    return (logprobs + entropy).sum()


def test_a_16_bit_head_is_summed_over_chunks_in_32_bits() -> None:
    """Many small chunks give the head the same gradient as one: nothing is lost between them."""
    torch.manual_seed(0)
    head = nn.Linear(H, VOCAB, bias=True).to(torch.bfloat16)
    hidden, targets = torch.randn(2048, H).to(torch.bfloat16), torch.randint(0, VOCAB, (2048,))
    found = {}
    for chunk_tokens in (2048, 4):
        made = chunked_logprobs(
            hidden, targets, head, temperature=1.0, chunk_tokens=chunk_tokens, objective=_sum_of_both
        )
        assert made.logprobs.dtype == torch.float32
        found[chunk_tokens] = torch.autograd.grad(made.objective, [head.weight, head.bias])
    for one, many in zip(found[2048], found[4], strict=True):
        assert many.dtype == torch.bfloat16
        torch.testing.assert_close(many, one, rtol=0.02, atol=0.1)  # bfloat16: 2 to 3 digits


@pytest.mark.parametrize("entropy_bonus", [0.0, 0.1])
@pytest.mark.parametrize("is_per_token", [True, False])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_other_tokens_in_the_place_of_a_target_have_their_logprobs_and_gradients(
    transform: LogitTransform, is_per_token: bool, entropy_bonus: float
) -> None:
    """The target among them, too, and one twice; with full logits as what is right."""
    head, hidden, targets = _case(torch.float64, bias=True)
    others = torch.cat(
        [targets[:, None], torch.randint(0, VOCAB, (N, 3)), targets[:, None] // 2, targets[:, None] // 2], -1
    )
    weights = torch.randn(N, 6, dtype=torch.float64)

    def objective(logprobs: torch.Tensor, entropy: torch.Tensor, rows: slice, top: torch.Tensor) -> torch.Tensor:
        found = logprobs.sum() + (weights[rows] * top.exp()).sum()
        return found + entropy_bonus * entropy.square().sum() if entropy_bonus else found

    def right(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _full(hidden, ids, head, temperature=0.7, transform=transform)

    top = torch.stack([right(column)[0] for column in others.T], -1)
    settings: dict[str, Any] = {"chunk_tokens": 3, "top_ids": others, "is_per_token": is_per_token}
    found = chunked_logprobs(
        hidden, targets, head, temperature=0.7, transform=transform, objective=objective, **settings
    )
    assert found.objective is not None
    assert found.top_logprobs is not None
    torch.testing.assert_close(found.top_logprobs, top)
    wanted = objective(*right(targets), slice(None), top)
    trained = [hidden, *head.parameters()]
    gradients = [torch.autograd.grad(total, trained) for total in (found.objective, wanted)]
    for gradient, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("frozen", ["nothing", "hidden", "head"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("is_per_token", [True, False])
@pytest.mark.parametrize("temperature", [0.7, torch.linspace(0.5, 2.0, N)], ids=["one temperature", "of each token"])
@pytest.mark.parametrize(("chunk_tokens", "dtype"), [(3, torch.float64), (100, torch.float64), (3, torch.bfloat16)])
def test_values_and_gradients_are_those_of_full_logits(
    chunk_tokens: int,
    dtype: torch.dtype,
    temperature: Any,
    is_per_token: bool,
    transform: LogitTransform,
    frozen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what wants them only; times 2, as what comes from above scales them."""
    monkeypatch.setattr(logprobs_module, "_CACHED", 2 * VOCAB)  # two tokens at a time
    head, hidden, targets = _case(dtype, bias=True)
    if frozen == "head":
        head.requires_grad_(False)
    elif frozen == "hidden":
        hidden = hidden.detach()
    trained = [tensor for tensor in (hidden, *head.parameters()) if tensor.requires_grad]
    objective = _weighted(torch.float64)
    settings: dict[str, Any] = {"temperature": temperature, "transform": transform}
    if dtype == torch.float64:
        of_rows = temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature
        right = _full(hidden, targets, head, temperature=of_rows, transform=transform)
        wanted = objective(*right, slice(None), hidden[:, :0])
    else:  # full logits of 16 bits are rounded elsewhere: what one chunk gives
        whole = chunked_logprobs(hidden, targets, head, chunk_tokens=N, objective=objective, **settings)
        right, wanted = (whole.logprobs, whole.entropy), whole.objective
        assert wanted is not None
    found = chunked_logprobs(
        hidden, targets, head, chunk_tokens=chunk_tokens, objective=objective, is_per_token=is_per_token, **settings
    )
    assert found.objective is not None
    near = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found.objective, wanted.float())
    alone = chunked_logprobs(hidden, targets, head, chunk_tokens=chunk_tokens, **settings)
    for name, expected in zip(("logprobs", "entropy"), right, strict=True):
        value, same = getattr(found, name), getattr(alone, name)
        assert not value.requires_grad
        assert torch.equal(value, same)
        torch.testing.assert_close(value, expected)
    gradients = [torch.autograd.grad(total * 2.0, trained) for total in (found.objective, wanted)]
    for gradient, expected in zip(*gradients, strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient, expected, **near)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [[], pytest.param(["--any-loss"], marks=pytest.mark.nightly)], ids=["sum", "any"])
def test_the_step_needs_an_eighth_of_the_memory_of_full_logits_at_150_thousand_tokens_of_vocabulary(
    tmp_path: Path, loss: list[str]
) -> None:
    """Both in processes of their own, forward and backward. Beyond the gradients of hidden states and head, which both hold."""
    sizes = ["--vocab", "150000", "--tokens", "512", "--chunk", "64", "--hidden", "32", "--rounds", "0"]
    result = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks", "logprobs", *sizes, *loss, "--device", "cpu", "--json", str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    rows = {row["name"]: row["median"] for row in json.loads(result.read_text())["rows"]}
    assert rows["difference of loss and gradient"] <= 1e-3
    assert rows["chunked / full: memory beyond gradients"] <= 1 / 8
    # 512 x 150000 x 4 bytes = 293 MB; full logits cannot be had for less than two of them at a time
    assert rows["full: memory beyond gradients"] > 2 * 293


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("is_autocast", [True, False])
def test_a_head_in_float32_adds_up_the_products_of_16_bit_numbers_there(is_autocast: bool, device: str) -> None:
    """As vLLM's `head_dtype`; a GPU has a product of its own for it. Rounded to bfloat16 logits of about 16 would be off by up to
    0.03."""
    head, hidden, targets = _case(torch.bfloat16, bias=True)
    head, hidden, targets = head.to(device), (16.0 * hidden.detach()).to(device).requires_grad_(), targets.to(device)
    settings: dict[str, Any] = {"temperature": 0.7, "chunk_tokens": 3, "objective": _sum_of_both}
    with torch.autocast(device, torch.bfloat16, enabled=is_autocast):
        found = chunked_logprobs(hidden, targets, head, in_float32=True, **settings)
        rounded = chunked_logprobs(hidden, targets, head, **settings)
    exact = nn.Linear(H, VOCAB, device=device)
    exact.load_state_dict({name: tensor.float() for name, tensor in head.state_dict().items()})
    wanted = _full(hidden.float(), targets, exact, temperature=0.7, transform=LogitTransform())
    for name, right in zip(("logprobs", "entropy"), wanted, strict=True):
        torch.testing.assert_close(getattr(found, name), right, atol=1e-4, rtol=1e-4)
        assert (getattr(rounded, name) - right).abs().max() > 1e-3


def test_small_gradients_of_a_float16_head_do_not_vanish_with_a_loss_scale() -> None:
    """Tokens of weight 1e-8: the gradient of a logit is less than half of the smallest number of float16, 6e-8."""
    head, hidden, targets = _case(torch.float16)
    exact_head, exact_hidden, _ = _case(torch.float64)

    def total_of(logprobs: torch.Tensor, entropy: torch.Tensor, *_: Any) -> torch.Tensor:
        return 1e-8 * (logprobs + 0.1 * entropy).sum()

    def gradients(scale: float) -> list[torch.Tensor]:
        settings: dict[str, Any] = {"objective": total_of, "loss_scale": scale}
        total = chunked_logprobs(hidden, targets, head, temperature=1.0, chunk_tokens=3, **settings).objective
        assert total is not None
        return [g.double() / scale for g in torch.autograd.grad(total * scale, [hidden, head.weight])]

    with torch.no_grad():
        exact_hidden.copy_(hidden)
        exact_head.weight.copy_(head.weight)
    wanted = total_of(*_full(exact_hidden, targets, exact_head, temperature=1.0, transform=LogitTransform()))
    right = torch.autograd.grad(wanted, [exact_hidden, exact_head.weight])
    for gradient, of_scaled, exact in zip(gradients(1.0), gradients(65536.0), right, strict=True):
        torch.testing.assert_close(of_scaled, exact, rtol=0.02, atol=2e-11)
        assert (gradient - exact).abs().max() > 0.3 * exact.abs().max()
