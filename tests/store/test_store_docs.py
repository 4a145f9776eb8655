"""The examples of docs/rollout-store.md run."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_async.records import GroupStatus
from grpo_async.store import RolloutStore
from grpo_async.store.export import export_rollouts
from grpo_async.store.query import parse_query
from tests.store.builders import (
    append,
    append_simple,
    build_group,
    build_rollout,
    build_sample,
    build_stats,
    build_tool_rollout,
)

TEXT = (Path(__file__).parents[2] / "docs" / "rollout-store.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/NAME and the exports that the examples name."""
    found = tmp_path_factory.mktemp("docs")
    folder = found / "runs" / "NAME" / "rollouts"
    with RolloutStore(folder) as store:
        for group_id in range(6):
            append_simple(store, group_id, step=1 + group_id // 2, rewards=(0.0, group_id % 3 / 2))
        append(store, build_group(9, [build_tool_rollout("9-0")]), [build_sample(9, build_tool_rollout("9-0"), 0.0)],
                     GroupStatus.TRAINED, 4)  # fmt: skip
        rollout = build_rollout("10-0")
        append(store, build_group(10, [rollout]), [build_sample(10, rollout, 1.0)], GroupStatus.TRAINED, 4,
                     stats={"10-0": build_stats(3)})  # fmt: skip
    for name in ("rollouts.parquet", "rollouts.jsonl"):
        export_rollouts(folder, found / name, "parquet" if name.endswith("parquet") else "jsonl", parse_query(""))
    return found


def test_the_examples_run_and_find_what_they_say(place: Path) -> None:
    printed = {}
    for example in EXAMPLES:
        library = example.split("\n", 1)[0].removeprefix("import ")
        if library in ("pandas", "polars") and importlib.util.find_spec(library) is None:
            continue
        done = subprocess.run(
            [sys.executable, "-c", example], cwd=place, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        printed[example] = done.stdout

    def output(part: str) -> str:
        (found,) = [text for example, text in printed.items() if part in example]
        return found

    calls = output("tool_calls[*]")
    assert "add" in calls
    assert '"a":1' in calls.replace(" ", "")
    assert "10-0" in output("difference")
    assert re.search(r"sometimes\W+4\b", output("'sometimes'"))
    assert "9-0 three" in output("json.loads")
    assert "note:" not in output("RolloutTable")
