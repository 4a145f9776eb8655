"""`python -m scripts.install`: makes or completes .venv. See scripts/bootstrap.sh for the options."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.install.machine import has_gpu, look, uv_settings
from scripts.install.plan import (
    InstallError,
    Machine,
    Plan,
    Request,
    TorchBuild,
    hides_find_links,
    make_plan,
    package_step,
    torch_step,
)

CHECKOUT = Path(__file__).resolve().parents[2]
ENVIRONMENT = CHECKOUT / ".venv"
STAMP = ENVIRONMENT / "grpo-async-install.json"
UV_REQUIREMENT = "uv>=0.12,<1"
DEFAULT_EXTRAS = ("math",)  # 40 MB; configs/math.yaml and the tests use it
_VENV_TIMEOUT_S = 600.0  # it copies pip; seconds on a local disk
_HOW_TO_MEND = """\
  no space left: free some (uv's download cache: `.venv/bin/uv cache clean`)
  a certificate is not trusted: behind a company's proxy set PIP_CERT=/path/to/its/ca.pem
  the index cannot be reached: check connection and HTTPS_PROXY, or name a mirror: PIP_INDEX_URL
  no set of versions fits: use a complete index (PIP_INDEX_URL), or loosen the pin in requirements/constraints.txt
Then run this again; if it fails the same way, remove .venv first (rm -rf .venv)."""


def main() -> int:
    os.chdir(CHECKOUT)
    try:
        request, plan_only = _arguments()
        with contextlib.nullcontext() if plan_only else _lock():
            _bootstrap(request, plan_only=plan_only)
    except InstallError as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk or a read-only folder, met by this script itself
        print(f"bootstrap: {error}; fix that and run this again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbootstrap: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


def _bootstrap(request: Request, *, plan_only: bool) -> None:
    stamp, inputs = read_stamp(), digest(CHECKOUT)
    request = _with_earlier_features(request, stamp)
    if not plan_only and stamp is not None and _serves(stamp, request, inputs):
        _say(f".venv is ready ({_listed(stamp.features)}, torch {stamp.torch})")
        return
    uv = uv_settings(os.environ)
    requirement, version = _torch()
    find_links = uv.get("UV_FIND_LINKS", os.environ.get("UV_FIND_LINKS", "")).replace(",", " ").split()
    machine = look(find_links=find_links, torch_version=version)
    plan = make_plan(machine, request)
    reason_to_rebuild = _reason_to_rebuild(stamp, plan)
    environment = {
        name: value for name, value in (os.environ | uv).items() if name not in ("PIP_USER", "PIP_TARGET", "PIP_PREFIX")
    }
    if hides_find_links(plan, machine):
        environment.pop("UV_FIND_LINKS", None)
    steps = list(_steps(plan, machine, requirement, version))
    if plan_only:
        _print_plan(plan, machine, uv, reason_to_rebuild, steps)
        return
    for note in plan.notes:
        _say(f"note: {note}")
    is_complete = stamp is not None and stamp.finished and plan.features <= stamp.features
    free, needed = _free_gb(), 1 if is_complete else plan.needs_gb  # 1: newer versions of some packages at most
    if free < needed:
        raise InstallError(
            f"{free:.1f} GB are free on the disk of {CHECKOUT}, the installation needs {needed} GB "
            "while it runs. Free some, or clone to another disk."
        )
    _say(f"installing: torch {plan.torch}, engine {plan.engine}, {_listed(plan.features)}")
    started = time.monotonic()
    after = Stamp(finished=True, checkout=str(CHECKOUT), inputs=inputs, torch=plan.torch, features=plan.features)
    # What fails to install is not asked for again by later calls that do not name it.
    kept = stamp.features if stamp is not None and reason_to_rebuild is None else frozenset[str]()
    _make_environment(reason_to_rebuild, replace(after, finished=False, features=kept))
    for label, command in steps:
        _say(label)
        if subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False).returncode != 0:
            raise InstallError(f"'{label}' failed, see above. What may help:\n{_HOW_TO_MEND}")
    if gone := missing_packages(plan.features):
        raise InstallError(f"the installation ended without {', '.join(gone)}. Remove .venv and run this again.")
    after.write()
    _say(f"done in {time.monotonic() - started:.0f} s")


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
    known = set(_project()["optional-dependencies"])
    if extras - known:
        parser.error(f"unknown extra {', '.join(sorted(extras - known))}; known: {', '.join(sorted(known))}")
    torch = os.environ.get("GRPO_ASYNC_TORCH", "auto")
    if torch not in ("auto", "cpu", "cuda"):
        parser.error(f"GRPO_ASYNC_TORCH={torch}: must be auto, cpu or cuda")
    asked = {"vllm": options.with_vllm, "tests": options.with_tests}
    features = frozenset({*extras, *DEFAULT_EXTRAS, *(name for name, is_asked in asked.items() if is_asked)})
    return Request(features=features, vllm_if_possible=options.with_vllm_if_possible, torch=torch), options.plan


# What .venv holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Written before an installation as unfinished, and after it as finished. `inputs` is a digest of the files that say what to
    install; `checkout` is where the environment was made, because an editable install and the scripts in bin/ hold that path."""

    finished: bool
    checkout: str
    inputs: str
    torch: TorchBuild
    features: frozenset[str]

    def write(self, file: Path = STAMP) -> None:
        content = {name: getattr(self, name) for name in ("finished", "checkout", "inputs", "torch")}
        temporary = file.with_name(f".{file.name}")
        temporary.write_text(
            json.dumps({**content, "features": sorted(self.features)}, indent=1) + "\n", encoding="utf-8"
        )
        temporary.replace(file)


def read_stamp(file: Path = STAMP) -> Stamp | None:
    """None if there is none, or one that a different version of this script wrote."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Stamp(**{**content, "torch": TorchBuild(content["torch"]), "features": frozenset(content["features"])})
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def digest(checkout: Path) -> str:
    """Digest of every file that decides what is installed."""
    files = [checkout / "pyproject.toml", *sorted((checkout / "requirements").glob("*.txt"))]
    files += sorted((checkout / "scripts/install").glob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def missing_packages(features: frozenset[str], environment: Path = ENVIRONMENT) -> list[str]:
    """Main packages that `features` ask for and that somebody removed since; looks at folder names only."""
    wanted = ["torch", "transformers", "grpo_async", "uv"]
    wanted += ["pytest", "mypy", "ruff"] if "tests" in features else []
    wanted += ["vllm*"] if "vllm" in features else []
    site = _site_packages(environment)
    return [name for name in wanted if site is None or not any(site.glob(f"{name}-*.dist-info"))]


def _site_packages(environment: Path = ENVIRONMENT) -> Path | None:
    return next(iter(sorted(environment.glob("lib/python3.*/site-packages"))), None)


# Deciding


def _with_earlier_features(request: Request, stamp: Stamp | None) -> Request:
    """Asking for less never takes away, and a GPU environment stays one while the GPU is out of sight."""
    if stamp is None or stamp.checkout != str(CHECKOUT):
        return request
    torch = "cuda" if request.torch == "auto" and stamp.torch is TorchBuild.CUDA else request.torch
    return replace(request, torch=torch, features=request.features | stamp.features)


def _serves(stamp: Stamp, request: Request, inputs: str) -> bool:
    """Whether what is installed is what is asked for. Cheap: no network, no imports."""
    if not stamp.finished or stamp.checkout != str(CHECKOUT) or stamp.inputs != inputs or _python_differs():
        return False
    if request.torch == "cpu" and stamp.torch is TorchBuild.CUDA:
        return False
    wants_cuda = request.torch == "cuda" or (request.torch == "auto" and has_gpu())
    if stamp.torch in (TorchBuild.CPU, TorchBuild.STAND_IN) and wants_cuda:
        return False
    vllm = {"vllm"} if request.vllm_if_possible and stamp.torch is not TorchBuild.MACOS else set()
    asked = request.features | vllm
    return asked <= stamp.features and not missing_packages(asked)


def _reason_to_rebuild(stamp: Stamp | None, plan: Plan) -> str | None:
    """Why the present .venv must go, or None. One without a stamp was not made here and is not removed."""
    if not ENVIRONMENT.exists():
        return None
    if stamp is None:
        site = _site_packages()
        has_cpu_torch = site is not None and any(site.glob("torch-*+cpu.dist-info"))
        if _python_differs() or (plan.torch is TorchBuild.CUDA and has_cpu_torch):
            raise InstallError(
                ".venv was made by hand for another Python or torch; remove it (rm -rf .venv) and run this again."
            )
        return None
    if stamp.checkout != str(CHECKOUT):
        return f"it was made for {stamp.checkout}"
    if _python_differs():
        return f"it has another Python than {sys.version_info.major}.{sys.version_info.minor}"
    return None if stamp.torch is plan.torch else f"it has torch {stamp.torch}, wanted is torch {plan.torch}"


def _python_differs() -> bool:
    site = _site_packages()  # None: it was left half made, and will be completed
    return site is not None and site.parent.name != f"python{sys.version_info.major}.{sys.version_info.minor}"


def _torch() -> tuple[str, str]:
    """The requirement of torch, and the version that is pinned."""
    requirement = next(text for text in _project()["dependencies"] if re.match(r"torch\b", text))
    pin = re.search(r"^torch==([\w.]+)", Path("requirements/constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    if pin is None:
        raise InstallError("requirements/constraints.txt pins no torch; make it anew with scripts/update-constraints")
    return requirement, pin[1]


def _project() -> dict[str, list[str]]:
    project: dict[str, list[str]] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


# Doing


def _steps(plan: Plan, machine: Machine, requirement: str, version: str) -> Iterator[tuple[str, list[str]]]:
    """(label, command) of each step after the environment itself."""
    python, site = str(ENVIRONMENT / "bin/python"), _site_packages()
    if site is None or not any(site.glob("uv-*.dist-info")):
        yield "uv", [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV_REQUIREMENT]
    install = [str(ENVIRONMENT / "bin/uv"), "pip", "install", "--python", python]
    install += [] if sys.stderr.isatty() else ["--quiet"]  # its bars are for people
    install += ["--constraints", "requirements/constraints.txt"]
    origin = (machine.local_torch or machine.cpu_index) if plan.torch is TorchBuild.CPU else "the default index"
    name = f"{version}+cpu" if plan.torch is TorchBuild.CPU else version
    arguments = torch_step(plan, machine, requirement=requirement, version=version)
    yield f"torch {name} from {without_passwords(origin)}", install + arguments
    yield "grpo-async and the rest", install + package_step(plan)


def _make_environment(reason_to_rebuild: str | None, unfinished: Stamp) -> None:
    if reason_to_rebuild is not None:
        _say(f"making .venv anew: {reason_to_rebuild}")
        shutil.rmtree(ENVIRONMENT)
    ENVIRONMENT.mkdir(exist_ok=True)
    unfinished.write()  # first of all, so that what an interruption leaves is known to be ours
    if (ENVIRONMENT / "bin/pip").exists() or (ENVIRONMENT / "bin/uv").exists():
        return
    # Not sys.executable: that may be the environment's own, which was just removed.
    base = getattr(sys, "_base_executable", None) or sys.executable
    command = [base, "-m", "venv", str(ENVIRONMENT)]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=_VENV_TIMEOUT_S)
    except subprocess.SubprocessError as error:
        output = f"{getattr(error, 'stdout', '')}{getattr(error, 'stderr', '')}".strip()[-1000:]
        raise InstallError(f"{error}:\n{output}") from error


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """One installation at a time in this checkout; the lock is on its folder and ends with this process."""
    folder = os.open(CHECKOUT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another installation in this checkout")
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


# Telling


def _say(line: str) -> None:
    print(f"bootstrap: {line}", flush=True)


def without_passwords(text: str) -> str:
    """An index address may carry a user and password; the terminal need not."""
    return re.sub(r"(\w+://)[^/@\s]+@", r"\1***@", text)


def _listed(features: frozenset[str]) -> str:
    return "with " + ", ".join(sorted(features)) if features else "base"


def _free_gb() -> float:
    return shutil.disk_usage(CHECKOUT).free / 1e9


def _print_plan(
    plan: Plan, machine: Machine, uv: dict[str, str], reason_to_rebuild: str | None, steps: list[tuple[str, list[str]]]
) -> None:
    rows = [
        ("python", f"{sys.version.split()[0]} ({sys.executable})"),
        ("machine", f"{machine.system} {machine.architecture}, {machine.gpu or 'no GPU'}"),
        ("torch", plan.torch),
        ("engine", plan.engine),
        ("features", ", ".join(sorted(plan.features))),
        ("disk", f"{plan.needs_gb} GB needed, {_free_gb():.0f} GB free"),
        ("from pip", ", ".join(f"{name}={value}" for name, value in sorted(uv.items())) or "nothing"),
        *([("rebuild", reason_to_rebuild)] if reason_to_rebuild else []),
        *(("note", note) for note in plan.notes),
        *(("run", f"{shlex.join(command)}    # {label}") for label, command in steps),
    ]
    for name, value in rows:
        print(f"{name:<9} {without_passwords(value)}")


if __name__ == "__main__":
    sys.exit(main())
