"""`inspect-rollouts` from the outside."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from grpo_async.cli.app import app
from grpo_async.records import GroupStatus
from grpo_async.run_directory import RunDir
from grpo_async.store import RolloutStore
from grpo_async.store.query import parse_query
from tests.store.builders import append_simple
from tests.support.stored import LineStore


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutStore]:
    """A run `demo` of three groups, still open: the viewer works while the run writes."""
    monkeypatch.chdir(tmp_path)
    with LineStore(Path("runs/demo/rollouts")) as store:
        append_simple(store, 0, step=1, rewards=(0.0, 0.5), text="what is 1 + 1?")
        append_simple(store, 1, step=2, rewards=(1.0, 1.0), text="count sheep", num_tokens=9)
        append_simple(store, 2, step=3, rewards=(0.0, 0.0), status=GroupStatus.STALE, truncated=True)
        yield store


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["inspect-rollouts", *arguments])


def _groups(*arguments: str) -> list[int]:
    result = _invoke("demo", "--json", *arguments)
    assert result.exit_code == 0, result.output
    return [json.loads(line)["group_id"] for line in result.stdout.splitlines()]


def test_the_table_lists_the_newest_groups_first(store: RolloutStore) -> None:
    lines = [line.split() for line in _invoke("demo").stdout.splitlines()]
    assert [line[1] for line in lines[1:4]] == ["2", "1", "0"]


def test_inspect_and_web_open_all_runs_one_or_several(
    store: RolloutStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], dict[str, Any]]] = []

    def serve(runs: Sequence[RunDir], **options: Any) -> None:
        asked.append(([run.root.name for run in runs], options))

    monkeypatch.setattr("grpo_async.viewer.web.serve.serve", serve)
    RunDir(tmp_path / "elsewhere" / "other").create("{}")
    long = " or ".join(f"reward={number}" for number in range(40))  # no file has so long a name
    wanted: dict[tuple[str, ...], tuple[list[str], str | None, str]] = {
        (): ([], "runs", ""),
        ("demo", "elsewhere/other", "reward<1"): (["demo", "other"], None, "reward<1"),
        ("demo", long): (["demo"], None, long),
    }
    for arguments, (names, folder, query) in wanted.items():
        where = {"folder": None if folder is None else Path(folder), "query": parse_query(query)}
        for command in (["inspect"], ["inspect-rollouts", "--web", "--port", "7000", "--sort", "reward,step:asc"]):
            result = CliRunner().invoke(app, [*command, *arguments])
            assert result.exit_code == 0, result.output
            found, options = asked.pop()
            assert (found, options["host"]) == (names, "127.0.0.1")
            assert where.items() <= options.items()
    assert (options["port"], options["sort"]) == (7000, "-reward,step")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [2, 1, 0]),
        (["--sort", "reward"], [1, 0, 2]),
        (["--sort", "length", "--limit", "1"], [1]),
        (["--group", "0"], [0]),
        (["reward<0.2 and not truncated"], [0]),
        (["(truncated or text ilike '%SHEEP%') and step=2"], [1]),
    ],
)
def test_filters_and_order(store: RolloutStore, arguments: list[str], expected: list[int]) -> None:
    assert _groups(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dmeo"], "there is no run 'dmeo'; did you mean 'demo'?"),
        (["demo", "--group", "99"], "there is no group 99 in runs/demo/rollouts"),
        (["demo", "reward<0.2 adn truncated"], "in the query: reward<0.2 adn truncated"),
        (["demo", "reward<1", "and", "stale"], "put it into quotes, 'reward<1 and stale'"),
    ],
)
def test_mistakes_are_explained(
    store: RolloutStore, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("grpo_async.viewer.web.serve.serve", lambda *_, **__: pytest.fail("the inspector was started"))
    result = _invoke(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
