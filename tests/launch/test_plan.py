"""The plan is data; what it says is checked here, that it works is checked by the supervisor's tests."""

from __future__ import annotations

import json
import os
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from grpo_async.errors import ConfigError
from grpo_async.launch.gpus import GpuShares, fill_in_for_devices, plan_transport, share_gpus
from grpo_async.launch.plan import ProcessPlan, plan_processes
from grpo_async.processes import machine
from grpo_async.processes.assignment import Assignment, Node
from grpo_async.processes.machine import Machine, find_gpus, free_ports
from grpo_async.run_directory import RunDir
from grpo_async.servers.engine_choice import EngineChoice, choose_engine
from grpo_async.servers.vllm import command
from tests.launch.support import EXTERNAL, VLLM_ON_CPU, VLLM_ON_GPU, make_config, make_plan


@pytest.mark.parametrize(
    ("engine", "family", "sections", "push"),
    [
        (VLLM_ON_GPU, "qwen3", {}, "adapter_swap"),
        (VLLM_ON_CPU, "qwen3", {}, "merged"),
        (VLLM_ON_GPU, "qwen3_moe", {}, "merged"),
        (VLLM_ON_GPU, "qwen3", {"weights": {"mode": "abort"}}, "merged"),
        (VLLM_ON_GPU, "qwen3", {"model": {"lora": {"modules_to_save": ["lm_head"]}}}, "merged"),
        (VLLM_ON_GPU, "qwen3", {"model": {"lora": {"push": "adapter"}}}, "adapter"),
    ],
)
def test_adapters_are_swapped_by_default_where_that_is_known_to_work(
    tmp_path: Path, engine: EngineChoice, family: str, sections: dict[str, Any], push: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    lora = {"rank": 8, **sections.pop("model", {}).get("lora", {})}
    config = make_config(tmp_path, model={"path": str(tmp_path), "lora": lora}, **sections)
    filled = fill_in_for_devices(config, engine, ("0",)).model.lora
    assert filled is not None
    assert filled.push == push


@pytest.mark.parametrize("colocate", [False, True])
def test_a_trainer_on_gpus_has_growing_segments_but_for_memory_that_is_shared_over_ipc(
    tmp_path: Path, colocate: bool
) -> None:
    config = make_config(tmp_path, launch={"colocate": colocate}, inference={"vllm": {"kv_cache_mb": 64}})
    on_gpus = Machine(num_cpus=16, gpus=("0",) if colocate else ("0", "1"), gpu_bytes=80 << 30)
    plan = make_plan(fill_in_for_devices(config, VLLM_ON_GPU, on_gpus.gpus), on_gpus, VLLM_ON_GPU)
    assert plan.trainer is not None
    assert ("PYTORCH_CUDA_ALLOC_CONF" in plan.trainer.environment) != colocate


def test_configured_urls_start_no_server_and_get_the_weights_over_nccl_where_the_trainer_has_gpus(
    tmp_path: Path,
) -> None:
    urls = {"inference": {"urls": ["http://gpu-7:8000", "https://gpu-8"]}, "weights": {"host": "10.0.0.1"}}
    config = make_config(tmp_path, **urls)
    plan = make_plan(config, Machine(num_cpus=2), EXTERNAL)
    assert plan.servers == ()
    assert plan.assignment.server_urls == ("http://gpu-7:8000", "https://gpu-8")
    assert plan_transport(config, EXTERNAL, share_gpus(config, EXTERNAL, ()))[0] == "gloo"
    config = make_config(tmp_path, launch={"device": "cuda"}, **urls)
    assert plan_transport(config, EXTERNAL, share_gpus(config, EXTERNAL, ("0",)))[0] == "nccl"
    config = make_config(tmp_path, model={"lora": {"push": "adapter"}}, launch={"device": "cuda"})
    assert plan_transport(config, VLLM_ON_GPU, share_gpus(config, VLLM_ON_GPU, ("0", "1")))[0] == "gloo", "no other way"


@pytest.mark.parametrize(
    ("gpus", "ranks", "replicas", "sizes", "colocate", "trainer", "servers"),
    [
        ("01234567", 2, 3, (2, 1, 1), False, "01", ["23", "45", "67"]),
        ("01234567", 4, 1, (2, 1, 2), False, "0123", ["4567"]),
        ("01", 2, 3, (1, 1, 1), True, "01", ["0", "1", "0"]),
        ("0123", 2, 1, (2, 1, 1), True, "01", ["01"]),  # from the first one on, also where there would be others
    ],
)
def test_gpus_go_to_the_ranks_first_and_are_shared_only_where_that_is_asked_for(
    tmp_path: Path, gpus: str, ranks: int, replicas: int, sizes: Any, colocate: bool, trainer: str, servers: list[str]
) -> None:
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    config = make_config(
        tmp_path,
        launch={"num_trainer_ranks": ranks, "device": "cuda", "colocate": colocate},
        inference={"replicas": replicas, "vllm": dict(zip(names, sizes, strict=True))},
    )
    shares = share_gpus(config, VLLM_ON_GPU, tuple(gpus))
    assert shares.trainer == tuple(trainer)
    assert shares.servers == tuple(tuple(server) for server in servers)
    assert shares.shared == tuple(gpu for gpu in trainer if gpu in "".join(servers))


@pytest.mark.parametrize(
    ("gpus", "launch", "parallel"),
    [
        (8, {"num_trainer_ranks": 6}, 4),  # the servers would be on trainer GPUs 0 to 3, with 6 and 7 idle
        (1, {"device": "cpu", "colocate": True}, 2),  # nothing to share with
    ],
)
def test_too_few_gpus_are_an_error(tmp_path: Path, gpus: int, launch: dict[str, Any], parallel: int) -> None:
    config = make_config(tmp_path, launch=launch, inference={"vllm": {"tensor_parallel_size": parallel}})
    with pytest.raises(ConfigError, match=rf"launch: this machine has {gpus} GPU"):
        share_gpus(config, VLLM_ON_GPU, tuple(map(str, range(gpus))))


def test_a_server_on_the_cpu_takes_no_gpu_and_a_machine_without_leaves_the_variable_alone(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    shares = share_gpus(config, VLLM_ON_CPU, ("0", "1"))
    assert (shares.trainer, shares.servers) == (("0",), ((),))
    assert share_gpus(config, VLLM_ON_GPU, ()) == GpuShares(trainer=None, servers=(None,))
    plan = make_plan(config, Machine(num_cpus=8, gpus=("0", "1")), VLLM_ON_CPU)
    assert plan.servers[0].environment["CUDA_VISIBLE_DEVICES"] == ""
    assert plan.trainer is not None
    assert plan.trainer.environment["CUDA_VISIBLE_DEVICES"] == "0"
    without = make_plan(config, Machine(num_cpus=2), VLLM_ON_CPU)
    assert all("CUDA_VISIBLE_DEVICES" not in spec.environment for spec in without.processes)


@pytest.mark.parametrize(
    ("gpus", "replicas", "engine", "wanted", "found"),
    [
        ("0", 1, VLLM_ON_CPU, "auto", "gloo"),
        ("", 1, VLLM_ON_GPU, "auto", "gloo"),
        ("01", 1, VLLM_ON_GPU, "auto", "nccl"),
        ("0", 1, VLLM_ON_GPU, "auto", "ipc"),
        ("01", 2, VLLM_ON_GPU, "auto", "ipc"),
        ("01", 2, VLLM_ON_GPU, "nccl", None),
        ("01", 1, VLLM_ON_GPU, "ipc", None),
        ("01", 1, VLLM_ON_GPU, "gloo", "gloo"),
    ],
)
def test_the_transport_fits_the_devices_and_what_does_not_is_refused_but_for_gloo(
    tmp_path: Path, gpus: str, replicas: int, engine: EngineChoice, wanted: str, found: str | None
) -> None:
    config = make_config(
        tmp_path,
        launch={"colocate": len(gpus) < 1 + replicas},
        inference={"replicas": replicas},
        weights={"transport": wanted},
    )
    shares = share_gpus(config, engine, tuple(gpus))
    if found is None:
        with pytest.raises(ConfigError, match=rf"weights\.transport: {wanted} is impossible between"):
            plan_transport(config, engine, shares)
    else:
        assert plan_transport(config, engine, shares)[0] == found


def test_ports_that_are_chosen_together_differ() -> None:
    assert len(set(free_ports("127.0.0.1", 400))) == 400  # one by one, some would come twice


@pytest.mark.parametrize(
    ("visible", "gpus", "gib"),
    [
        (None, "0,1,2,3", 24),
        ("2,1", "2,1", 24),
        ("3,9,0", "3", 24),  # as in CUDA: what follows an index that does not exist is hidden, too
        ("", "", None),
    ],
)
def test_the_driver_says_which_gpus_there_are_and_the_environment_which_of_them_are_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, gpus: str, gib: int | None
) -> None:
    """A stand-in for nvidia-smi: this machine may have no GPU."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nfor gib in 80 40 40 24; do echo $((gib * 1024)); done\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    monkeypatch.setattr(machine, "is_torch_for_cpus", lambda: True)
    assert find_gpus(environment) == ((), None)
    monkeypatch.setattr(machine, "is_torch_for_cpus", lambda: False)
    assert find_gpus(environment) == (tuple(filter(None, gpus.split(","))), None if gib is None else gib << 30)


def test_a_large_model_has_longer_to_start_unless_the_user_says_how_long(tmp_path: Path) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(140_000_000_000)  # sparse: a model of 70 B in 16 bits
    large = {"path": str(folder)}
    assert make_config(tmp_path, model=large).inference.startup_timeout_s == 600 + 1400
    own = make_config(tmp_path, model=large, inference={"startup_timeout_s": 60.0})
    assert own.inference.startup_timeout_s == 60


def test_auto_takes_vllm_where_it_is_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, engine in ((True, "vllm"), (False, "embedded")):
        monkeypatch.setattr(command, "vllm_usable", lambda installed=installed: (installed, "the reason"))
        assert choose_engine(make_config(tmp_path, inference={"engine": "auto"})).engine == engine


def test_each_node_of_a_cluster_plans_its_ranks_or_its_server(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        launch={"ray": "auto", "trainer_nodes": 2, "num_trainer_ranks": 2},
        inference={"engine": "vllm", "replicas": {"min": 1, "max": 2}, "vllm": {"tensor_parallel_size": 2}},
    )

    def plan(rank: int, address: str, **options: Any) -> ProcessPlan:
        run_dir = RunDir(Path("/runs/x"))
        assignment = Assignment(
            run_dir=run_dir,
            attempt_dir=run_dir.attempt(1),
            private_dir=Path("/private"),
            server_urls=("", "http://10.0.0.4:8001"),
            node=Node(rank=rank, count=2, address="10.0.0.1", port=555, own_address=address),
        )
        machine = Machine(num_cpus=8, gpus=("4", "5"))
        return plan_processes(
            config,
            engine=VLLM_ON_GPU,
            assignment=assignment,
            token="secret",
            machine=machine,
            plans_memory=False,
            **options,
        )

    assert plan(0, "10.0.0.1", servers=range(0)).assignment.transport == "nccl"
    trainer = plan(1, "10.0.0.2", servers=range(0)).trainer
    assert trainer is not None
    options = dict(pairwise(trainer.command))
    assert (options["--nnodes"], options["--node-rank"], options["--master-addr"]) == ("2", "1", "10.0.0.1")
    assert (trainer.gpus, trainer.log_name) == (("4", "5"), "trainer_node1.log")
    served = plan(0, "10.0.0.4", trains=False, servers=range(1, 2))
    assert served.trainer is None
    (server,) = served.servers
    assert dict(pairwise(server.command))["--port"] == "8001"
    assert server.command[-1] == "inference.host=10.0.0.4"
    assert (server.gpus, server.log_name) == (("4", "5"), "server_1.log")
