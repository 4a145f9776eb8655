"""The Python of the how-to pages is what it says: a reward, a tool, an environment and a rollout function, usable as they stand."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from grpo_async.config.sections import EnvironmentSection, RewardSection, ToolSection
from grpo_async.envs import load_environments
from grpo_async.rewards import load_rewards
from grpo_async.tools import load_tools
from grpo_async.user_code.references import resolve_function

HOWTO = Path(__file__).parents[2] / "docs" / "howto"


def test_the_code_of_the_pages_loads_in_every_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [(HOWTO / name).read_text(encoding="utf-8") for name in ("reward.md", "tools.md", "environment.md")]
    blocks = [block for page in pages for block in re.findall(r"```python\n# mine.py(.*?)```", page, flags=re.S)]
    (tmp_path / "mine.py").write_text("\n".join("# " + block for block in blocks), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        (reward,) = load_rewards([RewardSection(function="mine:exact_answer")])
        assert reward.missing_inputs(["answer"]) is None
        tools = load_tools([ToolSection(function="mine:multiply")])
        assert [tool.name for tool in tools] == ["multiply"]
        environments = load_environments({"counter": EnvironmentSection(factory="mine:Counter")}, tools)
        (pool,) = environments.pools.values()
        assert [schema["function"]["name"] for schema in pool.schemas] == ["multiply", "add"]
        assert environments.reward_weights == {"Counter": 1.0}
        pool.discard_free()
        assert callable(resolve_function("mine:rollout_func", "rollout_function.function"))
    finally:
        sys.modules.pop("mine", None)
