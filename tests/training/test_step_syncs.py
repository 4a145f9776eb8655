"""What a training step makes the host wait for: at most two reads of the device and two collectives for figures an update, whatever
the number of micro-batches. Here it is one of each. On a CPU; sync_counter.py says how."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.batching.pack import MicroBatch, pack_rank
from grpo_async.batching.plan import BatchPlan, MicroBatchPlan, plan_batch
from grpo_async.training.metrics import UpdateFigures
from tests.support.rank_jobs import random_samples
from tests.support.ranks import run_on_ranks
from tests.training.sync_counter import FSDP, count_syncs
from tests.training.sync_jobs import LONGEST, MODULE

MAX_READS = MAX_COLLECTIVES = 2  # an update

EVERYTHING = {
    "type": "grpo", "beta": 0.1, "proximal": "recomputed", "entropy_bonus": 0.01, "off_policy_mask": 0.01,
    "correction": {"level": "sequence", "action": "mask", "cap": 1.5, "floor": 0.8},
}  # fmt: skip
LOSSES = {
    "plain": {"type": "dapo"},
    "everything": EVERYTHING,
    "entropy mask": {"type": "dapo", "top_entropy_share": 0.5},
}
READ = "metrics.gather: tolist"
FIGURES = "metrics.gather: allgather_"
ENTROPIES = "loss.all_entropies: allgather_"


CASES = {"plain": ("1", "4", "8", "2x4"), "everything": ("1", "2x4"), "entropy mask": ("4", "8")}
"""Micro-batches of a step; 2x4: of each of two updates."""


def _settings(case: str) -> dict[str, Any]:
    """Of `training`, for 8 samples on each rank, each in a row of its own."""
    updates, _, count = case.rpartition("x")
    return {"micro_batch_tokens": 8 // int(updates or 1) // int(count) * LONGEST, "minibatches": int(updates or 1)}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2])
def test_an_update_reads_the_device_once_and_shares_its_figures_in_one_collective(
    tiny_model: Path, tmp_path: Path, num_ranks: int
) -> None:
    """The step of the real loop, its commands to the other ranks and the figures of tokens included. The entropy mask has one more
    collective, which shares the entropies, and no read."""
    results = run_on_ranks(
        "count", num_ranks, tmp_path, module=MODULE, model=tiny_model, losses=LOSSES,
        cases={loss: {case: _settings(case) for case in cases} for loss, cases in CASES.items()},
        num_groups=4 * num_ranks,
    )  # fmt: skip
    for loss, name in [(loss, case) for loss, cases in CASES.items() for case in cases]:
        found, updates = results[loss][name], 2 if name == "2x4" else 1
        assert (found["forwards"], found["updates"]) == (8 if name == "2x4" else int(name), updates)
        assert found["samples_with_figures"] == (8 * num_ranks if loss == "everything" else 0)
        assert found["norm"] > 0.0
        assert found["num_reads"] <= MAX_READS * updates
        assert found["reads"] == {READ: updates}
        own = {what: count for what, count in found["collectives"].items() if not what.startswith(FSDP)}
        # once a step, between hosts: the command to the ranks (the longest, each size, its bytes), and the tokens' figures
        command = [own.pop(what) for what in list(own) if what.startswith("ranks.send")]
        brought = own.pop("ranks.gather: gather_", 0)
        assert sum(command) == (0 if num_ranks == 1 else 3)
        assert brought == int(loss == "everything" and num_ranks > 1)
        assert sum(own.values()) <= MAX_COLLECTIVES * updates
        wanted = {FIGURES} | ({ENTROPIES} if loss == "entropy mask" else set())
        assert own == ({} if num_ranks == 1 else dict.fromkeys(wanted, updates))


@pytest.mark.parametrize(
    "read",
    [
        lambda values: values.sum().item(),
        lambda values: bool((values > 0).any()),
        lambda values: values.detach().cpu(),
        lambda values: values[values > 0],
    ],
    ids=["item", "bool", "cpu", "mask"],
)
def test_a_read_in_a_micro_batch_is_counted_for_each_of_them(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[torch.Tensor], object]
) -> None:
    """So the counter would see it."""
    from tests.training.test_step import _build, _section, _step

    samples = random_samples(4)
    plan = BatchPlan(ranks=[[MicroBatchPlan(rows=[[i]], row_tokens=len(s.token_ids)) for i, s in enumerate(samples)]])
    batches = pack_rank(samples, [0.1] * 4, plan, 0, trainer_version=0)
    policy, optimizer = _build(tiny_model)
    add = UpdateFigures.add

    def add_and_read(figures: Any, output: Any) -> None:
        read(output.inputs.logprobs)
        add(figures, output)

    _step(policy, optimizer, [batches], _section())
    for patched, expected in ((False, 1), (True, 5)):
        if patched:
            monkeypatch.setattr(UpdateFigures, "add", add_and_read)
        with count_syncs(policy, optimizer) as counter:
            _step(policy, optimizer, [batches], _section())
        assert counter.num_reads == expected, counter.reads


def test_a_micro_batch_goes_to_a_gpu_from_pinned_memory_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied from other memory, the host would wait for the GPU to have done everything before it, ten times a micro-batch."""
    sample = random_samples(1)
    plan = plan_batch([len(sample[0].token_ids)], num_ranks=1, micro_batch_tokens=64, pack=True)
    (batch,) = pack_rank(sample, [1.0], plan, 0, trainer_version=0)
    pinned: set[int] = set()
    copied: list[bool] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.add(id(tensor))
        return tensor

    def to(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
        copied.append(id(tensor) in pinned and non_blocking and device.type == "cuda")
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    moved = batch.to(torch.device("cuda", 0))
    tensors = [value for name in MicroBatch.__slots__ if isinstance(value := getattr(batch, name), torch.Tensor)]
    assert copied == [True] * len(tensors)
    assert moved.host_segment_ids is batch.segment_ids  # where samples lie is known without asking the GPU
    assert moved.input_ids is not batch.input_ids
