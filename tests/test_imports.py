"""What runs beside the trainer (launcher, command line, viewer, sources, rewards, records) starts without loading torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIGHT = (
    "__main__", "buffer", "cli", "config", "data", "display", "envs", "errors", "findings", "processes", "records", "rewards",
    "run_directory", "scoring", "store", "tools", "tracking", "user_code", "utils", "viewer",
)  # fmt: skip
HEAVY = ("torch", "transformers", "vllm", "datasets")
_IMPORT = """
import importlib, sys
for module in sys.argv[2:]:
    importlib.import_module(module)
    loaded = [name for name in sys.argv[1].split() if name in sys.modules]
    if loaded:
        sys.exit(f"{module} loads {', '.join(loaded)}: import it inside the function that needs it")
"""


def test_importing_a_light_package_loads_no_heavy_library() -> None:
    files = [file.relative_to(ROOT).with_suffix("") for file in sorted((ROOT / "grpo_async").rglob("*.py"))]
    modules = [".".join(file.parts).removesuffix(".__init__") for file in files if file.parts[1] in LIGHT]
    assert len(modules) > 100  # all of them
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT, " ".join(HEAVY), *modules],
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr
