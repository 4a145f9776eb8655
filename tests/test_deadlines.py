"""What waits for another process has a deadline, and a missed deadline names a setting that exists.

Ruff's ASYNC rules see to it that nothing blocks an event loop, S113 that every HTTP request has a limit.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from grpo_async.config.keys import keys_at

ROOT = Path(__file__).parents[1]
SOURCES = {
    file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8")
    for file in sorted((ROOT / "grpo_async").rglob("*.py"))
}
NEED_A_TIMEOUT = re.compile(
    r"(subprocess\.(run|call|check_call|check_output)|dist\.(init_process_group|new_group|TCPStore)|\.(join|communicate))$"
)


def _without_timeout(source: str) -> list[int]:
    """Lines of calls that wait for another process or thread for as long as that likes."""
    tree = ast.parse(source)
    limited = {
        inner
        for block in ast.walk(tree)
        if isinstance(block, ast.AsyncWith) and "asyncio.timeout(" in ast.unparse(block.items[0])
        for inner in ast.walk(block)
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and node not in limited
        and NEED_A_TIMEOUT.search(ast.unparse(node.func))
        and not any(keyword.arg in (None, "timeout") for keyword in node.keywords)
        and not (ast.unparse(node.func).endswith(".join") and node.args)  # of texts; of a thread, with its limit
    ]


def test_calls_that_wait_for_a_process_have_a_timeout() -> None:
    assert _without_timeout("subprocess.run(['ls'])\nthread.join(5)\nthread.join()") == [1, 3]
    found = [f"{name}:{line}" for name, source in SOURCES.items() for line in _without_timeout(source)]
    assert not found, f"give each of these a `timeout`: {', '.join(found)}"


def _exists(path: str) -> bool:
    """Whether `training.queue_timeout_s`, `environments.*.timeout_s` is a setting; "*" stands for any key or index."""
    return any(keys_at(tuple(path.replace("*", each).split("."))) for each in ("0", "NAME"))


def test_every_deadline_names_a_setting_that_exists() -> None:
    """One that begins with a placeholder is made of the path of another: `{kind.setting}.timeout_s`."""
    written = {
        (name, re.sub(r"\{[^}]*\}", "*", path))
        for name, source in SOURCES.items()
        for path in re.findall(
            r'\b(?:deadline_|pause_)?setting=f?"([^"]+)"|^_?SETTING = "([^"]+)"', source, re.MULTILINE
        )
        for path in path
        if path
    }
    assert len(written) > 10
    assert [(name, path) for name, path in sorted(written) if path[0] != "*" and not _exists(path)] == []
