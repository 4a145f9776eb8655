"""The runs that the tests of the page look at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.viewer.web.serving import Inspector, serving, write_hostile_run, write_stored_run


@pytest.fixture(scope="package")
def inspector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inspector]:
    """`one`: 4 steps of 3 groups of 4 rollouts each; `long`: 30 steps of 5 groups; `hostile`."""
    folder = tmp_path_factory.mktemp("runs")
    runs = (
        write_stored_run(folder / "one"),
        write_stored_run(folder / "long", num_steps=30, groups_a_step=5),
        write_hostile_run(folder / "hostile"),
    )
    with serving(*runs) as running:
        yield running
