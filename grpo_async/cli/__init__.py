"""The command line. Commands parse and print; what they do lives in the packages below, imported when a command runs.

Importing this package, and every `--help`, loads no torch, transformers, vllm or datasets.
"""

from __future__ import annotations


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit. Ctrl-C ends it quietly, also while the commands are imported."""
    try:
        from grpo_async.cli.app import main as run

        run(arguments)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


__all__ = ["main"]
