"""What the plan says of memory, and what becomes of a GPU that trainer and vLLM share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from grpo_async.checks.memory import ModelSize, bytes_beside_vllm, server_memory
from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import load_config
from grpo_async.launch.gpus import MemoryPlan, plan_memory, share_gpus
from grpo_async.processes.machine import Machine
from tests.launch.support import VLLM_ON_GPU, make_config, make_plan

GIB = 1 << 30
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000, "num_attention_heads": 4, "head_dim": 16}
TOKEN_BYTES = 2 * 4 * 16 * 2 * 4  # keys and values, 4 heads of 16, 2 layers, float32
SLEEPING: dict[str, Any] = {"inference": {"vllm": {"sleep_while_training": True}}, "rollout": {"max_staleness": 0}}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder whose one file says that it has a million parameters."""
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    save_file({"w": torch.zeros(1_000_000, dtype=torch.bfloat16)}, folder / "model.safetensors")
    return str(folder)


def _shared(config: ExperimentConfig) -> ExperimentConfig:
    """Trainer and servers are to share their GPU."""
    return config.model_copy(update={"launch": config.launch.model_copy(update={"colocate": True})})


def _plan(config: ExperimentConfig, gpus: tuple[str, ...] = ("0",), gpu_bytes: int | None = 80 * GIB) -> MemoryPlan:
    config = _shared(config) if len(gpus) == 1 else config
    return plan_memory(config, VLLM_ON_GPU, share_gpus(config, VLLM_ON_GPU, gpus), gpu_bytes)


def test_the_example_for_one_card_fits_24_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"hidden_size": 2560, "num_hidden_layers": 36, "vocab_size": 151_936, "num_attention_heads": 32,
             "num_key_value_heads": 8, "head_dim": 128}  # fmt: skip
    size = ModelSize.of(shape, 4_022_468_096)
    monkeypatch.setattr(ModelSize, "read", lambda path: size)
    config = load_config(Path("configs/one-card.yaml"))
    plan = _plan(config, gpu_bytes=24 * GIB)
    assert plan.notes == ()  # "probably too little memory"
    assert "adapters 19" in plan.server
    assert "KV cache 6.0 GiB, room for 43,691 tokens" in plan.server
    assert "probably too little memory" in _plan(config, gpu_bytes=16 * GIB).notes[0]


def _left(config: ExperimentConfig, num_servers: int) -> float:
    size = ModelSize.read(config.model.path)
    assert size is not None
    return (80 * GIB - bytes_beside_vllm(config, size)) / num_servers - sum(server_memory(config, size, 0).values())


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("sections", [{}, SLEEPING], ids=["awake", "sleeping"])
def test_vllm_on_a_shared_gpu_is_told_what_the_trainer_leaves_for_its_cache(
    tmp_path: Path, model: str, num_servers: int, sections: dict[str, Any]
) -> None:
    inference = {**sections.get("inference", {}), "replicas": num_servers}
    config = make_config(tmp_path, **{**sections, "model": {"path": model}, "inference": inference})
    plan = _plan(config)
    assert plan.cache_mb is not None
    assert 0 <= _left(config, num_servers) / 2**20 - plan.cache_mb < 1
    assert plan.notes == ()
    assert f"room for {(plan.cache_mb << 20) // TOKEN_BYTES:,} tokens" in plan.server
    made = make_plan(_shared(config), Machine(num_cpus=8, gpus=("0",), gpu_bytes=80 * GIB), VLLM_ON_GPU)
    assert made.servers[0].command[-2:] == ("--set", f"inference.vllm.kv_cache_mb={plan.cache_mb}")


def test_what_the_user_says_of_the_cache_is_taken_and_one_sequence_is_the_least(tmp_path: Path, model: str) -> None:
    given = make_config(tmp_path, model={"path": "org/name"}, inference={"vllm": {"kv_cache_mb": 300}})
    assert _plan(given, gpu_bytes=None).cache_mb == 300
    inference: dict[str, Any] = {"vllm": {"gpu_memory_utilization": 0.5}, "dtype": "bfloat16"}
    fraction = make_config(tmp_path, model={"path": model}, inference=inference)
    # half of the GPU less two million bytes of weights and vLLM's own work
    assert _plan(fraction).cache_mb == pytest.approx((40 * GIB - 2_000_000 - 1.5 * GIB) / 2**20, abs=1)
    long = {"inference": {"max_model_len": 20_000}, "training": {"micro_batch_tokens": 20_000}}
    plan = _plan(make_config(tmp_path, model={"path": model}, **long), gpu_bytes=3 * GIB)
    assert plan.cache_mb == -(-20_000 * TOKEN_BYTES // 2**20)
    (note,) = plan.notes
    assert "the trainer and vLLM next to it" in note


def test_where_nothing_is_shared_vllm_measures_for_itself(tmp_path: Path, model: str) -> None:
    config = make_config(tmp_path, model={"path": model}, inference={"dtype": "bfloat16"})
    apart = _plan(config, ("0", "1"))
    assert (apart.cache_mb, apart.notes) == (None, ())
    assert apart.server.startswith("72.0 GiB: ")  # 0.9 of 80
    machine = Machine(num_cpus=8, gpus=("0", "1"), gpu_bytes=80 * GIB)
    assert "--set" not in make_plan(config, machine, VLLM_ON_GPU).servers[0].command
