"""What holds of the repository as a whole: every requirement has a test, examples load, light packages are light, scripts fetch
safely."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_async.config.loader import load_config

ROOT = Path(__file__).parents[1]
NUMBER_OF_ITEMS = {1: 15, 2: 8, 3: 5, 4: 7, 5: 5, 6: 8}
"""R1 asynchronous training, R2 records, R3 the end of an environment, R4 custom rollout functions, R5 sources without an engine,
R6 staleness and robustness: section -> number of its items."""
LIGHT = (
    "__main__", "buffer", "cli", "config", "data", "display", "envs", "errors", "findings", "processes", "records", "rewards",
    "run_directory", "scoring", "store", "tools", "tracking", "user_code", "utils", "viewer",
)  # fmt: skip
"""What runs beside the trainer starts without loading torch."""
_IMPORT = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    loaded = [name for name in ("torch", "transformers", "vllm", "datasets") if name in sys.modules]
    if loaded:
        sys.exit(f"{module} loads {', '.join(loaded)}: import it inside the function that needs it")
"""


def _requirements_of(file: Path) -> Iterator[str]:
    """The items that docstrings of test functions name; what a test holds is proved by breaking the code."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield from re.findall(r"\bR\d+\.\d+\b", ast.get_docstring(node) or "")


def test_every_requirement_is_named_by_a_test_and_no_other_is() -> None:
    items = {f"R{section}.{item}" for section, count in NUMBER_OF_ITEMS.items() for item in range(1, count + 1)}
    assert {item for file in (ROOT / "tests").rglob("test_*.py") for item in _requirements_of(file)} == items


@pytest.mark.parametrize(
    "file",
    [*sorted((ROOT / "configs").rglob("*.yaml")), *sorted((ROOT / "examples").rglob("*.yaml"))],
    ids=lambda file: file.name,
)
def test_an_example_loads_and_names_the_schema_for_the_editor(file: Path) -> None:
    load_config(file)
    first = file.read_text(encoding="utf-8").splitlines()[0]
    prefix = "# yaml-language-server: $schema="
    assert first.startswith(prefix)
    assert (file.parent / first.removeprefix(prefix).strip()).is_file()


def test_importing_a_light_package_loads_no_heavy_library() -> None:
    files = [file.relative_to(ROOT).with_suffix("") for file in sorted((ROOT / "grpo_async").rglob("*.py"))]
    modules = [".".join(file.parts).removesuffix(".__init__") for file in files if file.parts[1] in LIGHT]
    assert len(modules) > 100  # all of them
    command = [sys.executable, "-c", _IMPORT, *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120.0, check=False)
    assert done.returncode == 0, done.stderr


def test_shell_scripts_fetch_over_https_with_certificates_checked() -> None:
    """What ruff's S rules cannot see."""
    texts = {file.name: file.read_text(encoding="utf-8") for file in (ROOT / "scripts").iterdir() if file.is_file()}
    assert len(texts) > 4
    for name, text in texts.items():
        for word in ("--insecure", "--no-check-certificate", "--trusted-host", "http://", "| sh", "| bash", "eval "):
            assert word not in text, f"{name}: {word}"


def test_what_needs_a_gpu_is_marked_and_does_not_look_for_one_itself() -> None:
    """`-m gpu` has every such test; tests/conftest.py skips them."""
    looks = re.compile(r"cuda\.is_available\(\)")
    files = [file for file in (ROOT / "tests").rglob("*.py") if looks.search(file.read_text(encoding="utf-8"))]
    assert files == [ROOT / "tests/conftest.py"]
