"""Serves the page until it is asked to end (SIGINT, SIGTERM)."""

from __future__ import annotations

import secrets
import socket
import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from html import escape
from pathlib import Path

from grpo_async.errors import ConfigError
from grpo_async.run_directory import RunDir
from grpo_async.store.query import EVERYTHING, Query
from grpo_async.utils.network import WILDCARDS, host_in_url, is_loopback
from grpo_async.viewer.web import DEFAULT_HOST, DEFAULT_PORT
from grpo_async.viewer.web.api import build_app
from grpo_async.viewer.web.sources import RunRegistry

_GRACE_S = 2  # for answers that are being sent when it ends


def serve(
    runs: Sequence[RunDir],
    *,
    folder: Path | None = None,
    host: str = DEFAULT_HOST,
    port: int | None = None,
    open_browser: bool = False,
    query: Query = EVERYTHING,
    sort: str | None = None,
) -> None:
    """Serve a web page about `runs` and return when a signal ends it. It opens with the run, where there is one; else with all.

    Args:
        folder: the page shows what is below it, also what begins later; then `runs` is empty.
        host: address to listen on. Another than loopback lets other machines connect; that is said.
        port: None: `DEFAULT_PORT`, or any free one where that is taken; 0: any free one.
        open_browser: show the page in the user's browser, too.
        query: the page opens with the groups that match it.
        sort: the order of these groups (checked, as `RolloutTable.group_page` takes it; None: newest first).
    """
    import uvicorn

    listener = _listen_at_default(host) if port is None else listen(host, port)
    bound_host, bound_port = listener.getsockname()[:2]
    token = secrets.token_urlsafe(32)
    registry = RunRegistry(runs, folder)
    view = "groups" if query.text or sort else "run" if len(runs) == 1 else "home"
    opening = {"view": view, "query": query.text, "sort": sort}
    address = f"http://{host_in_url(WILDCARDS.get(bound_host, host))}:{bound_port}/"
    if not is_loopback(host):
        _say(
            f"WARNING: listening on {host}, not on loopback: other machines can connect, and the token and the rollouts travel "
            "unencrypted. Safer: keep 127.0.0.1 and forward the port, ssh -L "
            f"{bound_port}:127.0.0.1:{bound_port} HOST"
        )
    what = f"the runs in {folder}" if folder is not None else ", ".join(registry.names)
    _say(f"inspecting {what}; Ctrl-C ends it")
    _say(f"open {address}#token={token}")
    config = uvicorn.Config(
        build_app(registry, token=token, host=host, opening=opening),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_GRACE_S,
    )
    with tempfile.TemporaryDirectory(prefix="grpo-async-") as private:
        if open_browser:
            _open_in_browser(f"{address}#token={token}", Path(private))
        try:
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            registry.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is empty or too long
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {why}; choose another with --port, or --port 0 for any free one"
        ) from error
    listener.setblocking(False)
    return listener


def _listen_at_default(host: str) -> socket.socket:
    try:
        return listen(host, DEFAULT_PORT)
    except ConfigError:  # taken, most often by another inspector; where the host is wrong, this says so
        return listen(host, 0)


def _open_in_browser(url: str, folder: Path) -> None:
    """Open a file that only the user can read, which redirects: everybody on the machine can see an address on a command line."""
    page = folder / "open.html"  # the folder has mode 0700
    page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0;url={escape(url)}">', encoding="utf-8")
    if not webbrowser.open(page.as_uri()):
        _say("no browser was found; open the address above")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
