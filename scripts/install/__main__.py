"""`python -m scripts.install`: makes or completes .venv. See scripts/bootstrap.sh for the options."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.install import machine as look_at
from scripts.install import pip_settings
from scripts.install.plan import InstallError, Machine, Plan, Request, TorchBuild, make_plan, package_step, torch_step
from scripts.install.running import run_step, say
from scripts.install.stamp import Stamp, digest, missing_packages, read_stamp, site_packages

CHECKOUT = Path(__file__).resolve().parents[2]
ENVIRONMENT = CHECKOUT / ".venv"
LOG = ENVIRONMENT / "install.log"
UV_REQUIREMENT = "uv>=0.12,<1"
_VENV_TIMEOUT_S = 600.0  # it copies pip; seconds on a local disk
DEFAULT_EXTRAS = ("math",)  # 40 MB; configs/math.yaml and the tests use it


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where packages come from, and which torch."""

    torch_requirement: str
    torch_version: str
    cpu_index: str
    pip: Mapping[str, str]
    uv: Mapping[str, str]


def main() -> int:
    os.chdir(CHECKOUT)
    try:
        request, plan_only = _arguments()
        if plan_only:
            _print_plan(request)
            return 0
        with _lock():
            _bootstrap(request)
    except InstallError as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk or a read-only folder, met by this script itself
        print(f"bootstrap: {error}; mend that and run this again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbootstrap: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


def _bootstrap(request: Request) -> None:
    stamp = read_stamp(ENVIRONMENT)
    inputs = digest(CHECKOUT)
    request = _with_earlier_features(request, stamp)
    if stamp is not None and _serves(stamp, request, inputs):
        print(f"bootstrap: .venv is ready ({_describe(stamp.features)}, torch {stamp.torch})")
        return
    sources = _sources()
    machine = _machine(sources)
    plan = make_plan(machine, request, cpu_index=sources.cpu_index)
    for note in plan.notes:
        print(f"bootstrap: note: {note}", flush=True)
    free, needed = look_at.free_gb(CHECKOUT), plan.needs_gb
    if stamp is not None and stamp.finished and plan.features <= stamp.features:
        needed = 1  # newer versions of some packages at most
    if free < needed:
        raise InstallError(
            f"{free:.1f} GB are free on the disk of {CHECKOUT}, the installation needs {needed} GB "
            "while it runs. Free some, or clone to another disk."
        )
    say(f"installing: torch {plan.torch}, engine {plan.engine}, {_describe(plan.features)}")
    started = time.monotonic()
    reason_to_rebuild = _reason_to_rebuild(stamp, plan)
    after = Stamp(finished=True, checkout=str(CHECKOUT), inputs=inputs, torch=plan.torch, features=plan.features)
    # What fails to install is not asked for again by later calls that do not name it.
    kept = stamp.features if stamp is not None and reason_to_rebuild is None else frozenset[str]()
    _make_environment(reason_to_rebuild, replace(after, finished=False, features=kept))
    for label, command, environment in _steps(plan, machine, sources):
        run_step(label, command, environment, log=LOG)
    gone = missing_packages(ENVIRONMENT, plan.features)
    if gone:
        raise InstallError(
            f"the installation ended without {', '.join(gone)}; its log is {LOG}. Remove .venv and run this again."
        )
    after.write(ENVIRONMENT)
    say(f"done in {time.monotonic() - started:.0f} s")


# Deciding


def _arguments() -> tuple[Request, bool]:
    parser = argparse.ArgumentParser(
        prog="scripts/bootstrap.sh", description="Make .venv with what this checkout needs."
    )
    parser.add_argument("--with-vllm", action="store_true", help="install vLLM (CUDA build with a GPU, else CPU build)")
    parser.add_argument("--with-vllm-if-possible", action="store_true", help="the same, but go without it on macOS")
    parser.add_argument("--with-tests", action="store_true", help="install pytest, ruff, mypy and type stubs")
    parser.add_argument(
        "--with", dest="extras", action="append", default=[], metavar="EXTRA", help="an extra, or several: a,b"
    )
    parser.add_argument("--plan", action="store_true", help="print what would be installed and stop")
    options = parser.parse_args()
    extras = {name for words in options.extras for name in re.split(r"[,\s]+", words) if name}
    known = set(_pyproject()["project"]["optional-dependencies"])
    if extras - known:
        parser.error(f"unknown extra {', '.join(sorted(extras - known))}; known: {', '.join(sorted(known))}")
    torch = os.environ.get("GRPO_ASYNC_TORCH", "auto")
    if torch not in ("auto", "cpu", "cuda"):
        parser.error(f"GRPO_ASYNC_TORCH={torch}: must be auto, cpu or cuda")
    request = Request(
        vllm=options.with_vllm or "vllm" in extras,
        vllm_if_possible=options.with_vllm_if_possible,
        tests=options.with_tests,
        extras=frozenset(extras - {"vllm"}) | frozenset(DEFAULT_EXTRAS),
        torch=torch,
    )
    return request, options.plan


def _with_earlier_features(request: Request, stamp: Stamp | None) -> Request:
    """Asking for less never takes away, and a GPU environment stays one while the GPU is out of sight."""
    if stamp is None or stamp.checkout != str(CHECKOUT):
        return request
    if request.torch == "auto" and stamp.torch is TorchBuild.CUDA:
        request = replace(request, torch="cuda")
    return replace(
        request,
        vllm=request.vllm or "vllm" in stamp.features,
        tests=request.tests or "tests" in stamp.features,
        extras=request.extras | (stamp.features - {"vllm", "tests"}),
    )


def _serves(stamp: Stamp, request: Request, inputs: str) -> bool:
    """Whether what is installed is what is asked for. Cheap: no network, no imports."""
    if not stamp.finished or stamp.checkout != str(CHECKOUT) or stamp.inputs != inputs or _python_differs():
        return False
    if request.torch == "cpu" and stamp.torch is TorchBuild.CUDA:
        return False
    if stamp.torch in (TorchBuild.CPU, TorchBuild.STAND_IN) and (
        request.torch == "cuda" or (request.torch == "auto" and look_at.has_gpu())
    ):
        return False
    vllm = request.vllm or (request.vllm_if_possible and stamp.torch is not TorchBuild.MACOS)
    asked = request.extras | ({"vllm"} if vllm else set()) | ({"tests"} if request.tests else set())
    return asked <= stamp.features and not missing_packages(ENVIRONMENT, asked)


def _reason_to_rebuild(stamp: Stamp | None, plan: Plan) -> str | None:
    """Why the present .venv must go, or None. One without a stamp was not made here and is not removed."""
    if not ENVIRONMENT.exists():
        return None
    if stamp is None:
        cuda_wanted = plan.torch is TorchBuild.CUDA
        site = site_packages(ENVIRONMENT)
        if _python_differs() or (cuda_wanted and site is not None and any(site.glob("torch-*+cpu.dist-info"))):
            raise InstallError(
                ".venv was made by hand for another Python or torch; remove it (rm -rf .venv) and run this again."
            )
        return None
    if stamp.checkout != str(CHECKOUT):
        return f"it was made for {stamp.checkout}"
    if _python_differs():
        return f"it has another Python than {sys.version_info.major}.{sys.version_info.minor}"
    if stamp.torch is not plan.torch:
        return f"it has torch {stamp.torch}, wanted is torch {plan.torch}"
    return None


def _python_differs() -> bool:
    site = site_packages(ENVIRONMENT)  # None: it was left half made, and will be completed
    return site is not None and site.parent.name != f"python{sys.version_info.major}.{sys.version_info.minor}"


def _machine(sources: Sources) -> Machine:
    return look_at.look(
        find_links=sources.uv.get("UV_FIND_LINKS", os.environ.get("UV_FIND_LINKS", "")).replace(",", " ").split(),
        torch_version=sources.torch_version,
        cpu_index=sources.cpu_index,
    )


def _sources() -> Sources:
    requirements = _pyproject()["project"]["dependencies"]
    pins = (CHECKOUT / "requirements/constraints.txt").read_text(encoding="utf-8")
    pin = re.search(r"^torch==([\w.]+)", pins, re.MULTILINE)
    if pin is None:
        raise InstallError("requirements/constraints.txt pins no torch; make it anew with scripts/update-constraints")
    pip = pip_settings.read(os.environ)
    return Sources(
        torch_requirement=next(text for text in requirements if re.match(r"torch\b", text)),
        torch_version=pin[1],
        cpu_index=os.environ.get("GRPO_ASYNC_TORCH_INDEX") or look_at.CPU_INDEX,
        pip=pip,
        uv=pip_settings.to_uv(pip, os.environ),
    )


def _pyproject() -> dict[str, dict[str, dict[str, list[str]]]]:
    return tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))


# Doing


def _steps(plan: Plan, machine: Machine, sources: Sources) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """(label, command, environment) of each step after the environment itself."""
    python = str(ENVIRONMENT / "bin/python")
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PIP_USER", "PIP_TARGET", "PIP_PREFIX")
    }
    site = site_packages(ENVIRONMENT)
    if site is None or not any(site.glob("uv-*.dist-info")):
        yield (
            "uv",
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV_REQUIREMENT],
            environment,
        )
    environment |= sources.uv
    install = [str(ENVIRONMENT / "bin/uv"), "pip", "install", "--quiet", "--python", python]
    install += ["--constraints", "requirements/constraints.txt"]
    arguments, hide_find_links = torch_step(
        plan,
        machine,
        requirement=sources.torch_requirement,
        version=sources.torch_version,
        cpu_index=sources.cpu_index,
    )
    hidden = {"UV_FIND_LINKS"} if hide_find_links else set()
    without = {name: value for name, value in environment.items() if name not in hidden}
    yield f"torch ({_torch_source(plan, machine, sources)})", install + arguments, without
    yield "grpo-async and the rest", install + package_step(plan), without


def _make_environment(reason_to_rebuild: str | None, unfinished: Stamp) -> None:
    if reason_to_rebuild is not None:
        say(f"making .venv anew: {reason_to_rebuild}")
        shutil.rmtree(ENVIRONMENT)
    ENVIRONMENT.mkdir(exist_ok=True)
    unfinished.write(ENVIRONMENT)  # first of all, so that what an interruption leaves is known to be ours
    if (ENVIRONMENT / "bin/pip").exists() or (ENVIRONMENT / "bin/uv").exists():
        return
    # Not sys.executable: that may be the environment's own, which was just removed.
    base = getattr(sys, "_base_executable", None) or sys.executable
    command = [base, "-m", "venv", str(ENVIRONMENT)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_VENV_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise InstallError(
            f"{base} -m venv .venv took over {_VENV_TIMEOUT_S:.0f} s; is the disk of .venv slow?"
        ) from error
    if result.returncode != 0:
        raise InstallError(f"{base} -m venv .venv failed:\n{(result.stdout + result.stderr).strip()[-1000:]}")


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """One installation at a time in this checkout; the lock is on its folder and ends with this process."""
    folder = os.open(CHECKOUT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another installation in this checkout")
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


# Telling


def _describe(features: frozenset[str]) -> str:
    return "with " + ", ".join(sorted(features)) if features else "base"


def _torch_source(plan: Plan, machine: Machine, sources: Sources) -> str:
    if plan.torch is TorchBuild.CPU:
        origin = machine.local_torch or sources.cpu_index
        return f"{sources.torch_version}+cpu from {pip_settings.without_passwords(origin)}"
    return f"{sources.torch_version} from the default index"


def _print_plan(request: Request) -> None:
    stamp = read_stamp(ENVIRONMENT)
    request = _with_earlier_features(request, stamp)
    sources = _sources()
    machine = _machine(sources)
    plan = make_plan(machine, request, cpu_index=sources.cpu_index)
    pip = ", ".join(f"{name}={value}" for name, value in sorted(sources.pip.items()))
    rows = {
        "python": f"{sys.version.split()[0]} ({sys.executable})",
        "machine": f"{machine.system} {machine.architecture}, {machine.gpu or 'no GPU'}",
        "torch": f"{plan.torch}: {_torch_source(plan, machine, sources)}",
        "engine": plan.engine,
        "features": ", ".join(sorted(plan.features)),
        "disk": f"{plan.needs_gb} GB needed, {look_at.free_gb(CHECKOUT):.0f} GB free",
        "from pip": pip_settings.without_passwords(pip) or "nothing",
    }
    for name, value in rows.items():
        print(f"{name:<9} {value}")
    reason_to_rebuild = _reason_to_rebuild(stamp, plan)
    if reason_to_rebuild is not None:
        print(f"rebuild   {reason_to_rebuild}")
    for note in plan.notes:
        print(f"note      {note}")
    for _, command, _ in _steps(plan, machine, sources):
        print(f"run       {pip_settings.without_passwords(shlex.join(command))}")


if __name__ == "__main__":
    sys.exit(main())
