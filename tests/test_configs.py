"""Every example configuration loads, and tells the editor its schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_async.config.loader import load_config

CONFIGS = sorted((Path(__file__).parents[1] / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_an_example_loads_and_names_the_schema_for_the_editor(file: Path) -> None:
    load_config(file)
    first = file.read_text(encoding="utf-8").splitlines()[0]
    prefix = "# yaml-language-server: $schema="
    assert first.startswith(prefix)
    assert (file.parent / first.removeprefix(prefix).strip()).is_file()
