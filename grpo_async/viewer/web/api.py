"""The application behind the page: its files, and one GET per view, each answered in a thread.

Every answer over rollouts takes `run` (a name of /api/runs; left out: the first), `q` (a query) and `until` (rows up to this seq
only). A page that shows rows names its `until`, so what a run writes meanwhile moves nothing; /api/status says how much there is by
now.

Errors, as `error_answer` answers them for all:

400 the query or a parameter is wrong (with the position of the mistake) | 404 no such run, group or rollout
503 the store cannot be read, or all threads hang | 504 the deadline has passed
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from grpo_async.errors import ConfigError, GrpoAsyncError, RunError
from grpo_async.records import root_id
from grpo_async.store.query import EVERYTHING, Query, QueryError, both, parse_query
from grpo_async.store.query_names import HELP, NAMES
from grpo_async.store.rows import GroupRow, RolloutRow
from grpo_async.store.schema import TOKEN_COLUMNS
from grpo_async.user_code.threads import ThreadsExhaustedError
from grpo_async.utils.files import read_object
from grpo_async.utils.run_state import state_of
from grpo_async.utils.safe_text import visible
from grpo_async.utils.validation import problems_of
from grpo_async.viewer.format import call_tree, flag_names, prompt_of
from grpo_async.viewer.report.write import MAX_RUNS, render_report
from grpo_async.viewer.runs import modified_at
from grpo_async.viewer.timeline import load_events
from grpo_async.viewer.token_text import TokenTexts
from grpo_async.viewer.trace import write_trace
from grpo_async.viewer.web import overview
from grpo_async.viewer.web.guard import REPORT_PATH, Guard
from grpo_async.viewer.web.sources import DEADLINE_S, NotFoundError, RunRegistry, Source

STATIC = Path(__file__).parents[1] / "static"


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialView:
    """What the page opens with, where its address names nothing: a view (home, run, groups), the query, and the order (None: newest
    first)."""

    view: str = "home"
    query: str = ""
    sort: str | None = None


class RequestParameters(BaseModel):
    """The parameters of all views; each view reads those that it knows."""

    model_config = ConfigDict(frozen=True)

    run: str = ""
    q: str = ""
    until: int = Field(-1, ge=-1, le=2**53)  # -1: no bound
    sort: str = Field("-seq", max_length=400)
    offset: int = Field(0, ge=0, le=2**53)
    limit: int = Field(100, ge=0, le=500)
    count: bool = False
    id: str = ""  # of a group or rollout; `seq` of the group finds one of two with the same id
    seq: int = Field(-1, ge=-1, le=2**53)
    field: str = "reward"
    bins: int = Field(30, ge=1, le=200)
    k: int = Field(10, ge=1, le=100)
    hash: str = ""  # of a prompt
    compare_with: str = Field("", max_length=4000)  # names of further runs, with commas between; %2C within
    axis: str = Field("step", max_length=10)  # of curves: step, time, tokens
    attempt: str = Field("", max_length=100)
    file: str = Field("", max_length=100)  # of an attempt's logs
    first: int = Field(-1, ge=-1, le=2**53)  # steps of two evaluations; -1: the first, the last
    last: int = Field(-1, ge=-1, le=2**53)


# -- views


def _summary(source: Source, parameters: RequestParameters) -> dict[str, Any]:
    """Everything of a run that does not depend on what is looked for."""
    table = source.table()
    return {
        "counts": table.count(EVERYTHING),
        "notes": table.notes,
        "reward_names": table.reward_names(),
        "column_names": table.column_names(),
    }


def _status(source: Source, parameters: RequestParameters) -> dict[str, Any]:
    """How much there is by now, and where the run stands."""
    table = source.table()
    status = read_object(source.run.status, [])
    found = state_of(status, read_object(source.run.summary, []))
    return {
        "until": table.newest_seq,
        "counts": table.count(EVERYTHING),
        "notes": table.notes,
        "metrics": len(source.metrics.rows()),
        "num_evaluations": len(source.run.evaluation_steps()),
        "status": {
            **{name: status.get(name) for name in ("phase", "step", "max_steps", "eta_s")},
            "state": found.state,
            "why": found.why,
        },
    }


def _query(parameters: RequestParameters) -> Query:
    """The query of a request, bounded by its `until`."""
    query = parse_query(parameters.q)
    return query if parameters.until < 0 else _up_to(query, parameters.until)


def _up_to(query: Query, until: int) -> Query:
    """The query, for the groups up to the one with seq `until`."""
    return both(query, parse_query(f"seq<={until}"))


def _page(source: Source, parameters: RequestParameters, *, of_groups: bool) -> dict[str, Any]:
    """Rows `offset` to `offset + limit`, and `until`: as asked for, else the newest seq (-1: no group yet), to which the rows are
    bound. With `count=1` also how many there are."""
    table = source.table()
    until = parameters.until if parameters.until >= 0 else table.newest_seq
    query = _up_to(parse_query(parameters.q), until)
    read: Callable[..., Sequence[object]] = table.group_page if of_groups else table.page
    rows = read(query, sort=parameters.sort, offset=parameters.offset, limit=parameters.limit)
    counts = {"counts": table.count(query)} if parameters.count else {}
    return {"rows": rows, "offset": parameters.offset, "until": until, **counts}


def _group(source: Source, parameters: RequestParameters) -> dict[str, Any]:
    """One group with the texts of its rollouts, without tokens."""
    table = source.table()
    try:
        if parameters.seq >= 0:
            group = table.group_at(parameters.seq)
        elif parameters.id.removeprefix("-").isdecimal() and len(parameters.id) < 18:
            group = table.group(int(parameters.id))
        else:
            raise NotFoundError(f"id: '{parameters.id[:40]}' is not the number of a group")
    except RunError as error:
        raise NotFoundError(str(error)) from error
    return {
        "summary": table.group_summary_at(group.seq),
        "group": _without_rollouts(group),
        "prompt": prompt_of(group),
        "rollouts": [_without_tokens(rollout) for rollout in group.rollouts],
        "summaries": table.rollout_summaries_at(group.seq),
    }


def _find_rollout(source: Source, parameters: RequestParameters) -> tuple[GroupRow, RolloutRow]:
    table, wanted = source.table(), parameters.id
    try:
        if parameters.seq >= 0:
            group = table.group_at(parameters.seq)
        else:
            group, _ = table.rollout(wanted)
    except RunError as error:
        raise NotFoundError(str(error)) from error
    rollout = group.path(wanted)
    if rollout is None:
        raise NotFoundError(f"the group with seq {group.seq} has no rollout {wanted}")
    return group, rollout


def _rollout(source: Source, parameters: RequestParameters) -> dict[str, Any]:
    """One rollout, or a branch of one, with all its tokens; `tree` has the calls of all branches, where there are any."""
    group, rollout = _find_rollout(source, parameters)
    root = group.path(root_id(rollout.rollout_id)) or rollout
    return {
        "group": _without_rollouts(group),
        "prompt": prompt_of(group, rollout),
        "rollout": _without_tokens(rollout),
        "summaries": source.table().rollout_summaries_at(group.seq),
        "root": root.rollout_id,
        "tree": list(call_tree(group, root)) if root.branches else [],
        "tokens": token_view(rollout, source.texts()),
    }


def _together(source: Source, parameters: RequestParameters) -> list[Source]:
    """The run, and the runs that it is compared with."""
    names = dict.fromkeys(unquote(name) for name in parameters.compare_with.split(",") if name)
    return [source, *(source.find(name) for name in names if name != source.name)]


_VIEWS: Mapping[str, Callable[[Source, RequestParameters], object]] = {
    "summary": _summary,
    "status": _status,
    "groups": lambda source, given: _page(source, given, of_groups=True),
    "rollouts": lambda source, given: _page(source, given, of_groups=False),
    "group": _group,
    "rollout": _rollout,
    "histogram": lambda source, given: source.table().histogram(given.field, _query(given), bins=given.bins),
    "steps": lambda source, given: {"steps": source.table().by_step(_query(given))},
    "extremes": lambda source, given: source.table().extremes(_query(given), given.k),
    "prompt": lambda source, given: {"groups": source.table().same_prompt(given.hash)},
    "card": lambda source, _: overview.card(source),
    "run": lambda source, _: overview.page(source),
    "curves": lambda source, given: overview.curves(_together(source, given)[:MAX_RUNS], given.axis),
    "config": lambda source, given: overview.settings(_together(source, given)[:MAX_RUNS]),
    "logs": lambda source, given: overview.logs(source.run, given.attempt, given.file),
    "change": lambda source, given: overview.before_after(source, given.first, given.last, given.offset, given.limit),
}


# -- rows and tokens


def _without_rollouts(group: GroupRow) -> dict[str, Any]:
    """Without its prompt, too, which is asked for by `prompt_of`."""
    return {name: getattr(group, name) for name in group.__dataclass_fields__ if name not in ("rollouts", "messages")}


def _without_tokens(rollout: RolloutRow) -> dict[str, Any]:
    left_out = {*TOKEN_COLUMNS, "branches", "reset_messages"}
    return {name: getattr(rollout, name) for name in rollout.__dataclass_fields__ if name not in left_out}


def token_view(rollout: RolloutRow, texts: TokenTexts | str) -> dict[str, Any]:
    """Lists with one entry per completion token.

    `texts` is None where there is no tokenizer, and `texts_missing` says why. `flag_names` has the names of each value that occurs
    in `token_flags`.
    """

    def texts_of(ids: Sequence[int]) -> list[str] | None:
        return [visible(texts.of(each)) for each in ids] if isinstance(texts, TokenTexts) else None

    return {
        **{name: getattr(rollout, name) for name in TOKEN_COLUMNS},
        "texts": texts_of(rollout.completion_ids),
        "texts_missing": texts if isinstance(texts, str) else None,
        "prompt_texts": texts_of(rollout.prompt_ids),
        "flag_names": {value: flag_names(value) for value in set(rollout.token_flags or ()) - {None}},
    }


# -- answers


class Json(Response):
    """Dataclasses, enums and numpy arrays included; NaN and infinities become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
        return orjson.dumps(content, default=dict, option=options)  # a row is a mapping, and no dict


def error_answer(request: Request, error: Exception) -> Json:
    """The answer to a request that failed, for all endpoints."""
    match error:
        case QueryError():
            where = {"position": error.position, "length": error.length, "suggestions": list(error.suggestions)}
            return Json({"error": error.problem, **where}, status_code=400)
        case ValidationError():
            return Json({"error": problems_of(error)}, status_code=400)
        case NotFoundError():
            return Json({"error": str(error)}, status_code=404)
        case ConfigError():
            return Json({"error": str(error)}, status_code=400)
        case TimeoutError():
            late = f"no answer within {DEADLINE_S:.0f} s; narrow the query, or ask again when the machine is less busy"
            return Json({"error": late}, status_code=504)
        case RunError() | ThreadsExhaustedError():
            return Json({"error": str(error)}, status_code=503)
        case HTTPException():
            problem = f"there is nothing at {request.url.path}" if error.status_code == 404 else error.detail
            return Json({"error": problem}, status_code=error.status_code, headers=error.headers)
    raise error


def build_app(registry: RunRegistry, *, token: str, host: str, opening: InitialView | None = None) -> Guard:
    """The page, its files and the API, behind the guard.

    Args:
        token: secret of this start, without which no data is given.
        host: the address that is listened on; see `Guard`.
        opening: what the page opens with; None: all runs.
    """

    def endpoint(answer: Callable[[RequestParameters], Response]) -> Callable[[Request], Awaitable[Response]]:
        """`answer` is called in a thread, where it also renders the response: rows with tokens take long to encode."""

        async def answer_in_thread(request: Request) -> Response:
            parameters = RequestParameters.model_validate(dict(request.query_params))
            return await registry.ask(lambda: answer(parameters))

        return answer_in_thread

    def runs(_: RequestParameters) -> Json:
        """All runs and their evaluations, and what queries may say."""

        def described(name: str) -> dict[str, Any]:
            run = registry.source(name).run
            evaluations = [{"name": f"{name}@{step}", "step": step} for step in run.evaluation_steps()]
            return {"name": name, "evaluations": evaluations, "updated_at": modified_at(run)}

        found = list(map(described, registry.names))
        folder = None if registry.folder is None else str(registry.folder)
        return Json({"runs": found, "folder": folder, "opening": opening or InitialView(), "names": NAMES})

    def report(parameters: RequestParameters) -> HTMLResponse:
        """The report of one run or several, as `grpo-async report` would write it now."""
        sources = _together(registry.source(parameters.run), parameters)
        return HTMLResponse(render_report([source.run for source in sources]))

    def trace(parameters: RequestParameters) -> Response:
        """The timeline of a run, as `grpo-async trace` would write it now."""
        run = registry.source(parameters.run).run
        with TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json.gz"
            write_trace(load_events(run.events).events, path, title=run.root.name)
            return Response(path.read_bytes(), media_type="application/gzip")

    def view(name: str) -> Callable[[RequestParameters], Json]:
        return lambda parameters: Json(_VIEWS[name](registry.source(parameters.run), parameters))

    def file(name: str, media_type: str) -> Callable[[Request], Response]:
        return lambda _: FileResponse(STATIC / "web" / name, media_type=media_type)

    answers: dict[str, Callable[[RequestParameters], Response]] = {
        "/api/runs": runs,
        REPORT_PATH: report,
        "/api/trace": trace,
        "/api/help": lambda _: Json({"sections": HELP}),
        **{f"/api/{name}": view(name) for name in _VIEWS},
    }
    routes = [
        Route("/", file("index.html", "text/html"), methods=["GET"]),
        Route("/favicon.ico", file("icon.svg", "image/svg+xml"), methods=["GET"]),
        *(Route(path, endpoint(answer), methods=["GET"]) for path, answer in answers.items()),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    failures = (GrpoAsyncError, TimeoutError, ValidationError, HTTPException)
    return Guard(
        Starlette(routes=routes, exception_handlers=dict.fromkeys(failures, error_answer)), token=token, host=host
    )
