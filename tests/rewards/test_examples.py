"""The examples of docs/howto/reward.md, as they stand there."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_async.config.sections import GeneratorSource
from grpo_async.data import load_rows
from tests.rewards.helpers import loaded, score
from tests.rewards.reward_server import reward_server

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "reward.md"


@pytest.fixture
def write_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def write(name: str, *replaced: str) -> None:
        (code,) = re.findall(rf"```python\n(# {name}\.py.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
        (tmp_path / f"{name}.py").write_text(code.replace(*replaced) if replaced else code, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


def test_a_judge_over_http_is_asked_for_a_whole_group(write_example: Any) -> None:
    with reward_server() as server:
        server.otherwise = lambda body: {"rewards": [float(len(text)) for text in body["completions"]]}
        write_example("judge", "http://judge:8000", server.url)
        with loaded("judge:score") as reward:
            assert asyncio.run(score(reward, ["a", "bb"])).values == [1.0, 2.0]
        assert server.bodies == [{"prompts": ["What is it?"] * 2, "completions": ["a", "bb"]}]


@pytest.mark.slow  # importing reasoning_gym takes seconds
def test_reasoning_gym_makes_the_rows_and_scores_the_answers(write_example: Any) -> None:
    pytest.importorskip("reasoning_gym")
    write_example("gym_task", "size=2000", "size=20")
    rows = load_rows(GeneratorSource(type="generator", function="gym_task:rows"))
    assert len(rows) == 20
    row = rows[3]
    with loaded("gym_task:score") as reward:
        completions = [f"<think>so</think> {row['answer']}", "<think>so</think> ?"]
        values = asyncio.run(score(reward, completions, columns={"index": [row["index"]] * 2})).values
    assert values == [1.0, 0.0]
