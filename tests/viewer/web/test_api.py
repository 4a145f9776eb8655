"""The API over a real socket: who may read, what is answered, what is refused."""

from __future__ import annotations

import signal
import subprocess
import sys
import webbrowser
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from grpo_async.errors import ConfigError
from grpo_async.records import GroupStatus
from grpo_async.run_directory import RunDir
from grpo_async.store import RolloutStore
from grpo_async.viewer.web import api
from grpo_async.viewer.web.serve import _open_in_browser, listen, serve
from tests.store.builders import build_branched_rollout, build_group
from tests.support.stored import LineStore
from tests.viewer.support import steps, write_run
from tests.viewer.web.serving import (
    LIMIT_S,
    TOKEN,
    Inspector,
    append_steps,
    serving,
    write_stored_run,
)

BEARER = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A run of one step."""
    return write_stored_run(tmp_path / "run", num_steps=1)


# -- who may read


def test_data_needs_the_token_and_the_page_needs_none(inspector: Inspector) -> None:
    for path in ("", "static/web/main.js"):
        assert inspector.get(path, headers={}).status_code == 200
    for path in ("api/runs", "api/status", "api/rollouts", "api/rollout", "api/nothing"):
        refused = inspector.get(path, headers={})
        assert refused.status_code == 401, path
        assert "token" in refused.json()["error"]
    for header in ("Bearer wrong", TOKEN, f"bearer {TOKEN}", f"Bearer {TOKEN}x", "Bearer", "Basic e"):
        assert inspector.get("api/runs", headers={"authorization": header}).status_code == 401, header


def test_only_names_of_this_machine_are_answered(inspector: Inspector) -> None:
    """Against DNS rebinding; any port is right, since ports are forwarded."""
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", ""):
        for path in ("", "api/runs", "static/theme.css"):
            assert inspector.get(path, headers={**BEARER, "host": host}).status_code in (400, 403), host
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:9", "127.9.9.9"):
        assert inspector.get("api/runs", headers={**BEARER, "host": host}).status_code == 200, host


@pytest.mark.parametrize("path", ["", "api/runs", "api/nothing", "static/web/main.js", "static/nothing", "elsewhere"])
def test_every_answer_forbids_what_the_page_does_not_need(inspector: Inspector, path: str) -> None:
    headers = inspector.get(path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert headers["cache-control"] == ("no-store" if path.startswith(("api/", "elsewhere")) else "no-cache")


@pytest.mark.parametrize("path", ["static/../web/serve.py", "static/%2e%2e/web/serve.py", "static//etc/passwd"])
def test_static_files_are_those_of_one_folder(inspector: Inspector, path: str) -> None:
    with httpx.Client(timeout=LIMIT_S) as client:
        request = client.build_request("GET", inspector.origin, headers=BEARER)
        request.extensions["target"] = f"/{path}".encode()
        assert client.send(request).status_code == 404


# -- what is answered


@pytest.mark.parametrize(
    ("view", "parameters", "status", "message"),
    [
        ("rollouts", {"limit": "501"}, 400, "limit"),
        ("rollouts", {"offset": "9" * 30}, 400, "offset"),
        ("rollouts", {"q": "a" * 5000}, 400, "characters"),
        ("rollouts", {"sort": "reward; drop table rows"}, 400, "reward"),
        ("status", {"run": "../one"}, 404, "no run '../one' here; there are one, long, hostile"),
        ("group", {"id": "0", "seq": "99"}, 404, "seq 99"),
        ("rollout", {"id": "g1-r1", "seq": "0"}, 404, "the group with seq 0 has no rollout g1-r1"),
        ("nothing", {}, 404, "nothing"),
    ],
)
def test_what_is_wrong_or_not_there_is_named(
    inspector: Inspector, view: str, parameters: dict[str, Any], status: int, message: str
) -> None:
    answer = inspector.get(f"api/{view}", **parameters)
    assert answer.status_code == status
    assert message in answer.json()["error"]


def test_evaluations_are_runs_of_their_own_and_runs_of_one_name_keep_apart(tmp_path: Path, small: Path) -> None:
    with RolloutStore(RunDir(small).evaluation(5)) as store:
        append_steps(store, [1], word="evaluated", groups_a_step=1)
    other = write_stored_run(tmp_path / "a@b,c" / "run", num_steps=2)
    for run, rate in ((small, 0.1), (other, 0.2)):
        RunDir(run).config.write_text(f"optimizer: {{lr: {rate}}}\n", encoding="utf-8")
    with serving(small, other) as inspector:
        runs = inspector.json("api/runs")["runs"]
        assert [run["name"] for run in runs] == [f"{tmp_path.name}/run", "a@b,c/run"]
        assert runs[0]["evaluations"] == [{"name": f"{tmp_path.name}/run@5", "step": 5}]
        rows = inspector.json("api/rollouts", run=f"{tmp_path.name}/run@5", sort="index")["rows"]
        assert [row["completion_preview"] for row in rows] == [f"evaluated 1 {i}" for i in range(4)]
        assert inspector.json("api/status", run="a@b,c/run")["counts"]["groups"] == 6
        one, other = f"{tmp_path.name}/run", "a@b%2Cc/run"
        compared = inspector.json("api/config", run=one, compare_with=f"{one},{other},{other}")
        assert compared["runs"] == [one, "a@b,c/run"], "the heads of the values"
        assert compared["different"] == [["optimizer.lr", "0.1", "0.2"]]


def test_below_a_folder_every_run_is_found_by_its_name_and_nothing_else_is(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with serving(folder=runs) as inspector:
        assert inspector.json("api/runs")["runs"] == []
        assert "no run '' here" in inspector.get("api/card").json()["error"]
        write_run(tmp_path, "first", metrics=steps(8), error="<b>", state="failed")
        (tmp_path / "outside").mkdir()
        (runs / "no-run").mkdir()
        (runs / "latest").symlink_to("first")
        write_stored_run(tmp_path / "outside" / "secret")
        assert [run["name"] for run in inspector.json("api/runs")["runs"]] == ["first"]
        found = inspector.json("api/run", run="first")
        assert (found["status"], found["error"], found["metrics"]) == ("failed", "<b>", 8)
        for name in ("no-run", "secret", "../outside/secret", "first/../first", str(tmp_path / "outside" / "secret")):
            for view in ("card", "run", "config", "report"):
                assert inspector.get(f"api/{view}", run=name).status_code == 404, (view, name)


# -- threads


def test_slow_queries_are_504_and_end_and_leave_room_for_others(
    inspector: Inspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10^14 rows are more than anybody waits for."""
    slow = "(select sum(a.range * b.range) from range(10000000) a, range(10000000) b) > 0"
    monkeypatch.setattr(api, "DEADLINE_S", 0.2)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: inspector.get("api/rollouts", run="one", q=slow), range(8)))
    assert [answer.status_code for answer in answers] == [504] * 8
    monkeypatch.setattr(api, "DEADLINE_S", 20.0)
    assert inspector.json("api/rollouts", run="one", limit=1)["rows"]


# -- starting


def test_a_port_that_is_taken_is_said_before_anything_is_served(small: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}.*--port"):
            serve([RunDir(small)], port=port)


def test_beyond_loopback_addresses_are_answered_and_foreign_names_are_not(small: Path) -> None:
    with serving(small, host="0.0.0.0") as inspector:
        assert inspector.get("api/runs", headers={**BEARER, "host": "10.0.0.7:80"}).status_code == 200
        assert inspector.get("api/runs", headers={**BEARER, "host": "evil.example"}).status_code == 403


def test_the_command_prints_an_address_that_opens_and_ends_by_ctrl_c(small: Path) -> None:
    command = [sys.executable, "-m", "grpo_async", "inspect-rollouts", str(small), "--web", "--no-browser"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            address = next(line for line in process.stderr if "#token=" in line).split()[-1]
            origin, _, token = address.partition("/#token=")
            with httpx.Client(timeout=LIMIT_S) as client:
                assert client.get(f"{origin}/api/runs").status_code == 401
                found = client.get(f"{origin}/api/runs", headers={"authorization": f"Bearer {token}"})
            assert found.json()["runs"][0]["name"] == "run"
            assert origin.startswith("http://127.0.0.1:")
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert "Traceback" not in output + errors
    assert token not in output + errors  # it is not repeated, by an access log for example


def test_a_browser_is_opened_by_a_file_of_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[tuple[str, str]] = []

    def note(url: str) -> bool:
        opened.append((url, Path(unquote(url.removeprefix("file://"))).read_text(encoding="utf-8")))
        return False

    monkeypatch.setattr(webbrowser, "open", note)
    _open_in_browser('http://127.0.0.1:1/#token=a"b', tmp_path)
    ((url, page),) = opened
    assert "token" not in url  # which everybody on the machine may see
    assert "url=http://127.0.0.1:1/#token=a&quot;b" in page
    assert "no browser" in capsys.readouterr().err


def test_a_branch_of_an_agent_is_a_page_of_its_own_below_its_rollout(tmp_path: Path) -> None:
    with LineStore(tmp_path / "run" / "rollouts") as store:
        store.append(build_group(7, [build_branched_rollout("g7-r0")]), GroupStatus.FILTERED, 1)
    with serving(tmp_path / "run") as inspector:
        whole = inspector.json("api/rollout", run="run", id="g7-r0")
        branch = inspector.json("api/rollout", run="run", id="g7-r0.b1")
        assert inspector.get("api/rollout", run="run", id="g7-r0.b9").status_code == 404
    assert [line["rollout_id"] for line in whole["tree"] if line["is_path"]] == ["g7-r0", "g7-r0.b1", "g7-r0.b2"]
    assert (whole["root"], branch["root"], branch["rollout"]["parent"]) == ("g7-r0", "g7-r0", "g7-r0")
    assert branch["tokens"]["completion_ids"] == [8, 9]
    assert branch["summaries"][0]["rollout_id"] == "g7-r0"
    assert "branches" not in whole["rollout"]
