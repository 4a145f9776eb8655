"""Settings that advice is about."""

from __future__ import annotations

from typing import Any

from grpo_async.findings.speed import PipelineSetup
from tests.support.configs import small_config

_SECTIONS = {
    **dict.fromkeys(("group_size", "groups_per_step", "max_staleness", "max_in_flight"), "rollout"),
    **dict.fromkeys(("weight_sync_steps",), "training"),
    **dict.fromkeys(("num_trainer_ranks", "trainer_nodes", "ray", "colocate"), "launch"),
}


def pipeline_setup(
    *,
    replicas: int = 1,
    spawns_servers: bool = True,
    tensor_parallel_size: int = 1,
    embedded_slots: int | None = None,
    checkpoint_every_steps: int = 50,
    on_gpu: bool | None = True,
    num_gpus: int | None = None,
    **settings: Any,
) -> PipelineSetup:
    """Of a run with 16 groups of 8, one step ahead: at most 2 x 16 x 8 = 256 rollouts; 64 of them in flight."""
    values: dict[str, dict[str, Any]] = {
        "rollout": {"group_size": 8, "groups_per_step": 16, "max_staleness": 1, "max_in_flight": 64},
        "launch": {},
        "training": {},
    }
    for name, value in settings.items():
        values[_SECTIONS[name]][name] = value
    inference: dict[str, Any] = {"engine": "vllm", "vllm": {"tensor_parallel_size": tensor_parallel_size}}
    if embedded_slots is not None:
        inference |= {"engine": "embedded", "embedded": {"max_slots": embedded_slots}}
    if spawns_servers:
        inference["replicas"] = replicas
    else:
        inference["urls"] = [f"http://server-{number}:1" for number in range(replicas)]
    config = small_config(inference=inference, checkpoint={"every_steps": checkpoint_every_steps}, **values)
    return PipelineSetup(config=config, on_gpu=on_gpu, num_gpus=num_gpus)
