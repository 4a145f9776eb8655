"""The runs that the tests of the page look at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.viewer.web.serving import Inspector, serving, write_hostile_run, write_run


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inspector]:
    """`one` and `two`: 4 steps, the same prompts, other words; `long`: 30 steps; `hostile`."""
    folder = tmp_path_factory.mktemp("runs")
    runs = (
        write_run(folder / "one"),
        write_run(folder / "two", word="banana"),
        write_run(folder / "long", num_steps=30, groups_a_step=5),
        write_hostile_run(folder / "hostile"),
    )
    with serving(*runs) as running:
        yield running
