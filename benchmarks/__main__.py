"""`python -m benchmarks [NAME [OPTIONS]]`: without a name the list of benchmarks."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
NOT_BENCHMARKS = {"__init__", "__main__", "report"}


def names() -> dict[str, str]:
    """Benchmark -> the first line of its docstring."""
    found = {}
    for file in sorted(FOLDER.glob("*.py")):
        if file.stem not in NOT_BENCHMARKS and not file.stem.startswith("_"):
            found[file.stem] = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
    return found


def main(arguments: list[str]) -> int:
    benchmarks = names()
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, benchmarks))
        print("python -m benchmarks NAME [--help | OPTIONS]\n")
        print("\n".join(f"  {name:<{width}}  {about}" for name, about in benchmarks.items()))
        return 0
    if arguments[0] not in benchmarks:
        print(f"there is no benchmark {arguments[0]!r}; there are: {', '.join(benchmarks)}", file=sys.stderr)
        return 2
    run = importlib.import_module(f"benchmarks.{arguments[0]}").main
    code: int = run(arguments[1:])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
