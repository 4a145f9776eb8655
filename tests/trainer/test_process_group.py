"""A rank's process group and what is built in it, with one real gloo rank."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from grpo_async.batching.pack import MicroBatch, split_by_rank
from grpo_async.batching.plan import plan_batch
from grpo_async.config import ExperimentConfig
from grpo_async.processes.assignment import Assignment
from grpo_async.processes.control import ControlClient
from grpo_async.run_directory import RunDir
from grpo_async.trainer import start as start_module
from grpo_async.trainer.main import run_rank
from grpo_async.training.ranks import PackCommand, StepCommand, TrainerContext
from tests.support.records import make_sample
from tests.trainer.sides import side_config


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()


def _place(config: ExperimentConfig, folder: Path) -> Assignment:
    run_dir = RunDir(config.run_path)
    run_dir.create()
    # a path that no test before had: the store of one before, which is collected late, would remove the file of this one
    private = Path(tempfile.mkdtemp(dir=folder))
    return Assignment(
        run_dir=run_dir, attempt_dir=run_dir.latest_logs, private_dir=private, server_urls=("http://server",)
    )


def _run(config: ExperimentConfig, folder: Path) -> None:
    run_rank(_place(config, folder), config, ControlClient(None))


def test_the_process_group_is_gone_when_a_rank_fails(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1.8: destroyed on exceptions, and at the end, as below, where a second one is begun."""

    def leads(*_: Any) -> None:
        assert dist.is_initialized()
        raise KeyboardInterrupt

    monkeypatch.setattr(start_module, "run_rank_zero", leads)
    with pytest.raises(KeyboardInterrupt):
        _run(side_config(tmp_path, tiny_model), tmp_path)
    assert not dist.is_initialized()


def test_random_numbers_of_the_users_code_follow_the_seed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws: list[tuple[float, ...]] = []

    def leads(*_: Any) -> None:
        draws.append((random.random(), float(np.random.random()), float(torch.rand(()))))

    monkeypatch.setattr(start_module, "run_rank_zero", leads)
    for seed in (0, 0, 1):
        _run(side_config(tmp_path, tiny_model, run={"seed": seed}), tmp_path)
    first, again, other = draws
    assert first == again
    assert not set(first) & set(other)


@pytest.mark.parametrize(
    ("master", "compute", "wire"),
    [("float32", "bfloat16", "float32"), ("bfloat16", None, "float32")],
)
def test_master_weights_compute_and_wire_have_the_dtypes_of_their_settings(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, master: str, compute: str | None, wire: str
) -> None:
    """R1.15: model.dtype, model.compute_dtype (null: float32 on a CPU) and inference.dtype, each on its own. The figures of a
    micro-batch stay in float32: FSDP casts what it is given, also inside of a dataclass, where it is not told otherwise."""
    seen: dict[str, Any] = {}

    def note_compute(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen["compute"] = inputs[0].dtype

    def leads(place: Assignment, control: ControlClient, context: TrainerContext, renderer: Any) -> None:
        seen["master"] = {parameter.dtype for parameter in context.policy.parameters()}
        seen["wire"] = {tensor.dtype for bucket in context.parameters.buckets(1 << 20) for tensor in bucket}
        seen["announced"] = {spec.dtype_name for spec in context.parameters.specs}
        context.policy.model.base_model.layers[0].mlp.register_forward_pre_hook(note_compute)
        decode = context.policy._decode

        def note_figures(batch: MicroBatch, **options: Any) -> Any:
            seen["figures"] = {batch.weights.dtype, batch.advantages.dtype, batch.sampler_logprobs.dtype}
            return decode(batch, **options)

        context.policy._decode = note_figures  # type: ignore[method-assign]
        samples = [make_sample()]
        plan = plan_batch([4], world_size=1, micro_batch_tokens=64, pack=True)
        context.pack(PackCommand(split_by_rank(samples, [1.0], plan, trainer_version=0)[:1]))
        context.step(StepCommand(lr=1e-3, seed=7), before_sync=lambda: None)
        seen["seed"] = torch.initial_seed()

    monkeypatch.setattr(start_module, "run_rank_zero", leads)
    model = {"path": str(tiny_model), "dtype": master, "compute_dtype": compute}
    _run(side_config(tmp_path, tiny_model, model=model, inference={"dtype": wire}), tmp_path)
    assert seen == {
        "master": {getattr(torch, master)},
        "compute": getattr(torch, compute or "float32"),
        "figures": {torch.float32},
        "seed": 7,
        "wire": {getattr(torch, wire)},
        "announced": {wire},
    }
