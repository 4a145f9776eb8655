"""What .venv holds: written before an installation as unfinished, and after it as finished."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.install.plan import TorchBuild

_NAME = "grpo-async-install.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """`inputs` is a digest of the files that say what to install; `checkout` is where the environment was made, because
    an editable install and the scripts in bin/ hold that path."""

    finished: bool
    checkout: str
    inputs: str
    torch: TorchBuild
    features: frozenset[str]

    def write(self, environment: Path) -> None:
        content = {name: getattr(self, name) for name in ("finished", "checkout", "inputs", "torch")}
        temporary = environment / f".{_NAME}"
        temporary.write_text(
            json.dumps(content | {"features": sorted(self.features)}, indent=1) + "\n", encoding="utf-8"
        )
        temporary.replace(environment / _NAME)


def read_stamp(environment: Path) -> Stamp | None:
    """The stamp of `environment`; None if there is none, or one that a different version of this script wrote."""
    try:
        content = json.loads((environment / _NAME).read_text(encoding="utf-8"))
        return Stamp(
            finished=content["finished"],
            checkout=content["checkout"],
            inputs=content["inputs"],
            torch=TorchBuild(content["torch"]),
            features=frozenset(content["features"]),
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def digest(checkout: Path) -> str:
    """Digest of every file that decides what is installed."""
    files = [checkout / "pyproject.toml", *sorted((checkout / "requirements").glob("*.txt"))]
    files += sorted((checkout / "scripts/install").glob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def site_packages(environment: Path) -> Path | None:
    """The environment's site-packages folder, or None."""
    return next(iter(sorted(environment.glob("lib/python3.*/site-packages"))), None)


def missing_packages(environment: Path, features: Sequence[str] | frozenset[str]) -> list[str]:
    """Main packages that `features` ask for and that somebody removed since; looks at folder names only."""
    wanted = ["torch", "transformers", "grpo_async", "uv"]
    wanted += ["pytest", "mypy", "ruff"] if "tests" in features else []
    wanted += ["vllm*"] if "vllm" in features else []
    site = site_packages(environment)
    return [name for name in wanted if site is None or not any(site.glob(f"{name}-*.dist-info"))]
