"""The report: the page of a run as one HTML file that needs neither a server nor the network.

    run directory -> what the page asks for (`views`) -> index.html with its scripts, its styles and these answers inside

The answers are those of the run as a whole and of a sample of its rollouts. What the file lacks (tables of all rollouts, logs) the
page does not offer; `grpo-async inspect` has it.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import duckdb
import orjson

from grpo_async import __version__
from grpo_async.errors import ConfigError, GrpoAsyncError
from grpo_async.run_directory import RunDir
from grpo_async.utils.files import write_atomically
from grpo_async.viewer.web.sources import RunRegistry, Source
from grpo_async.viewer.web.views import VIEWS, RequestParameters, run_entry, to_json

STATIC = Path(__file__).parents[1] / "static"

_MAX_SAMPLE_BYTES = 4_000_000  # of rollouts, groups and prompts
_NUM_SHOWN = 6  # of the best, and of the worst
_POLICY = "default-src 'none'; form-action 'none'; base-uri 'none'; img-src data:; trusted-types 'none'; "
_POLICY += "require-trusted-types-for 'script'"

Answer = tuple[str, dict[str, Any], Any, str]
"""A view, what it is asked with (as the page does), its answer, and where there is none, why."""


def write_report(run_dir: RunDir, out: Path | None = None) -> Path:
    """Write the report of a run, to `out` or to its report.html, and return where it is."""
    registry, out = RunRegistry([run_dir]), out or run_dir.report
    try:
        page = render_report(registry.source(""))
    finally:
        registry.close()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page, mode=0o600)  # it quotes rollouts, which are as private
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error
    return out


def render_report(source: Source) -> str:
    """The page of that file."""
    answers = [(*each, orjson.Fragment(to_json(answer)), why) for *each, answer, why in _answers(source)]
    made = f"{time.strftime('%Y-%m-%d %H:%M %Z')} by grpo-async {__version__}"
    return _page(to_json({"made": made, "folder": str(source.run.root), "answers": answers}).decode())


# -- answers


def _answers(source: Source) -> Iterator[Answer]:
    """All that the page of this run asks for."""
    yield "runs", {}, {"runs": [run_entry(source)], "folder": None, "opening": {"view": "run"}, "names": []}, ""
    for view in ("run", "config", "curves"):
        yield _answer(source, view, {"run": source.name})
    yield from _sampled(source)


def _answer(source: Source, view: str, asked: dict[str, Any]) -> Answer:
    """What cannot be read is said where it would stand, and breaks nothing else."""
    try:
        return view, asked, VIEWS[view](source, RequestParameters.model_validate(asked)), ""
    except (GrpoAsyncError, OSError, duckdb.Error) as error:
        return view, asked, None, str(error)


def _sampled(source: Source) -> Iterator[Answer]:
    """The best and the worst rollouts, and what is opened from there, while there is room."""
    run, max_bytes = source.name, _MAX_SAMPLE_BYTES
    asked = {"run": run, "q": "scored", "limit": _NUM_SHOWN}
    best = _answer(source, "rollouts", {**asked, "sort": "-reward", "count": True})
    worst = _answer(source, "rollouts", {**asked, "sort": "reward"})
    if best[2] is None or worst[2] is None:
        yield "rollouts", {"run": run}, None, best[3] or worst[3]
        return
    pairs = zip_longest(best[2]["rows"], worst[2]["rows"])
    rows = {row["rollout_id"]: row for pair in pairs for row in pair if row is not None}
    yield "rollouts", {"run": run}, {**best[2], "rows": list(rows.values())}, ""
    groups = set()
    for row in rows.values():
        wanted = [("rollout", row["rollout_id"])]
        if row["seq"] not in groups:
            groups.add(row["seq"])
            wanted.append(("group", str(row["group_id"])))
        for view, name in wanted:
            found = _answer(source, view, {"run": run, "id": name, "seq": row["seq"]})
            size = len(to_json(found[2]))
            if not found[3] and size <= max_bytes:
                max_bytes -= size
                yield found


# -- the file


def _page(data: str) -> str:
    """index.html with all that it links inside. Its policy names each script and style by its hash: no other runs, and nothing is
    loaded."""
    page, hashes = (STATIC / "web" / "index.html").read_text(encoding="utf-8"), dict[str, list[str]]()

    def inline(tag: str, attributes: str, read: Callable[[str], str]) -> Callable[[re.Match[str]], str]:
        def replaced(found: re.Match[str]) -> str:
            content = read(found[1])
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            hashes.setdefault(tag, []).append(f"'sha256-{digest}'")
            return f"<{tag}{attributes}>{content}</{tag}>"

        return replaced

    page = re.sub(r'<link rel="icon".*\n', "", page)
    page = re.sub(r'<link rel="stylesheet" href="static/([^"]+)">', inline("style", "", _asset), page)
    page = re.sub(r'<script src="static/([^"]+)" defer></script>', inline("script", "", _asset), page)
    module = r'<script type="module" src="static/web/([^"]+)"></script>'
    page = re.sub(module, inline("script", ' type="module"', lambda name: "\n".join(_modules(name, {}).values())), page)
    policy = f"{_POLICY}; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}"
    page = page.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">',
    )
    data = data.replace("<", "\\u003c")  # only texts have one: none of them ends the script
    return page.replace("</body>", f'<script type="application/json" id="report">{data}</script>\n</body>')


def _asset(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _modules(name: str, done: dict[str, str]) -> dict[str, str]:
    """A module of ours after those that it imports, a function each that gives its exports: modules in one file cannot import."""
    source = _asset(f"web/{name}")
    imports = re.compile(r'^import (\{[^}]*\}) from "\./(\w+\.js)";$', flags=re.MULTILINE)
    exports = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", flags=re.MULTILINE)
    for _, other in imports.findall(source):
        if other not in done:
            _modules(other, done)
    names = ", ".join(exports.findall(source))
    source = imports.sub(lambda found: f"const {found[1]} = {_variable(found[2])};", exports.sub("", source))
    done[name] = f"const {_variable(name)} = (() => {{\n{source}\nreturn {{ {names} }};\n}})();"
    return done


def _variable(module: str) -> str:
    return f"module_{module.removesuffix('.js')}"
