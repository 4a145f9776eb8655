"""The plan is data; what it says is checked here, that it works is checked by the supervisor's tests."""

from __future__ import annotations

import json
import os
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from grpo_async.config.loader import load_config
from grpo_async.errors import ConfigError
from grpo_async.launch.gpus import GpuShares, fill_in_for_devices, plan_transport, share_gpus
from grpo_async.launch.plan import ProcessPlan, plan_dry, plan_processes
from grpo_async.processes import machine
from grpo_async.processes.assignment import ASSIGNMENT_VARIABLE, Assignment, Node
from grpo_async.processes.machine import Machine, find_gpus, free_ports
from grpo_async.run_directory import RunDir
from grpo_async.servers.engine_choice import EngineChoice, choose_engine
from grpo_async.servers.vllm import command
from tests.launch.support import EXTERNAL, VLLM_ON_CPU, VLLM_ON_GPU, make_config, make_plan


def _read_by_a_rank(plan: ProcessPlan, monkeypatch: pytest.MonkeyPatch, **ranks: str) -> Assignment:
    assert plan.trainer is not None
    for key, value in {**plan.trainer.environment, **ranks}.items():
        monkeypatch.setenv(key, value)
    return Assignment.from_environment()


def test_the_plan_has_one_server_and_torchrun_whose_ranks_read_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, launch={"num_trainer_ranks": 2, "trainer_threads": 3})
    plan = make_plan(config, resume_step=40)
    (server,) = plan.servers
    words = "-m grpo_async serve-embedded /runs/x/logs/attempt_3/config.yaml --port 4711"
    assert list(server.command[1:]) == words.split(" ")
    assert server.environment["OMP_NUM_THREADS"] == "1"
    assert server.environment["PYTHONPATH"].split(os.pathsep)[0] == os.getcwd()
    assert plan.trainer is not None
    assert plan.trainer.command[plan.trainer.command.index("--nproc-per-node") + 1] == "2"
    assert plan.trainer.environment["OMP_NUM_THREADS"] == "3"
    assert plan.trainer.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    given = _read_by_a_rank(plan, monkeypatch, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    assert given == Assignment(
        run_dir=RunDir(Path("/runs/x")),
        attempt_dir=Path("/runs/x/logs/attempt_3"),
        private_dir=Path("/private"),
        server_urls=("http://127.0.0.1:4711",),
        resume_step=40,
        rank=1,
        local_rank=1,
        world_size=2,
    )
    assert (given.file_store, given.control_socket) == (Path("/private/store"), Path("/private/control"))
    evaluation = make_plan(config, purpose="evaluation")
    assert "run        test, evaluation only" in evaluation.describe()
    assert _read_by_a_rank(evaluation, monkeypatch).purpose == "evaluation"
    monkeypatch.setenv(ASSIGNMENT_VARIABLE, '{"run_dir": 3}')
    with pytest.raises(ConfigError, match="grpo-async train"):
        Assignment.from_environment()


def test_the_description_names_engine_logs_and_threads_but_not_the_token(tmp_path: Path) -> None:
    config = make_config(tmp_path, launch={"num_trainer_ranks": 2}, optimizer={"warmup_steps": 5})
    plan = make_plan(config, token="very-secret", notes=("look here",))
    text = plan.describe()
    assert "engine     embedded: set by inference.engine" in text
    assert "/runs/x/logs/attempt_3\n" in text
    assert "trainer: 2 processes, 1 CPU thread each, CPU" in text
    assert "precision  float32 master weights, computed and served in float32\n" in text
    assert "note: 3 compute threads on 2 CPUs" in text  # 2 ranks + 1 server
    assert "note: look here" in text
    assert "optimizer.warmup_steps: 5 is cut to 2" in text  # the steps of the run
    assert "weights    gloo: trainer and server are on the CPU; requests in flight: keep_kv (weights.mode)\n" in text
    assert "server     http://127.0.0.1:4711\n" in text
    assert "very-secret" not in text
    assert all("very-secret" not in part for spec in plan.processes for part in spec.command)


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


def test_an_offloaded_optimizer_could_have_more_threads_and_a_server_is_reached_where_it_listens(
    tmp_path: Path,
) -> None:
    launch = {"trainer_threads": 1, "num_trainer_ranks": 2}
    config = make_config(tmp_path, training={"cpu_offload": True}, launch=launch, inference={"host": "0.0.0.0"})
    plan = make_plan(config, Machine(num_cpus=16))
    assert "set launch.trainer_threads: 8" in plan.describe()
    assert plan.assignment.server_urls == ("http://127.0.0.1:4711",)
    plan = make_plan(make_config(tmp_path, inference={"host": "::1"}))
    assert plan.assignment.server_urls == ("http://[::1]:4711",)


@pytest.mark.parametrize("attention", ["auto", "mask"])
def test_a_trainer_on_gpus_has_growing_segments_and_the_plan_names_its_attention(
    tmp_path: Path, attention: str
) -> None:
    """But for memory that is shared over ipc, which cannot grow."""
    for gpus, colocate in (("01", False), ("0", True)):
        config = make_config(
            tmp_path,
            model={"attention": attention},
            launch={"colocate": colocate, "num_trainer_ranks": 1},
            inference={"vllm": {"kv_cache_mb": 64}},
        )
        on_gpus = Machine(num_cpus=16, gpus=tuple(gpus), gpu_bytes=80 << 30)
        plan = make_plan(fill_in_for_devices(config, VLLM_ON_GPU, on_gpus.gpus), on_gpus, engine=VLLM_ON_GPU)
        assert plan.trainer is not None
        assert ("PYTORCH_CUDA_ALLOC_CONF" in plan.trainer.environment) != colocate
        assert ("varlen" in plan.describe()) == (attention == "auto")
        assert ("installed there" in plan_dry(config, machine=on_gpus).describe()) == (attention == "auto")


def test_configured_urls_start_no_server_and_get_the_weights_over_nccl_where_the_trainer_has_gpus(
    tmp_path: Path,
) -> None:
    config = make_config(
        tmp_path, inference={"urls": ["http://gpu-7:8000", "https://gpu-8"]}, weights={"host": "10.0.0.1"}
    )
    plan = make_plan(config, token=None)
    assert plan.servers == ()
    assert plan.assignment.server_urls == ("http://gpu-7:8000", "https://gpu-8")
    assert plan.trainer is not None
    assert "GRPO_ASYNC_TOKEN" not in plan.trainer.environment
    assert "server     https://gpu-8 (not started by this run)" in plan.describe()
    assert plan_transport(config, EXTERNAL, share_gpus(config, EXTERNAL, ()))[0] == "gloo"
    for wanted, kind in (("auto", "nccl"), ("gloo", "gloo"), ("nccl", "nccl")):
        weights = {"transport": wanted, "host": "10.0.0.1"}
        config = make_config(tmp_path, inference={"urls": ["http://a:1"]}, weights=weights, launch={"device": "cuda"})
        assert plan_transport(config, EXTERNAL, share_gpus(config, EXTERNAL, ("0",)))[0] == kind
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
    assert any("share GPU" in note for note in shares.notes) == colocate
    idle = ["GPU 2,3: not used by this run"] if gpus == "0123" else []
    assert [note for note in shares.notes if "not used" in note] == idle


@pytest.mark.parametrize(
    ("gpus", "launch", "parallel", "words"),
    [
        # the servers would be on trainer GPUs 0 to 3, with 6 and 7 idle
        (8, {"num_trainer_ranks": 6}, 4, r"6 for the trainer's ranks .*launch\.ray.*launch\.colocate: true"),
        (1, {"num_trainer_ranks": 3, "colocate": True}, 1, "3 for the trainer's ranks .*lower them"),
        (2, {"colocate": True}, 4, "4 for 1 server of 4"),
        (1, {"device": "cpu", "colocate": True}, 2, "it needs 2 for 1 server"),  # nothing to share with
    ],
)
def test_too_few_gpus_are_an_error_that_says_what_to_do(
    tmp_path: Path, gpus: int, launch: dict[str, Any], parallel: int, words: str
) -> None:
    config = make_config(tmp_path, launch=launch, inference={"vllm": {"tensor_parallel_size": parallel}})
    with pytest.raises(ConfigError, match=rf"launch: this machine has {gpus} GPU.*{words}"):
        share_gpus(config, VLLM_ON_GPU, tuple(map(str, range(gpus))))


def test_a_cluster_is_laid_out_on_a_machine_without_gpus_and_without_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "vllm_usable", lambda: (False, "no module vllm"))
    config = load_config(Path("configs/cluster.yaml"))
    plan = plan_dry(config, machine=Machine(num_cpus=2))
    text = plan.describe()
    assert "launch.ray: 2 machines with 8 ranks each; 8 to 16 servers, each on a node that has room for it" in text
    assert "weights    nccl: trainer and servers have separate GPUs" in text
    assert "trainer: 8 processes, 1 CPU thread each, GPU 0,1,2,3,4,5,6,7" in text
    assert plan.servers == ()
    # six GPUs on each machine are too few for eight ranks
    with pytest.raises(ConfigError, match=r"this machine has 6 GPUs .* it needs 8 for the trainer's ranks"):
        plan_dry(config, machine=Machine(num_cpus=2, gpus=tuple("012345")))


def test_a_server_on_the_cpu_takes_no_gpu_and_a_machine_without_leaves_the_variable_alone(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    shares = share_gpus(config, VLLM_ON_CPU, ("0", "1"))
    assert (shares.trainer, shares.servers) == (("0",), ((),))
    assert share_gpus(config, VLLM_ON_GPU, ()) == GpuShares(trainer=None, servers=(None,))
    plan = make_plan(config, Machine(num_cpus=8, gpus=("0", "1")), engine=VLLM_ON_CPU)
    assert plan.servers[0].environment["CUDA_VISIBLE_DEVICES"] == ""
    assert plan.trainer is not None
    assert plan.trainer.environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert '"on_gpu":true' in plan.trainer.environment[ASSIGNMENT_VARIABLE]
    assert all("CUDA_VISIBLE_DEVICES" not in spec.environment for spec in make_plan(config).processes)


@pytest.mark.parametrize(
    ("gpus", "ranks", "replicas", "engine", "wanted", "found"),
    [
        ("", 1, 1, VLLM_ON_CPU, "auto", ("gloo", "trainer and server are on the CPU")),
        ("", 1, 1, VLLM_ON_GPU, "auto", ("gloo", "the trainer is on the CPU")),
        ("0", 1, 1, VLLM_ON_CPU, "auto", ("gloo", "the server is on the CPU")),
        ("01", 1, 1, VLLM_ON_GPU, "auto", ("nccl", "trainer and servers have separate GPUs")),
        ("0", 1, 1, VLLM_ON_GPU, "auto", ("ipc", "every server shares its GPUs with ranks of the trainer")),
        ("01", 1, 2, VLLM_ON_GPU, "auto", ("ipc", "some servers share GPUs with ranks of the trainer; the others")),
        ("01", 1, 2, VLLM_ON_GPU, "nccl", None),
        ("01", 1, 1, VLLM_ON_GPU, "ipc", None),
        (
            "01",
            1,
            1,
            VLLM_ON_GPU,
            "gloo",
            ("gloo", "set by weights.transport (auto would be nccl: trainer and servers"),
        ),
    ],
)
def test_the_transport_fits_the_devices_and_what_does_not_is_refused_but_for_gloo(
    tmp_path: Path,
    gpus: str,
    ranks: int,
    replicas: int,
    engine: EngineChoice,
    wanted: str,
    found: tuple[str, str] | None,
) -> None:
    config = make_config(
        tmp_path,
        launch={"colocate": len(gpus) < ranks + replicas, "num_trainer_ranks": ranks},
        inference={"replicas": replicas},
        weights={"transport": wanted},
    )
    shares = share_gpus(config, engine, tuple(gpus))
    if found is None:
        with pytest.raises(
            ConfigError, match=rf"weights\.transport: {wanted} is impossible between .* set \w+, or auto"
        ):
            plan_transport(config, engine, shares)
    else:
        kind, reason = plan_transport(config, engine, shares)
        assert (kind, reason[: len(found[1])]) == found


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_sleep_is_refused_where_no_server_can_sleep(tmp_path: Path, engine: Any) -> None:
    """Else every server would be taken for a broken one at the first step."""
    config = make_config(tmp_path, inference={"vllm": {"sleep_while_training": True}}, rollout={"max_staleness": 0})
    with pytest.raises(ConfigError, match=f"sleep_while_training: .* the engine is {engine} without a GPU"):
        make_plan(config, engine=EngineChoice(engine=engine, reason=""))


def test_ports_that_are_chosen_together_differ() -> None:
    assert len(set(free_ports("127.0.0.1", 400))) == 400  # one by one, some would come twice
    with pytest.raises(ConfigError, match=r"inference\.host: 192\.0\.2\.1 cannot be bound"):
        free_ports("192.0.2.1", 1)


@pytest.mark.parametrize(
    ("visible", "gpus", "gib"),
    [
        (None, "0,1,2,3", 24),
        ("2,1", "2,1", 24),
        ("3,9,0", "3", 24),  # as in CUDA: what follows an index that does not exist is hidden, too
        ("GPU-8f2a,1", "GPU-8f2a,1", 24),
        ("", "", None),
        ("-1", "", None),
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


def test_without_a_driver_there_are_no_gpus_but_those_that_the_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "_DEVICES", ("no-such-device",))
    monkeypatch.setattr(machine, "is_torch_for_cpus", lambda: True)
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == ((), None)
    monkeypatch.setattr(machine, "is_torch_for_cpus", lambda: False)
    assert find_gpus({}) == ((), None)
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "1,2,-1,3"}) == (("1", "2"), None)
    monkeypatch.setattr(machine, "_DEVICES", ("null",))  # a container with devices and without nvidia-smi
    with pytest.raises(ConfigError, match="put it into PATH, or say in CUDA_VISIBLE_DEVICES"):
        find_gpus({})
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho Driver/library version mismatch; exit 18\n")
    tool.chmod(0o755)
    with pytest.raises(ConfigError, match=r"version mismatch; (?!.*into PATH).*reinstall the driver, or say in CUDA_"):
        find_gpus({})


def test_a_large_model_has_longer_to_start_unless_the_user_says_how_long(tmp_path: Path) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(140_000_000_000)  # sparse: a model of 70 B in 16 bits
    large = make_config(tmp_path, model={"path": str(folder)})
    assert large.inference.startup_timeout_s == 600 + 1400
    assert make_config(tmp_path).inference.startup_timeout_s == 600
    own = make_config(tmp_path, model={"path": str(folder)}, inference={"startup_timeout_s": 60.0})
    assert own.inference.startup_timeout_s == 60


def test_auto_takes_vllm_where_it_is_usable_and_says_why_and_vllm_that_is_missing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for installed, engine in ((True, "vllm"), (False, "embedded")):
        monkeypatch.setattr(command, "vllm_usable", lambda installed=installed: (installed, "the reason"))
        choice = choose_engine(make_config(tmp_path, inference={"engine": "auto"}))
        assert (choice.engine, "the reason" in choice.reason) == (engine, True)
    with pytest.raises(ConfigError, match=r"the reason(.|\n)*inference.engine: embedded"):
        choose_engine(make_config(tmp_path, inference={"engine": "vllm"}))


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
