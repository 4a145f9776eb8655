"""Where configs/ and docs/ are: a wheel has them inside the package, a checkout next to it."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def shipped(name: str) -> Path:
    """Path of `name` ("configs/quickstart.yaml"), relative where it is below the working directory; need not exist."""
    inside = _PACKAGE / name
    path = inside if inside.exists() else _PACKAGE.parent / name
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
