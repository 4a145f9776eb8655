"""A step is the same however it is sharded and whatever is computed again in the backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.training.model import Reference
from grpo_async.training.verify import one_row, score_sequences
from tests.support.ranks import run_on_ranks
from tests.training.shard_jobs import MODULE, SEQUENCES
from tests.training.tiny_models import load_tiny, save_model, sum_of_logprobs


@pytest.mark.slow
def test_gradients_that_travel_after_every_micro_batch_make_the_same_step(tmp_path: Path, tied_model: Path) -> None:
    """As on GPUs, where a rank never holds a whole gradient; here forced on two CPU ranks."""
    found: list[tuple[dict[str, Any], dict[str, torch.Tensor]]] = []
    for ranks, settings in ((1, {}), (2, {"as_on_gpu": True, "micro_batch_tokens": 64})):
        given = {"model": tied_model, "out": tmp_path / f"{ranks}.pt", **settings}
        result = run_on_ranks("train", ranks, tmp_path / str(ranks), module=MODULE, **given)
        found.append((result, torch.load(given["out"], weights_only=True)))
    (expected, weights), (result, others) = found
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-4, abs=1e-6)
    assert result["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    for name, tensor in weights.items():
        # AdamW's first step is lr x sign(g): an element whose gradient is all rounding may go either way
        far = (others[name] - tensor).abs() > 2e-4
        assert far.float().mean() < 2e-3, name


def _saved_bytes(model: Path, mode: str) -> int:
    """Bytes that a forward pass keeps for the backward pass."""
    policy = load_tiny(model, activation_checkpointing=mode)
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy(one_row([5, 9, 200, 31, 7, 7, 8, 100, 3]), objective=sum_of_logprobs)
    return sum(kept.values())


def test_recomputed_activations_are_not_kept(tied_model: Path) -> None:
    assert _saved_bytes(tied_model, "full") < _saved_bytes(tied_model, "none") / 2


def test_a_synced_reference_is_a_mixture(models: dict[str, Path]) -> None:
    policy, reference = load_tiny(models["model"]), Reference(load_tiny(models["reference"]))
    before = [parameter.clone() for parameter in reference.policy.parameters()]
    reference.sync(policy, alpha=0.25)
    for mixed, trained, old in zip(reference.policy.parameters(), policy.parameters(), before, strict=True):
        torch.testing.assert_close(mixed, 0.25 * trained + 0.75 * old)


@pytest.mark.slow
def test_references_answer_as_their_models_do_on_two_ranks(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "qwen3", vocab_size=320)
    other = save_model(tmp_path / "other", "qwen3", vocab_size=320, seed=1)
    done = run_on_ranks("ask_references", 2, tmp_path / "run", module=MODULE, model=model, other=other)
    expected = {
        name: score_sequences(load_tiny(folder), SEQUENCES[:1], device=torch.device("cpu"))[0]
        for name, folder in (("off", model), ("frozen", other))
    }
    for name, logprobs in expected.items():
        assert done["first"][name] == pytest.approx(logprobs, abs=1e-5)
        assert done["second"][name] == pytest.approx(logprobs, abs=1e-5)  # the policy has moved, the reference has not
    assert (done["gathered"], done["frozen"]) == (0, 0)
