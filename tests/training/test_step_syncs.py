"""What a training step makes the host wait for: one read of the device and one collective for metrics an update, whatever the
number of micro-batches.

On a CPU nothing tells a tensor of the "device" from one of the host, so every read (item, tolist, cpu, numpy, a truth value, an
index by a mask) that a function of ours makes while a step runs is counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from grpo_async.training.ranks import StopCommand, TrainerContext, follow
from tests.support.ranks import run_on_ranks
from tests.trainer.fakes import make_trainer
from tests.training.statistics_jobs import make_config, make_context, make_groups

LOSSES: dict[str, dict[str, Any]] = {
    "plain": {"type": "dapo"},
    "everything": {
        "type": "grpo", "beta": 0.1, "proximal": "recomputed", "entropy_bonus": 0.01, "off_policy_mask": 0.01,
        "correction": {"level": "sequence", "action": "mask", "cap": 1.5, "floor": 0.8},
    },
}  # fmt: skip
CUTS = {"whole": {}, "many micro-batches": {"micro_batch_tokens": 64}, "two updates": {"minibatches": 2}}


@contextmanager
def counted(owner: Any, names: tuple[str, ...], counts: Counter[str]) -> Iterator[None]:
    """Calls of these functions by a function of grpo_async, by that function."""

    def noting(name: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            is_mask = name != "__getitem__" or (isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool)
            if "/grpo_async/" in frame.f_code.co_filename and is_mask:
                counts[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}: {name}"] += 1
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(owner, name, noting(name)))
        yield


READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "nonzero", "__getitem__")
COLLECTIVES = ("all_gather", "all_reduce", "broadcast", "gather", "scatter_object_list", "barrier")


NEXT = 9.0  # advantage in the step after it


def _assert_packed_next(context: TrainerContext) -> None:
    """What the step after it trains is there when the step has ended, on every rank."""
    assert {value for batches in context.packed for batch in batches for value in batch.advantages.tolist()} == {NEXT}


def count(model: str, losses: dict[str, dict[str, Any]], cuts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A step with each loss in each cut; what the step on rank 0 read, and the collectives that it asked for."""
    found = {}
    for loss, values in losses.items():
        for cut, training in cuts.items():
            config = make_config(values, **training)
            context = make_context(model, config, reference=model if config.loss.beta else None)
            if dist.get_rank() > 0:
                follow(context)
                _assert_packed_next(context)
                continue
            groups = make_groups(6)
            later = [
                replace(group, samples=[replace(sample, advantage=NEXT) for sample in group.samples])
                for group in groups
            ]
            source = SimpleNamespace(reserve=lambda *_, later=later, **__: later)
            trainer = make_trainer(context, source, [], stores=lambda _, keeps=loss == "everything": keeps)
            packed = trainer.packer.pack(groups, 4)
            reads, collectives = Counter[str](), Counter[str]()
            with counted(torch.Tensor, READS, reads), counted(dist, COLLECTIVES, collectives):
                result, statistics = trainer.train_step(packed, 4)
            context.channel.send([StopCommand()] * context.world_size)
            _assert_packed_next(context)
            found[f"{loss}, {cut}"] = {
                "reads": {
                    name: number for name, number in reads.items() if name.startswith(("step.", "metrics.", "loss."))
                },
                "collectives": dict(collectives),
                "updates": len(result.updates),
                "samples": len(statistics),
            }
    return found


@pytest.mark.slow
def test_an_update_reads_the_device_once_and_shares_its_metrics_in_one_collective(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The step of the real loop, its command to the other rank and the statistics of tokens included."""
    results = run_on_ranks("count", 2, tmp_path, module=__name__, model=tiny_model, losses=LOSSES, cuts=CUTS)
    assert len(results) == len(LOSSES) * len(CUTS)
    for name, found in results.items():
        updates = 2 if "two updates" in name else 1
        assert found["updates"] == updates
        assert found["reads"] == {"metrics.gather: tolist": updates}, name
        own = found["collectives"]
        assert own.pop("ranks.send: scatter_object_list") == 2, "the step, and what to pack meanwhile"
        # once a step: the statistics of tokens where they are stored, and after the first step the peaks of memory
        assert own.pop("ranks.gather: gather") == 1 + name.startswith("everything")
        assert found["samples"] == (12 if name.startswith("everything") else 0)
        assert own == {"metrics.gather: all_gather": updates}, name
