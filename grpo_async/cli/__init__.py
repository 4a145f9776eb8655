"""The command line. Commands parse and print; what they do lives in the packages below, imported when a command runs.

Importing this package, and every `--help`, loads no torch, transformers, vllm or datasets.
"""

from grpo_async.cli.app import main

__all__ = ["main"]
