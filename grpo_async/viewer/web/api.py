"""What the page asks: one GET per view, each answered in a thread.

Every answer over rollouts takes `run` (a name of /api/runs; left out: the first), `q` (a query), `superseded=1` (also
what a resume left behind) and `until` (rows up to this seq only). A page that has begun to read names its `until`, so what a run
writes meanwhile moves nothing; /api/pulse says how much there is by now.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from grpo_async.errors import ConfigError, GrpoAsyncError, RunError
from grpo_async.store.query import EVERYTHING, Query, both, parse_query, quote
from grpo_async.store.query_names import FLAG, HELP, NAMES
from grpo_async.store.rows import GroupRow, RolloutRow
from grpo_async.store.table import RolloutTable
from grpo_async.tracking.catalog import describe as describe_metric
from grpo_async.utils.run_state import judge
from grpo_async.viewer.web.answers import MOST_ROWS, Json, NotFoundError, Parameters, error_answer
from grpo_async.viewer.web.run_files import describe, read_json
from grpo_async.viewer.web.sources import Library, Source, evaluation_steps
from grpo_async.viewer.web.tokens import token_style_sheet, token_view

_MOST_BINS = 200

Work = Callable[[Source, Parameters], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What the page opens with, where its address names nothing: the query, the order (None: newest first), and whether with what a
    resume left behind."""

    query: str = ""
    sort: str | None = None
    superseded: bool = False


WHOLE_RUN = Opening()


class Api:
    """The endpoints over a library."""

    def __init__(self, library: Library, *, opening: Opening) -> None:
        self._library = library
        self._opening = opening

    @property
    def routes(self) -> list[Route]:
        over_runs: dict[str, Work] = {
            "summary": _summary,
            "pulse": _pulse,
            "groups": _groups,
            "rollouts": _rollouts,
            "group": _group,
            "rollout": _rollout,
            "histogram": _histogram,
            "steps": _steps,
            "extremes": _extremes,
            "prompt": _prompt,
            "metrics": _metrics,
            "timeline": _timeline,
            "usage": _usage,
        }
        routes = [Route(f"/api/{name}", self._endpoint(work), methods=["GET"]) for name, work in over_runs.items()]
        return [
            Route("/api/runs", self._runs, methods=["GET"]),
            Route("/api/help", _help, methods=["GET"]),
            Route("/static/token-colours.css", _token_colours, methods=["GET"]),
            *routes,
        ]

    async def _runs(self, _: Request) -> Response:
        """All runs and their evaluations, and what queries may say."""

        def work() -> list[dict[str, Any]]:
            found = []
            for name in self._library.names:
                source = self._library.source(name)
                steps = evaluation_steps(source.run)
                found.append(
                    {
                        "name": name,
                        "folder": str(source.run.root),
                        "is_evaluation": source.is_evaluation,
                        "evaluations": [{"name": f"{name}@{step}", "step": step} for step in steps],
                    }
                )
            return found

        fields = [
            {
                "name": each.name,
                "kind": each.kind,
                "help": each.help,
                "values": [quote(value) for value in each.values],
                "example": each.example,
            }
            for each in NAMES
            if each.kind != FLAG
        ]
        words = [{"name": each.name, "help": each.help} for each in NAMES if each.kind == FLAG]
        return Json(
            {"runs": await self._library.ask(work), "opening": self._opening, "fields": fields, "words": words},
        )

    def _endpoint(self, work: Work) -> Callable[[Request], Awaitable[Response]]:
        @wraps(work)
        async def endpoint(request: Request) -> Response:
            try:
                parameters = Parameters(request)
                run = parameters.optional("run")
                return Json(await self._library.ask(lambda: work(self._source(run), parameters)))
            except (GrpoAsyncError, TimeoutError) as error:
                return error_answer(error)

        return endpoint

    def _source(self, name: str | None) -> Source:
        try:
            return self._library.source(name)
        except ConfigError as error:
            raise NotFoundError(str(error)) from error


def _help(_: Request) -> Response:
    return Json({"sections": HELP})


def _token_colours(_: Request) -> Response:
    return Response(token_style_sheet(), media_type="text/css")


def _query(parameters: Parameters) -> Query:
    """The query of a request, bounded by its `until`."""
    query = parse_query(parameters.text("q"))
    until = parameters.number("until", -1, low=-1)
    return query if until < 0 else _up_to(query, until)


def _up_to(query: Query, seq: int) -> Query:
    return both(query, parse_query(f"seq<={seq}"))


def _newest(table: RolloutTable) -> int:
    """The seq of the newest group; -1: there is none."""
    newest = table.group_page(EVERYTHING, sort="-seq", offset=0, limit=1, with_superseded=True)
    return newest[0].seq if newest else -1


def _summary(source: Source, parameters: Parameters) -> dict[str, Any]:
    """Everything of a run that does not depend on what is looked for."""
    table = source.table()
    return {
        "name": source.name,
        "until": _newest(table),
        "counts": table.count(EVERYTHING),
        "counts_with_superseded": table.count(EVERYTHING, with_superseded=True),
        "notes": table.notes,
        "reward_names": table.reward_names(),
        "column_names": table.column_names(),
        **describe(source.run),
    }


def _pulse(source: Source, parameters: Parameters) -> dict[str, Any]:
    """How much there is by now, and where the run stands."""
    table = source.table()
    status = read_json(source.run.status) or {}
    judged = judge(status) if status else None
    return {
        "until": _newest(table),
        "counts": table.count(EVERYTHING),
        "notes": table.notes,
        "metrics": source.metrics.num_steps(),
        "status": {
            **{name: status.get(name) for name in ("phase", "step", "max_steps", "eta_s")},
            "state": judged.state if judged else None,
            "why": judged.why if judged else "",
        },
    }


def _page(source: Source, parameters: Parameters, *, of_groups: bool) -> dict[str, Any]:
    """Rows `offset` to `offset + limit`, and `until`: as asked for, else the newest seq, to which the rows are bound. With
    `count=1` also how many there are."""
    table = source.table()
    query = parse_query(parameters.text("q"))
    until = parameters.number("until", -1, low=-1)
    if until < 0:
        until = _newest(table)
    query = _up_to(query, max(until, 0))
    all_branches = parameters.flag("superseded")
    offset = parameters.number("offset", 0)
    limit = parameters.number("limit", 100, high=MOST_ROWS)
    sort = parameters.text("sort") or "-seq"
    read = table.group_page if of_groups else table.page
    rows: Sequence[object] = read(query, sort=sort, offset=offset, limit=limit, with_superseded=all_branches)
    answer: dict[str, Any] = {"rows": rows, "offset": offset, "until": until}
    if parameters.flag("count"):
        answer["counts"] = table.count(query, with_superseded=all_branches)
    return answer


def _groups(source: Source, parameters: Parameters) -> dict[str, Any]:
    return _page(source, parameters, of_groups=True)


def _rollouts(source: Source, parameters: Parameters) -> dict[str, Any]:
    return _page(source, parameters, of_groups=False)


def _group(source: Source, parameters: Parameters) -> dict[str, Any]:
    """One group with the texts of its rollouts, without tokens. `seq` finds one of two with the same `id`."""
    table, seq = source.table(), parameters.number("seq", -1)
    try:
        if seq >= 0:
            row = table.group_at(seq)
        else:
            group_id = parameters.number("id", -1, low=-(2**53))
            row = table.group(group_id, with_superseded=parameters.flag("superseded"))
        return {
            "summary": table.group_summary_at(row.seq),
            "group": _without_rollouts(row),
            "rollouts": [_without_tokens(rollout) for rollout in row.rollouts],
            "summaries": table.rollout_summaries_at(row.seq),
        }
    except RunError as error:
        raise NotFoundError(str(error)) from error


def _rollout(source: Source, parameters: Parameters) -> dict[str, Any]:
    """One rollout with all its tokens. `seq` of its group finds one of two with the same `id`."""
    table, seq, rollout_id = source.table(), parameters.number("seq", -1), parameters.text("id")
    try:
        if seq >= 0:
            group = table.group_at(seq)
            rollout = next((each for each in group.rollouts if each.rollout_id == rollout_id), None)
        else:
            group, rollout = table.rollout(rollout_id, with_superseded=parameters.flag("superseded"))
        summaries = table.rollout_summaries_at(group.seq)
    except RunError as error:
        raise NotFoundError(str(error)) from error
    if rollout is None:
        raise NotFoundError(f"the group with seq {seq} has no rollout {rollout_id}")
    return {
        "group": _without_rollouts(group),
        "rollout": _without_tokens(rollout),
        "summaries": summaries,
        "tokens": token_view(rollout, source.texts()),
    }


def _histogram(source: Source, parameters: Parameters) -> Any:
    field = parameters.text("field") or "reward"
    bins = parameters.number("bins", 30, low=1, high=_MOST_BINS)
    with_superseded = parameters.flag("superseded")
    return source.table().histogram(field, _query(parameters), bins=bins, with_superseded=with_superseded)


def _steps(source: Source, parameters: Parameters) -> dict[str, Any]:
    return {"steps": source.table().by_step(_query(parameters), with_superseded=parameters.flag("superseded"))}


def _extremes(source: Source, parameters: Parameters) -> Any:
    return source.table().extremes(_query(parameters), parameters.number("k", 10, low=1, high=100))


def _prompt(source: Source, parameters: Parameters) -> dict[str, Any]:
    groups = source.table().same_prompt(parameters.text("hash"), with_superseded=parameters.flag("superseded"))
    return {"groups": groups}


def _metrics(source: Source, parameters: Parameters) -> dict[str, Any]:
    names = [name for name in parameters.text("names").split(",") if name]
    known = source.metrics.names()
    about = {name: describe_metric(name) for name in known}
    return {"names": known, "known": about, **source.metrics.series(names)}


def _timeline(source: Source, parameters: Parameters) -> Any:
    columns = parameters.number("columns", 1500, low=1, high=10_000)
    return source.events.window(parameters.real("start"), parameters.real("end"), columns=columns)


def _usage(source: Source, parameters: Parameters) -> Any:
    """Who waited for whom between two times of the timeline."""
    return source.events.usage(parameters.real("start"), parameters.real("end"))


def _without_rollouts(group: GroupRow) -> dict[str, Any]:
    return {name: getattr(group, name) for name in group.__dataclass_fields__ if name != "rollouts"}


_TOKEN_FIELDS = frozenset(
    (
        "prompt_ids",
        "completion_ids",
        "mask",
        "logprobs",
        "versions",
        "trainer_logprobs",
        "proximal_logprobs",
        "weights",
        "entropies",
        "marks",
    )
)


def _without_tokens(rollout: RolloutRow) -> dict[str, Any]:
    return {name: getattr(rollout, name) for name in rollout.__dataclass_fields__ if name not in _TOKEN_FIELDS}
