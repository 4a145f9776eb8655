"""Which extra of this package brings an optional library, and what is said where it is missing."""

from __future__ import annotations

EXTRAS = {
    "bitsandbytes": "qlora",
    "datasets": "hub",
    "math_verify": "math",
    "openai": "agents",
    "pandas": "pandas",
    "peft": "lora",
    "pyarrow": "parquet",
    "ray": "ray",
    "tensorboardX": "tensorboard",
    "verifiers": "verifiers",
    "wandb": "wandb",
}
"""Module -> extra."""


def needs(module: str) -> str:
    """For messages: "needs the package peft, which is not installed: pip install 'grpo-async[lora]'"."""
    return f"needs the package {module}, which is not installed: pip install 'grpo-async[{EXTRAS[module]}]'"
