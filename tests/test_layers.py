"""The layer table, held by walking every import statement: also those inside functions and under TYPE_CHECKING."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "grpo_async"

# The highest first. An import goes down or stays inside its package; packages of one layer do not import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("launch",),
    ("rollout", "training", "viewer", "quickstart"),
    ("scoring", "servers", "envs"),
    ("data", "chat", "tools", "rewards", "inference", "buffer", "batching", "weights", "tracking", "store"),
    ("records", "config", "rundir", "sandbox"),
    ("references", "threads", "calls", "processes", "retry", "run_state", "timeline"),
    ("errors", "loopback", "growing_file", "timeline_file"),  # below everything: the config loader raises ConfigError
)
LAYER = {name: -depth for depth, layer in enumerate(LAYERS) for name in layer}

# Importing one of these, and whatever it imports in turn, must not load torch: they run in the launcher, the command
# line and the viewer, or their records do.
WITHOUT_TORCH = (
    ("__main__", "cli", "viewer", "scoring", "data", "tools", "envs", "rewards", "store", "buffer", "tracking")
    + LAYERS[-3]
    + LAYERS[-2]
    + LAYERS[-1]
)
HEAVY = ("torch", "transformers", "vllm", "datasets")


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import statement: the dotted name, and whether it runs when the module is imported."""

    target: str
    line: int
    at_import: bool


def imports_of(source: str) -> Iterator[Import]:
    """Every import of a module; `from a import b` counts as a.b, since b may be a module."""

    def walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(target=name.name, line=node.lineno, at_import=at_import) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the whole name"
            for name in node.names:
                yield Import(target=f"{node.module}.{name.name}", line=node.lineno, at_import=at_import)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.body:
                yield from walk(statement, False)
            for statement in node.orelse:
                yield from walk(statement, at_import)
        else:
            inside = at_import and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from walk(child, inside)

    return walk(ast.parse(source), True)


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the package."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()
IMPORTS = {name: list(imports_of(file.read_text(encoding="utf-8"))) for name, file in MODULES.items()}


def where(module: str, line: int) -> str:
    return f"{MODULES[module].relative_to(ROOT)}:{line}"


def package_of(module: str) -> str | None:
    """`grpo_async.weights.gloo` -> "weights"; None for grpo_async itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def as_module(target: str) -> str | None:
    """The module of ours that importing `target` loads, or None: grpo_async.errors.ConfigError -> grpo_async.errors."""
    while target not in MODULES:
        target, dot, _ = target.rpartition(".")
        if not dot:
            return None
    return target


def loaded_by(start: str) -> dict[str, str]:
    """Everything that importing the module `start` loads, each with the chain of imports that leads to it."""
    chains = {start: start}
    queue = [start]
    while queue:
        module = queue.pop()
        parents = [module.rpartition(".")[0]] if "." in module else []  # a package's __init__ runs before its modules
        targets = [found.target for found in IMPORTS[module] if found.at_import] + parents
        for target in targets:
            name = as_module(target) or target
            if name not in chains:
                chains[name] = f"{chains[module]} -> {name}"
                if name in MODULES:
                    queue.append(name)
    return chains


def is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_every_package_has_a_layer() -> None:
    packages = {package for name in MODULES if (package := package_of(name)) is not None}
    assert packages - LAYER.keys() == set(), "put them into LAYERS of tests/test_layers.py"


def test_imports_go_down_only() -> None:
    wrong = []
    for module, found in IMPORTS.items():
        package = package_of(module)
        for statement in found:
            target = as_module(statement.target)
            other = None if target is None else package_of(target)
            if other is None or other == package:
                continue
            if package is None or LAYER[other] >= LAYER[package]:
                wrong.append(f"{where(module, statement.line)}: {package or 'grpo_async'} must not import {other}")
    assert not wrong, "\n".join(wrong)


def test_vllm_is_imported_in_its_server_only() -> None:
    wrong = [
        where(module, statement.line)
        for module, found in IMPORTS.items()
        for statement in found
        if is_below(statement.target, "vllm") and not is_below(module, "grpo_async.servers.vllm")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_importing_a_light_package_loads_no_heavy_library(package: str) -> None:
    starts = [name for name in MODULES if is_below(name, f"grpo_async.{package}")]
    heavy = [
        chain for start in starts for name, chain in loaded_by(start).items() for root in HEAVY if is_below(name, root)
    ]
    assert not heavy, "import these inside the function that needs them:\n" + "\n".join(sorted(set(heavy)))


def test_textual_is_loaded_by_the_screens_of_the_inspector_only() -> None:
    screens = "grpo_async.viewer.terminal"
    wrong = [
        chain
        for start in MODULES
        if not is_below(start, screens)
        for name, chain in loaded_by(start).items()
        if is_below(name, "textual") or is_below(name, screens)
    ]
    assert not wrong, "import the screens inside the function that shows them:\n" + "\n".join(sorted(set(wrong)))


def test_the_walk_sees_imports_in_functions_and_under_type_checking() -> None:
    source = """
import torch.nn as nn
if TYPE_CHECKING:
    from grpo_async.cli import main
class A:
    import b
def f():
    from grpo_async import launch
"""
    assert [(found.target, found.at_import) for found in imports_of(source)] == [
        ("torch.nn", True),
        ("grpo_async.cli.main", False),
        ("b", True),
        ("grpo_async.launch", False),
    ]
