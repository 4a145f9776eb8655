"""What is said where an optional library is missing."""

from __future__ import annotations

import tomllib
from pathlib import Path

from grpo_async.utils.extras import EXTRAS, needs


def test_every_extra_that_a_message_names_is_one_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(EXTRAS.values()) <= set(project["optional-dependencies"])
    assert needs("peft") == "needs the package peft, which is not installed: pip install 'grpo-async[lora]'"
