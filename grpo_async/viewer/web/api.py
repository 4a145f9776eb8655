"""The application behind the page: its files, and one GET per view, each answered in a thread, with a deadline at which its query
is interrupted.

Errors: 400 the query or a parameter is wrong | 404 no such run, group or rollout | 503 the store cannot be read | 504 too late
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from grpo_async.errors import ConfigError, RunError
from grpo_async.store.database import time_limit
from grpo_async.store.names import HELP, NAMES
from grpo_async.utils.validation import problems_of
from grpo_async.viewer.web.guard import Guard
from grpo_async.viewer.web.overview import study_table
from grpo_async.viewer.web.report import STATIC, render_report
from grpo_async.viewer.web.sources import NotFoundError, RunRegistry
from grpo_async.viewer.web.views import VIEWS, RequestParameters, run_entry, to_json

DEADLINE_S = 30.0  # of one request
HOME = {"view": "home", "query": "", "sort": None}
"""What the page opens with, where its address names nothing: a view (home, run, groups), the query, and the order (None: newest
first)."""


# -- answers


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


_STATUS: Mapping[type[Exception], int] = {NotFoundError: 404, ConfigError: 400, ValidationError: 400, RunError: 503}


def error_answer(request: Request, error: Exception) -> Json:
    """The answer to a request that failed, for all endpoints."""
    match error:
        case HTTPException():
            problem = f"there is nothing at {request.url.path}" if error.status_code == 404 else error.detail
            return Json({"error": problem}, status_code=error.status_code, headers=error.headers)
        case TimeoutError():
            late = f"no answer within {DEADLINE_S:.0f} s; narrow the query, or ask again when the machine is less busy"
            return Json({"error": late}, status_code=504)
    status = next(status for kind, status in _STATUS.items() if isinstance(error, kind))
    problem = problems_of(error) if isinstance(error, ValidationError) else getattr(error, "problem", str(error))
    return Json({"error": problem}, status_code=status)


def build_app(registry: RunRegistry, *, token: str, host: str, opening: Mapping[str, Any] = HOME) -> Guard:
    """The page, its files and the API, behind the guard."""

    def endpoint(answer: Callable[[RequestParameters], Response]) -> Callable[[Request], Response]:
        """Called in a thread, where the response is also rendered: rows with tokens take long to encode."""

        def answered(request: Request) -> Response:
            with time_limit(DEADLINE_S):
                return answer(RequestParameters.model_validate(dict(request.query_params)))

        return answered

    def runs(_: RequestParameters) -> Json:
        """All runs and their evaluations, the study that they belong to, and what queries may say."""

        found = [run_entry(registry.source(name)) for name in registry.names]
        folder = None if registry.folder is None else str(registry.folder)
        names = [{"name": each.name, "help": each.help} for each in NAMES]
        study = None if registry.folder is None else study_table(registry.folder)
        return Json({"runs": found, "folder": folder, "study": study, "opening": opening, "names": names})

    def report(parameters: RequestParameters) -> Response:
        """The report of a run, as `grpo-async report` would write it now: a file, which is never opened here."""
        page = render_report(registry.source(parameters.run))
        return Response(page, media_type="text/html", headers={"content-disposition": "attachment"})

    def view(name: str) -> Callable[[RequestParameters], Json]:
        return lambda parameters: Json(VIEWS[name](registry.source(parameters.run), parameters))

    def file(name: str, media_type: str) -> Callable[[Request], Response]:
        return lambda _: FileResponse(STATIC / "web" / name, media_type=media_type)

    answers: dict[str, Callable[[RequestParameters], Response]] = {
        "/api/runs": runs,
        "/api/report": report,
        "/api/help": lambda _: Json({"sections": HELP}),
        **{f"/api/{name}": view(name) for name in VIEWS},
    }
    routes = [
        Route("/", file("index.html", "text/html"), methods=["GET"]),
        Route("/favicon.ico", file("icon.svg", "image/svg+xml"), methods=["GET"]),
        *(Route(path, endpoint(answer), methods=["GET"]) for path, answer in answers.items()),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    failures = (*_STATUS, TimeoutError, HTTPException)
    return Guard(
        Starlette(routes=routes, exception_handlers=dict.fromkeys(failures, error_answer)), token=token, host=host
    )
