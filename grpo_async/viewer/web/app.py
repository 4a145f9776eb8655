"""The whole application: the page, its files, the API, behind the guard."""

from __future__ import annotations

from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from grpo_async.viewer.web.answers import Json
from grpo_async.viewer.web.api import WHOLE_RUN, Api, Opening
from grpo_async.viewer.web.guard import Guard
from grpo_async.viewer.web.sources import Library

STATIC = Path(__file__).parents[1] / "static"


def build_app(library: Library, *, token: str, host: str, opening: Opening = WHOLE_RUN) -> Guard:
    """An ASGI app.

    Args:
        token: secret of this start, without which no data is given.
        host: the address that is listened on; see `Guard`.
        opening: what the page opens with.
    """
    routes = [
        Route("/", _page, methods=["GET"]),
        Route("/favicon.ico", _icon, methods=["GET"]),
        *Api(library, opening=opening).routes,
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Guard(Starlette(routes=routes, exception_handlers={404: _missing}), token=token, host=host)


def _page(_: Request) -> Response:
    return FileResponse(STATIC / "web" / "index.html", media_type="text/html")


def _icon(_: Request) -> Response:
    return FileResponse(STATIC / "web" / "icon.svg", media_type="image/svg+xml")


def _missing(request: Request, _: Exception) -> Response:
    return Json({"error": f"there is nothing at {request.url.path}"}, status_code=404)
