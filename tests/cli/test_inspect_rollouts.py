"""`inspect-rollouts` from the outside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from grpo_async.cli.app import app
from grpo_async.records import GroupStatus
from grpo_async.store import RolloutStore
from tests.store.builders import append_simple, new_store


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutStore]:
    """A run `demo` of three groups, still open: the viewer works while the run writes."""
    monkeypatch.chdir(tmp_path)
    with new_store(Path("runs/demo")) as store:
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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [2, 1, 0]),
        (["--step", "2"], [1]),
        (["--step", "2.."], [2, 1]),
        (["--status", "trained"], [1, 0]),
        (["--min-reward", "0.2"], [1, 0]),
        (["--max-reward", "0.5", "--finished"], [0]),
        (["--truncated"], [2]),
        (["--search", "SHEEP"], [1]),
        (["--sort", "reward"], [1, 0, 2]),
        (["--sort", "length", "--limit", "1"], [1]),
        (["--limit", "0"], [2, 1, 0]),
        (["--group", "0"], [0]),
        (["--search", "nowhere"], []),
    ],
)
def test_filters_and_order(store: RolloutStore, arguments: list[str], expected: list[int]) -> None:
    assert _groups(*arguments) == expected


def test_json_lines_hold_the_stored_row_and_its_figures(store: RolloutStore) -> None:
    (line,) = _invoke("demo", "--json", "--group", "0").stdout.splitlines()
    content = json.loads(line)
    assert content["summary"] == {
        "num_rollouts": 2, "reward_mean": 0.25, "reward_min": 0.0, "reward_max": 0.5, "mean_length": 3.0,
        "versions": [0, 0], "truncated_share": 0.0,
    }  # fmt: skip
    assert content["rollouts"][1]["completion_ids"] == [5, 6, 7]
    (line,) = _invoke("demo", "--json", "--rollout", "0-1").stdout.splitlines()
    rollout = json.loads(line)
    assert (rollout["group_id"], rollout["step"], rollout["rollout_id"], rollout["reward"]) == (0, 1, "0-1", 0.5)


def test_a_group_and_a_rollout_have_their_pages(store: RolloutStore) -> None:
    group = _invoke("demo", "--group", "0")
    assert group.exit_code == 0
    assert "0-0" in group.stdout
    assert "0-1" in group.stdout
    rollout = _invoke("demo", "--rollout", "0-1")
    assert rollout.exit_code == 0
    assert "token texts are left out" in rollout.stdout
    assert rollout.stdout.splitlines()[-2].split() == ["2", "7", "1", "-0.2500", "0"]


def test_the_viewer_follows_a_run_that_writes(store: RolloutStore) -> None:
    append_simple(store, 3, step=4)
    with Path("runs/demo/rollouts/part-00000.jsonl").open("ab") as file:
        file.write(b'{"schema":1,"group_')  # another line, half written
    assert _groups() == [3, 2, 1, 0]


def test_a_limit_cuts_the_table_and_says_so(store: RolloutStore) -> None:
    for group_id in range(3, 50):
        append_simple(store, group_id)
    assert "40 of 50 matching groups, 50 in the run" in _invoke("demo").stdout
    assert "50 of 50 matching groups" in _invoke("demo", "--limit", "0").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["dmeo"], 2, "there is no run 'dmeo'; did you mean 'demo'?"),
        (["demo", "--step", "x"], 2, "--step x: write a step (12), or a range (10..20, 10.., ..20)"),
        (["demo", "--status", "odd"], 2, "--status odd: 'odd' is not a status; the statuses are"),
        (["demo", "--group", "99"], 2, "runs/demo has no group 99 among its 3 groups"),
        (
            ["demo", "--rollout", "99"],
            2,
            "runs/demo has no rollout '99' (they are named like g17-r3: the fourth of group 17) among its 3 groups",
        ),
        (["demo", "--rollout", "99", "--json"], 2, "runs/demo has no rollout '99'"),
        (["demo", "--group", "99", "--json"], 2, "runs/demo has no group 99"),
        (["demo", "--group", "0", "--status", "stale"], 2, "has no group 0 that the other options let through"),
        (["demo", "--group", "0", "--rollout", "0-1"], 2, "choose one of --group and --rollout"),
        (["demo", "--sort", "age"], 2, "'age' is not one of"),
    ],
)
def test_mistakes_are_explained(store: RolloutStore, arguments: list[str], code: int, message: str) -> None:
    result = _invoke(*arguments)
    assert result.exit_code == code
    assert message in " ".join(result.stderr.split())


def test_a_run_without_rollouts_says_so(store: RolloutStore) -> None:
    Path("runs/fresh").mkdir()
    result = _invoke("fresh")
    assert result.exit_code == 1
    assert result.stderr.startswith("runs/fresh has no rollouts yet")


def test_a_damaged_store_is_a_message_with_file_and_line(store: RolloutStore) -> None:
    with Path("runs/demo/rollouts/part-00000.jsonl").open("ab") as file:
        file.write(b"not json\n")
    result = _invoke("demo")
    assert result.exit_code == 1
    assert "runs/demo/rollouts/part-00000.jsonl:4: the line is damaged" in result.stderr
