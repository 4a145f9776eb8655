"""A step is the same however it is sharded and whatever is computed again in the backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.errors import ConfigError
from grpo_async.training.model import shard_policy
from grpo_async.training.verify import one_row, score_sequences
from tests.support.ranks import run_on_ranks
from tests.training.shard_jobs import MODULE, SEQUENCES
from tests.training.tiny_models import load_tiny, save_model, sum_of_logprobs


@pytest.fixture(scope="module")
def one_rank(
    tied_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return _train(1, tmp_path_factory.mktemp("one"), tied_model)


def _train(ranks: int, folder: Path, model: Path, **settings: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    result = run_on_ranks("train", ranks, folder, module=MODULE, model=model, out=folder / "weights.pt", **settings)
    return result, torch.load(folder / "weights.pt", weights_only=True)


@pytest.mark.slow
def test_two_steps_of_a_hybrid_mesh_with_checkpointed_activations_are_those_of_one_rank(
    tmp_path: Path, tied_model: Path, one_rank: tuple[dict[str, Any], dict[str, torch.Tensor]]
) -> None:
    """2 x 2: sharded over the ranks of a machine, replicated over machines."""
    settings = {"num_nodes": 2, "reshard_after_forward": False, "activation_checkpointing": "full"}
    _assert_same(_train(4, tmp_path, tied_model, **settings), one_rank)


def _assert_same(
    found: tuple[dict[str, Any], dict[str, torch.Tensor]], expected: tuple[dict[str, Any], dict[str, torch.Tensor]]
) -> None:
    assert found[0]["losses"] == pytest.approx(expected[0]["losses"], rel=1e-4, abs=1e-6)
    assert found[0]["norms"] == pytest.approx(expected[0]["norms"], rel=1e-4)
    for name, tensor in expected[1].items():
        # AdamW's first step is lr x sign(g): an element whose gradient is all rounding may go either way
        far = (found[1][name] - tensor).abs() > 2e-4
        assert far.float().mean() < 2e-3, name


@pytest.mark.slow
def test_gradients_that_travel_after_every_micro_batch_make_the_same_step(
    tmp_path: Path, tied_model: Path, one_rank: tuple[dict[str, Any], dict[str, torch.Tensor]]
) -> None:
    """As on GPUs, where a rank never holds a whole gradient; here forced on two CPU ranks."""
    _assert_same(_train(2, tmp_path, tied_model, as_on_gpu=True, cut={"micro_batch_tokens": 64}), one_rank)


@pytest.mark.slow
def test_two_steps_in_float16_with_a_loss_scale_are_nearly_those_in_float32(
    tmp_path: Path, tied_model: Path, one_rank: tuple[dict[str, Any], dict[str, torch.Tensor]]
) -> None:
    expected, _ = one_rank
    result, _ = _train(2, tmp_path, tied_model, compute_dtype="float16", cut={"loss_scale": 4096.0})
    assert result["losses"] == pytest.approx(expected["losses"], rel=2e-2, abs=1e-3)
    assert result["norms"] == pytest.approx(expected["norms"], rel=2e-2)
    assert result["norms"] != pytest.approx(expected["norms"], rel=1e-6), "it was float16"


def _saved_bytes(model: Path, mode: str) -> tuple[int, int]:
    """(bytes that a forward pass keeps for the backward pass, matrix products that the backward pass runs)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    policy = load_tiny(model, activation_checkpointing=mode)
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept: dict[int, int] = {}

    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.number += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return function(*args, **(kwargs or {}))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = policy(one_row([5, 9, 200, 31, 7, 7, 8, 100, 3]), objective=sum_of_logprobs)
    with Count() as count:
        torch.autograd.backward(output.objective)
    return sum(kept.values()), count.number


def test_full_recomputes_the_products_and_selective_does_not(tied_model: Path) -> None:
    kept, products = _saved_bytes(tied_model, "none")
    full_kept, full_products = _saved_bytes(tied_model, "full")
    _, selective_products = _saved_bytes(tied_model, "selective")
    assert full_kept < kept / 2
    # 3 layers x 7 projections, but for the last of each: nobody needs its result again
    assert full_products == products + 18
    assert selective_products == products


def test_offloading_to_the_cpu_is_refused_on_a_cpu(tied_model: Path) -> None:
    class Mesh:
        device_type = "cpu"

    with pytest.raises(ConfigError, match=r"training\.cpu_offload"):
        shard_policy(load_tiny(tied_model), Mesh(), compute_dtype=torch.float32, cpu_offload=True)  # type: ignore[arg-type]


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
    assert (done["nothing"], done["gathered"], done["frozen"]) == ([0, 0], 0, 0)
