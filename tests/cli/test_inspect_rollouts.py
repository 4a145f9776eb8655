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
    result = _invoke("demo")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[1] for line in lines[1:4]] == ["2", "1", "0"]
    assert lines[4] == ["3", "of", "3", "matching", "groups,", "3", "in", "the", "run"]
    assert "\x1b" not in result.stdout  # into a pipe: no colors, no screen


def test_inspect_and_web_open_all_runs_one_or_several(
    store: RolloutStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], dict[str, Any]]] = []

    def serve(runs: Sequence[RunDir], **options: Any) -> None:
        asked.append(([run.root.name for run in runs], options))

    monkeypatch.setattr("grpo_async.viewer.web.serve.serve", serve)
    RunDir(tmp_path / "elsewhere" / "other").create("{}")
    Path("runs/no-run-yet").mkdir()
    long = " or ".join(f"reward={number}" for number in range(40))  # no file has so long a name
    wanted: dict[tuple[str, ...], tuple[list[str], str | None, str]] = {
        (): ([], "runs", ""),
        ("demo",): (["demo"], None, ""),
        ("demo", "elsewhere/other", "reward<1"): (["demo", "other"], None, "reward<1"),
        ("elsewhere",): ([], "elsewhere", ""),
        ("demo", long): (["demo"], None, long),
        ("no-run-yet",): (["no-run-yet"], None, ""),
    }
    plain = {"host": "127.0.0.1", "port": None, "open_browser": True, "sort": None}
    chosen = {"host": "::1", "port": 7000, "open_browser": False, "sort": "-reward,step"}
    options = ["--no-browser", "--host", "::1", "--port", "7000", "--sort", "reward,step:asc"]
    for arguments, (names, folder, query) in wanted.items():
        where = {"folder": None if folder is None else Path(folder), "query": parse_query(query)}
        for command, more, expected in ((["inspect"], [], plain), (["inspect-rollouts", "--web"], options, chosen)):
            result = CliRunner().invoke(app, [*command, *arguments, *more])
            assert result.exit_code == 0, result.output
            assert asked.pop() == (names, {**where, **expected})
    assert "there is no run 'dmeo'; did you mean 'demo'" in CliRunner().invoke(app, ["inspect", "dmeo"]).output
    assert "Missing argument 'RUN" in CliRunner().invoke(app, ["inspect-rollouts"]).output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [2, 1, 0]),
        (["--sort", "reward"], [1, 0, 2]),
        (["--sort", "length", "--limit", "1"], [1]),
        (["--limit", "0"], [2, 1, 0]),
        (["--group", "0"], [0]),
        (["text ilike '%nowhere%'"], []),
        (["--sort", "length:asc"], [2, 0, 1]),  # of equals the newest first
        (["reward<0.2 and not truncated"], [0]),
        (["(truncated or text ilike '%SHEEP%') and step=2"], [1]),
    ],
)
def test_filters_and_order(store: RolloutStore, arguments: list[str], expected: list[int]) -> None:
    assert _groups(*arguments) == expected


def test_json_lines_hold_the_stored_row_and_its_statistics(store: RolloutStore) -> None:
    (line,) = _invoke("demo", "--json", "--group", "0").stdout.splitlines()
    content = json.loads(line)
    expected = {
        "group_id": 0, "size": 2, "num_matching": 2, "reward_mean": 0.25, "reward_min": 0.0, "reward_max": 0.5,
        "num_tokens_mean": 3.0, "version_min": 0, "version_max": 0, "num_truncated": 0, "superseded": False,
    }  # fmt: skip
    assert {name: content["summary"][name] for name in expected} == expected
    assert content["rollouts"][1]["completion_ids"] == [5, 6, 7]
    (line,) = _invoke("demo", "--json", "--rollout", "0-1").stdout.splitlines()
    rollout = json.loads(line)
    assert (rollout["group_id"], rollout["step"], rollout["rollout_id"], rollout["reward"]) == (0, 1, "0-1", 0.5)
    assert rollout["group_status"] == "trained"
    (line,) = _invoke("demo", "reward=0.5", "--json").stdout.splitlines()
    content = json.loads(line)
    assert content["summary"]["num_matching"] == 1
    assert len(content["rollouts"]) == 2  # the whole group all the same


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dmeo"], "there is no run 'dmeo'; did you mean 'demo'?"),
        (["demo", "--group", "99"], "there is no group 99 in runs/demo/rollouts"),
        (
            ["demo", "--rollout", "99"],
            "there is no rollout 99 in runs/demo/rollouts. Rollouts are named like g17-r3, the fourth of group 17",
        ),
        (["demo", "--group", "0", "--rollout", "0-1"], "--group shows only one; leave out --rollout"),
        (["demo", "--sort", "length,ength"], "--sort length,ength: there is nothing to sort by that is called 'ength'"),
        (["runs", "--web", "--evaluation", "5"], "for --evaluation: name the run that was evaluated"),
        (["demo", "reward<0.2 adn truncated"], "in the query: reward<0.2 adn truncated"),
        (["demo", "reward<1", "and", "stale"], "put it into quotes, 'reward<1 and stale'"),
        (["demo", "dmeo", "--web"], "'dmeo' is neither a run nor a query"),
        (["demo", "--web", "--json"], "No such option: --json"),
    ],
)
def test_mistakes_are_explained(
    store: RolloutStore, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("grpo_async.viewer.web.serve.serve", lambda *_, **__: pytest.fail("the inspector was started"))
    result = _invoke(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
