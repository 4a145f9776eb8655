"""The README and docs/: what they tell people to type is there, links lead somewhere, the reference is whole, the site is built."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from grpo_async.cli.app import app
from grpo_async.config.loader import load_config
from grpo_async.config.sections import EnvironmentSection, RewardSection, ToolSection
from grpo_async.envs import load_environments
from grpo_async.rewards import load_rewards
from grpo_async.store.query import parse_query
from grpo_async.tools import load_tools
from grpo_async.user_code.references import resolve_function
from scripts.reference import FOLDER, pages

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(set((ROOT / "docs").rglob("*.md")) - set(FOLDER.iterdir()))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_COMMAND = re.compile(
    r"(?:grpo-async |(?=inspect-rollouts))([a-z][a-z-]+)((?: +(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s`|#()>]+))*)"
)


def _commands() -> list[tuple[str, str, list[str]]]:
    found = []
    for page in PAGES:
        for match in _COMMAND.finditer(page.read_text(encoding="utf-8").replace("\\\n", " ")):
            found.append((page.name, match[1], shlex.split(match[2])))
    assert len(found) > 60
    return found


def test_the_reference_is_fresh() -> None:
    written = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.md") if file.stem != "events"}
    assert written == pages(), "run: python -m scripts.reference"
    assert not any("<bound method" in text for text in written.values())


def test_the_readme_is_short_and_its_config_loads(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) < 1200
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    (tmp_path / "config.yaml").write_text(block, encoding="utf-8")
    assert load_config(tmp_path / "config.yaml").rollout.max_staleness == 1


def _anchors(page: Path) -> set[str]:
    """As GitHub and the site make them of titles."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *sorted(FOLDER.glob("*.md"))], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    named = set(re.findall(r"^\[([^\]]+)\]: ", text, re.M))
    assert set(re.findall(r"\]\[([\w-]+)\]", text)) == named
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", text)):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_what_the_pages_name_of_the_repository_is_there() -> None:
    for page in PAGES:
        for name in re.findall(
            r"`((?:tests|configs|scripts|benchmarks|grpo_async)/[\w/.-]+)`", page.read_text(encoding="utf-8")
        ):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_shellcheck_has_nothing_to_say_of_the_batch_script(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "slurm.md").read_text(encoding="utf-8")
    script = tmp_path / "run.sbatch"
    script.write_text(page.partition("```bash\n")[2].partition("```")[0])
    checker = Path(sys.executable).with_name("shellcheck")
    subprocess.run([checker, "--shell=bash", script], check=True, timeout=60.0)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """--strict: a link, an anchor or a page that is missing from the navigation is an error (none is counted with --quiet)."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|link)[^>]+(?:src|href)=\"?(https?://[^\"\s>]+)", page.read_text(encoding="utf-8")
        )
        assert not loaded, f"{page}: the site loads {loaded}"


@pytest.mark.parametrize(("page", "name", "arguments"), _commands(), ids=lambda value: str(value)[:60])
def test_a_command_of_the_pages_is_there_with_its_options(page: str, name: str, arguments: list[str]) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert name in commands, f"{page}: grpo-async {name}"
    command = commands[name]
    if hasattr(command, "commands"):
        command = command.commands[arguments[0]]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help"
    }
    for argument in arguments:
        if argument.startswith("--"):
            assert argument.partition("=")[0] in known, f"{page}: grpo-async {name} {argument}"


@pytest.mark.parametrize(
    ("page", "query"),
    [
        (page, arguments[1])
        for page, name, arguments in _commands()
        if name == "inspect-rollouts"
        and len(arguments) > 1
        and not arguments[1].startswith("-")
        and "QUERY" not in arguments[1]
    ],
)
def test_a_query_of_the_pages_can_be_parsed(page: str, query: str) -> None:
    parse_query(query)


def test_the_files_that_the_architecture_names_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b[a-z_]+/[a-z_/]+\.py\b", page))
    assert len(named) > 15
    missing = [name for name in named if not any((base / name).exists() for base in (ROOT, ROOT / "grpo_async"))]
    assert not missing
    for function, file in re.findall(r"`(\w+(?:\.\w+)?)`[^`]{0,30} in\s+`([\w/]+\.py)`", page):
        name = function.rpartition(".")[2]
        text = (ROOT / "grpo_async" / file).read_text(encoding="utf-8")
        assert re.search(rf"^ *(?:async )?(?:def|class) {name}\b", text, re.M), f"{function} in {file}"
    folders = {each.name for each in (ROOT / "grpo_async").iterdir() if (each / "__init__.py").exists()}
    assert not [name for name in folders if f"\n  {name}/ " not in page]


def test_the_code_of_the_pages_loads_in_every_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [
        (ROOT / "docs" / "howto" / name).read_text(encoding="utf-8")
        for name in ("reward.md", "tools.md", "environment.md")
    ]
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


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("trainer/grpo_config.py", "GRPOConfig"),
        ("experimental/async_grpo/async_grpo_config.py", "AsyncGRPOConfig"),
        ("trainer/base_config.py", "_BaseConfig"),
    ],
)
def test_the_page_for_users_of_trl_names_every_field_of_its_config(file: str, name: str) -> None:
    """Read from its files: the import takes seconds."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl is not installed")
    tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
    (found,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)
    targets = [each.target for each in found.body if isinstance(each, ast.AnnAssign)]
    theirs = {target.id for target in targets if isinstance(target, ast.Name)} - {"_VALID_DICT_FIELDS"}
    named = set(re.findall(r"\w+", (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")))
    assert len(theirs) > 3
    assert theirs - named == set()
