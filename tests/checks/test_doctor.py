"""The doctor: the real machine, and each finding with the machine changed."""

from __future__ import annotations

import importlib.metadata
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_async.checks import doctor as doctor_module
from grpo_async.checks import doctor_hardware, doctor_network, doctor_software
from grpo_async.checks.doctor import run_doctor
from grpo_async.checks.doctor_hardware import Memory, machine_memory
from grpo_async.checks.doctor_network import environment_checks
from grpo_async.checks.doctor_software import check_requirements, check_torch, check_vllm
from grpo_async.checks.report import Check, passed

REPOSITORY = Path(__file__).parents[2]


def _statuses(checks: list[Check]) -> list[str]:
    return [check.status for check in checks]


def test_this_machine_is_looked_at_in_seconds_and_every_subject_has_a_line() -> None:
    began = time.monotonic()
    checks = run_doctor()
    assert time.monotonic() - began < 20.0  # three seconds; the machine may be busy
    names = list(dict.fromkeys(check.name for check in checks))
    assert names == [
        "python", "system", "cpus", "memory", "gpus", "packages", "torch", "vllm", "limits", "shared memory", "disk", "clock",
        "loopback", "names", "environment", "sandbox",
    ]  # fmt: skip
    assert all(check.detail for check in checks)
    broken = [check for check in checks if "the check itself broke" in check.detail]
    assert broken == []


def test_a_check_that_breaks_is_one_failed_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> Check:
        raise RuntimeError("no such file")

    monkeypatch.setattr(doctor_module, "_CHECKS", (("one", lambda: passed("one", "fine")), ("two", breaks)))
    assert run_doctor() == [
        passed("one", "fine"),
        Check("two", "fail", "the check itself broke: RuntimeError: no such file"),
    ]


def test_it_runs_without_torch_and_transformers() -> None:
    program = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "vllm", "packaging"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Missing())
from grpo_async.cli import main
main(["doctor"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr  # torch is there by its metadata and cannot be imported
    lines = {line[:4].strip() + " " + line[6:20].strip(): line for line in done.stdout.splitlines()}
    assert "cannot be imported (No module named 'torch')" in lines["fail torch"]
    assert "`packaging` is missing" in lines["warn packages"]
    assert "pass loopback" in lines


# Hardware.


@pytest.mark.parametrize(
    ("limit", "usage", "expected"),
    [
        ("max", "5", (1000, 700)),
        ("400", "150", (400, 250)),
        ("900", "50", (900, 700)),  # the machine has less than the group would allow
        ("5000", "50", (1000, 700)),
        ("400", "450", (400, 0)),
        (None, None, (1000, 700)),
    ],
)
def test_memory_is_what_the_container_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, usage: str | None, expected: tuple[int, int]
) -> None:
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1000, available=700))
    for name, text in (("limit", limit), ("usage", usage)):
        if text is not None:
            (tmp_path / name).write_text(f"{text}\n")
    memory = machine_memory((str(tmp_path / "limit"),), (str(tmp_path / "usage"),))
    assert (memory.total, memory.available) == expected


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_hardware, "machine_memory", lambda: Memory(total=8 << 30, available=1 << 30))
    assert doctor_hardware.check_memory().status == "warn"


@pytest.mark.parametrize(
    ("soft", "status"), [(512, "fail"), (1024, "warn"), (4096, "pass"), (resource.RLIM_INFINITY, "pass")]
)
def test_few_open_files_are_reported(monkeypatch: pytest.MonkeyPatch, soft: int, status: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, resource.RLIM_INFINITY))
    check = doctor_hardware.check_limits()[0]
    assert check.status == status
    assert ("ulimit -n" in check.detail) == (status != "pass")


@pytest.mark.parametrize(("free", "status"), [(64 << 20, "warn"), (2 << 30, "pass")])
def test_a_small_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    monkeypatch.setattr(doctor_hardware.shutil, "disk_usage", lambda path: SimpleNamespace(free=free, total=free))
    assert doctor_hardware.check_shared_memory().status == status


@pytest.mark.parametrize(("free", "status"), [(100 << 20, "fail"), (2 << 30, "warn"), (9 << 30, "pass")])
def test_a_full_disk_is_reported(monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    monkeypatch.setattr(doctor_hardware.shutil, "disk_usage", lambda path: SimpleNamespace(free=free, total=10 * free))
    assert _statuses(doctor_hardware.check_disk()) == [status, status]


SMI_LINE = "0, NVIDIA H100 80GB HBM3, 570.86.15, 81559, {used}, {capability}, {mig}\n"


@pytest.mark.parametrize(
    ("output", "code", "status", "words"),
    [
        (SMI_LINE.format(used=4, capability=9.0, mig="Disabled"), 0, "pass", "H100"),
        (SMI_LINE.format(used=70000, capability=9.0, mig="Disabled"), 0, "warn", "another program holds memory"),
        (SMI_LINE.format(used=4, capability=9.0, mig="Enabled"), 0, "warn", "MIG is on"),
        (SMI_LINE.format(used=4, capability=7.5, mig="[N/A]"), 0, "warn", "no bfloat16"),
        ("gibberish\n", 0, "warn", "something unknown"),
        ("", 0, "warn", "lists none"),
        ("Failed to initialize NVML: Driver/library version mismatch\n", 18, "fail", "version mismatch"),
    ],
)
def test_what_nvidia_smi_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, code: int, status: str, words: str
) -> None:
    """The program is a stand-in: this machine may have no GPU."""
    (tmp_path / "answer").write_text(output)
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/answer\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (check,) = doctor_hardware.check_gpus()
    assert (check.status, words in check.detail) == (status, True), check.detail


def test_a_hanging_driver_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 20\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(doctor_hardware, "_NVIDIA_SMI_LIMIT_S", 0.2)
    (check,) = doctor_hardware.check_gpus()
    assert (check.status, "did not answer" in check.detail) == ("fail", True)


# Software.


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions by package; whatever is put in here is all that is installed."""
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return versions


def test_versions_are_compared_with_the_ranges(installed: dict[str, str]) -> None:
    installed |= {"httpx": "0.28.1", "rich": "99.0", "wandb": "0.1"}
    checks = check_requirements(
        ["httpx<1,>=0.28", "rich<16,>=14", "orjson<4,>=3.10", "wandb<1,>=0.19; extra == 'wandb'", "peft; extra == 'x'"]
    )
    assert checks == [
        Check("packages", "pass", "httpx 0.28.1"),
        Check("packages", "warn", 'rich 99.0 is installed, tested is <16,>=14: pip install "rich<16,>=14"'),
        Check("packages", "fail", 'orjson is missing: pip install "orjson<4,>=3.10"'),
        Check("packages", "warn", 'wandb 0.1 is installed, tested is <1,>=0.19: pip install "wandb<1,>=0.19"'),
    ]


def test_a_requirement_of_another_system_is_left_out(installed: dict[str, str]) -> None:
    assert check_requirements(["pywin32; sys_platform == 'win32'"]) == []


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.13.1.dev20260101+cu130"])
def test_builds_of_a_version_are_in_the_range(installed: dict[str, str], version: str) -> None:
    installed["torch"] = version
    assert _statuses(check_requirements(["torch==2.13.*"])) == ["pass"]


@pytest.mark.parametrize(
    ("versions", "status", "words"),
    [
        ({}, "pass", "embedded engine"),
        ({"vllm": "0.11.0"}, "fail", "vllm 0.11.0 is installed, supported is"),
    ],
)
def test_vllm_is_judged_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], versions: dict[str, str], status: str, words: str
) -> None:
    monkeypatch.setattr(doctor_software, "has_gpu_driver", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())
    installed |= versions
    check = check_vllm()
    assert (check.status, words in check.detail) == (status, True), check.detail


def test_no_vllm_beside_a_gpu_is_a_warning(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    monkeypatch.setattr(doctor_software, "has_gpu_driver", lambda: True)
    assert check_vllm().status == "warn"


def _supported_vllm(monkeypatch: pytest.MonkeyPatch, requires: list[str], *, has_plugin: bool = True) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(doctor_software, "is_supported", lambda version: True)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ["plugin"] if has_plugin else [])


def test_vllm_beside_another_torch_is_a_warning(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    installed |= {"vllm": "0.27.1", "torch": "2.12.0"}
    _supported_vllm(monkeypatch, ["numpy", "torch==2.13.0", "torch==2.9; extra == 'old'"])
    check = check_vllm()
    assert check.status == "warn"
    assert "wants torch==2.13.0, 2.12.0 is installed" in check.detail
    installed["torch"] = "2.13.0+cu130"
    assert check_vllm().status == "pass"


def test_vllm_that_would_not_find_the_plugin_fails(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    installed |= {"vllm": "0.27.1", "torch": "2.13.0"}
    _supported_vllm(monkeypatch, [], has_plugin=False)
    assert check_vllm().status == "fail"


def test_extensions_of_another_torch_are_a_warning(installed: dict[str, str]) -> None:
    """They take transformers down with them."""
    installed |= {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.13.0+cpu"}
    warnings = [check for check in check_torch() if check.status == "warn"]
    assert [check.detail.split(" was ")[0] for check in warnings] == ["torchvision 0.28.0"]
    installed["torch"] = "2.13.0"
    assert [check for check in check_torch() if check.status == "warn"] == []


def test_no_torch_fails(installed: dict[str, str]) -> None:
    (check,) = check_torch()
    assert (check.status, check.detail.startswith("not installed: pip install torch")) == ("fail", True)


def test_a_gpu_that_torch_does_not_see_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor_software, "has_gpu_driver", lambda: True)
    check = check_torch()[-1]
    assert (check.status, "sees no GPU although there is a driver" in check.detail) == ("fail", True)


# Network and environment.


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}, "runs code as this user"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "every GPU is hidden"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "every GPU is hidden"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}, "expandable segments"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "several times slower"),
        ({"LD_PRELOAD": "/x.so"}, "LD_PRELOAD"),
    ],
)
def test_variables_that_do_harm_are_warnings(variables: dict[str, str], words: str) -> None:
    checks = environment_checks(variables)
    assert _statuses(checks) == ["pass", "warn"]
    assert words in checks[1].detail


def test_harmless_values_are_not_warned_about() -> None:
    variables = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "0", "CUDA_LAUNCH_BLOCKING": "0", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert _statuses(environment_checks(variables)) == ["pass"]
    assert environment_checks({"HOME": "/root"}) == [passed("environment", "nothing that changes a run is set")]


def test_secrets_are_never_shown() -> None:
    (check,) = environment_checks(
        {
            "HF_TOKEN": "hf_abcdef", "VLLM_API_KEY": "sk-123", "GRPO_ASYNC_TOKEN": "s3cret", "WANDB_API_KEY": "w4ndb",
            "https_proxy": "http://user:pa55@proxy:3128", "NCCL_DEBUG": "INFO", "EDITOR": "vi",
        }
    )  # fmt: skip
    for secret in ("hf_abcdef", "sk-123", "s3cret", "w4ndb", "pa55", "user"):
        assert secret not in check.detail
    for shown in ("HF_TOKEN=(set)", "NCCL_DEBUG='INFO'", "proxy:3128"):
        assert shown in check.detail
    assert "EDITOR" not in check.detail


@pytest.mark.parametrize(
    ("addresses", "status"),
    [(["127.0.0.1"], "pass"), (["::1", "127.0.0.1"], "pass"), (["::1"], "warn"), (["127.0.0.1", "10.0.0.9"], "warn")],
)
def test_what_localhost_is(monkeypatch: pytest.MonkeyPatch, addresses: list[str], status: str) -> None:
    found = [(None, None, None, "", (address, 80)) for address in addresses]
    monkeypatch.setattr(doctor_network.socket, "getaddrinfo", lambda *_, **__: found)
    assert doctor_network.check_names()[0].status == status


def test_names_that_do_not_resolve_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise OSError("Name or service not known")

    monkeypatch.setattr(doctor_network.socket, "getaddrinfo", unknown)
    monkeypatch.setattr(doctor_network.socket, "gethostbyname", unknown)
    assert _statuses(doctor_network.check_names()) == ["warn", "warn"]


def test_a_loopback_that_cannot_be_bound_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("Permission denied")

    monkeypatch.setattr(doctor_network.socket, "create_server", refuse)
    assert _statuses(doctor_network.check_loopback()) == ["fail"]


def test_a_loopback_that_cannot_be_reached_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(doctor_network.socket, "create_connection", refuse)
    assert _statuses(doctor_network.check_loopback()) == ["fail"]


def test_walls_that_the_sandbox_lacks_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    import grpo_async.sandbox as sandbox

    found = [
        sandbox.Capability(name="limits", is_available=True, how="x", consequence=""),
        sandbox.Capability(name="network", is_available=False, how="refused", consequence="it reaches the network"),
        sandbox.Capability(name="signals", is_available=False, how="refused", consequence="it ends programs"),
    ]
    monkeypatch.setattr(sandbox, "capabilities", lambda: found)
    checks = doctor_network.check_sandbox()
    assert _statuses(checks) == ["pass", "warn", "warn"]
    assert "it reaches the network (tried: refused). The Python tool and the code reward refuse" in checks[1].detail
    assert "refuse to work" not in checks[2].detail  # not required


def _failing_sandbox() -> Callable[[], Any]:
    from grpo_async.sandbox import SandboxError

    def fail() -> Any:
        raise SandboxError("no interpreter")

    return fail


def test_a_sandbox_that_cannot_run_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    import grpo_async.sandbox as sandbox

    monkeypatch.setattr(sandbox, "capabilities", _failing_sandbox())
    assert _statuses(doctor_network.check_sandbox()) == ["warn"]
