"""The API over a real socket: who may read, what is answered, what is refused."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from grpo_async.errors import ConfigError
from grpo_async.rundir import RunDir
from grpo_async.store import RolloutStore
from grpo_async.viewer.web.serve import _listen_at_own_port, _open_in_browser, listen, own_port, serve
from tests.viewer.web.serving import (
    HOSTILE,
    LIMIT_S,
    TOKEN,
    Inspector,
    append_steps,
    serving,
    write_hostile_run,
    write_run,
)


@pytest.fixture(scope="module")
def inspector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inspector]:
    """Two runs: `one` of 4 steps with 3 groups of 4 rollouts each, `hostile`."""
    folder = tmp_path_factory.mktemp("runs")
    with serving(write_run(folder / "one"), write_hostile_run(folder / "hostile")) as running:
        yield running


# -- who may read


def test_data_needs_the_token_and_the_page_needs_none(inspector: Inspector) -> None:
    assert inspector.get("", headers={}).status_code == 200
    assert inspector.get("static/web/main.js", headers={}).status_code == 200
    for path in ("api/runs", "api/summary", "api/rollouts", "api/rollout", "api/nothing", "api/session"):
        refused = inspector.get(path, headers={})
        assert refused.status_code == 401, path
        assert "token" in refused.json()["error"]


@pytest.mark.parametrize("header", ["Bearer wrong", TOKEN, f"bearer {TOKEN}", f"Bearer {TOKEN}x", "Bearer", "Basic é"])
def test_a_wrong_token_is_refused(inspector: Inspector, header: str) -> None:
    with httpx.Client(timeout=LIMIT_S) as client:
        request = client.build_request("GET", f"{inspector.origin}/api/runs")
        request.headers["authorization"] = header
        assert client.send(request).status_code == 401


def test_the_token_is_exchanged_for_a_cookie_that_scripts_and_other_sites_cannot_use(inspector: Inspector) -> None:
    with httpx.Client(timeout=LIMIT_S) as client:
        session = f"{inspector.origin}/api/session"
        assert client.post(session).status_code == 401
        assert client.post(session, headers={"authorization": "Bearer wrong"}).status_code == 401
        given = client.post(session, headers={"authorization": f"Bearer {TOKEN}"})
        assert given.status_code == 204
        cookie = given.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
        assert TOKEN not in cookie
        assert client.get(f"{inspector.origin}/api/runs").status_code == 200  # by the cookie
        name, _, value = cookie.partition(";")[0].partition("=")
        client.cookies.clear()
        wrong = {"cookie": f"{name}={value}x"}
        assert client.get(f"{inspector.origin}/api/runs", headers=wrong).status_code == 401
        twice = {"cookie": f"{name}={value}; {name}={value}"}
        assert client.get(f"{inspector.origin}/api/runs", headers=twice).status_code == 401


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", ""])
def test_another_name_in_the_host_header_is_refused_even_with_the_token(inspector: Inspector, host: str) -> None:
    bearer = {"authorization": f"Bearer {TOKEN}"}
    for path in ("", "api/runs", "static/theme.css"):
        assert inspector.get(path, headers={**bearer, "host": host}).status_code in (400, 403)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:9", "127.9.9.9"])
def test_loopback_names_with_any_port_are_answered_since_ports_are_forwarded(inspector: Inspector, host: str) -> None:
    assert inspector.get("api/runs", headers={"authorization": f"Bearer {TOKEN}", "host": host}).status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_request_from_a_page_of_another_site_or_port_is_refused(inspector: Inspector, site: str) -> None:
    headers = {"authorization": f"Bearer {TOKEN}", "sec-fetch-site": site}
    assert inspector.get("api/runs", headers=headers).status_code == 403
    assert inspector.get("", headers=headers).status_code == 200  # a link that is followed


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
        request = client.build_request("GET", inspector.origin, headers={"authorization": f"Bearer {TOKEN}"})
        request.extensions["target"] = f"/{path}".encode()
        assert client.send(request).status_code == 404


# -- what is answered


def test_runs_come_with_their_names_and_the_query_language(inspector: Inspector) -> None:
    found = inspector.json("api/runs")
    assert [run["name"] for run in found["runs"]] == ["one", "hostile"]
    assert {"reward", "status", "group_std"} <= {field["name"] for field in found["fields"]}
    assert {"truncated", "failed"} <= {word["name"] for word in found["words"]}


def test_pages_follow_each_other_without_gap(inspector: Inspector) -> None:
    first = inspector.json("api/rollouts", run="one", limit=30, sort="seq,index", count=1)
    second = inspector.json("api/rollouts", run="one", limit=30, offset=30, sort="seq,index")
    assert first["counts"] == {"rollouts": 48, "groups": 12}
    ids = [row["rollout_id"] for row in first["rows"] + second["rows"]]
    assert ids == [f"g{group}-r{index}" for group in range(12) for index in range(4)]


def test_a_query_and_an_order_hold_for_groups_too(inspector: Inspector) -> None:
    rows = inspector.json("api/groups", run="one", q="reward=0 and step<=2", sort="-id")["rows"]
    assert [(row["group_id"], row["num_matching"], row["reward_mean"]) for row in rows] == [
        (5, 2, 0.5), (4, 2, 0.5), (3, 2, 0.5), (2, 3, 0.25), (1, 3, 0.25), (0, 3, 0.25),
    ]  # fmt: skip


def test_a_mistake_in_a_query_has_its_place(inspector: Inspector) -> None:
    for view in ("rollouts", "groups", "histogram", "steps", "extremes"):
        answer = inspector.get(f"api/{view}", run="one", q="truncated and rewrd<1", until=3)
        assert answer.status_code == 400
        problem = answer.json()
        assert (problem["position"], problem["length"]) == (14, 5)
        assert "reward" in problem["suggestions"]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"limit": "501"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"offset": "-1"}, "offset"),
        ({"offset": "9" * 30}, "offset"),
        ({"q": "a" * 5000}, "characters"),
        ({"sort": "nothing"}, "nothing"),
        ({"sort": "reward; drop table rows"}, "reward"),
        ({"until": "1.5"}, "until"),
    ],
)
def test_a_wrong_parameter_is_named(inspector: Inspector, parameters: dict[str, Any], words: str) -> None:
    answer = inspector.get("api/rollouts", run="one", **parameters)
    assert answer.status_code == 400
    assert words in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("api/summary", {"run": "two"}),
        ("api/summary", {"run": "../one"}),
        ("api/summary", {"run": "one@7"}),
        ("api/group", {"run": "one", "id": "99"}),
        ("api/rollout", {"run": "one", "id": "g99-r0"}),
        ("api/nothing", {}),
    ],
)
def test_what_is_not_there_is_404(inspector: Inspector, path: str, parameters: dict[str, Any]) -> None:
    answer = inspector.get(path, **parameters)
    assert answer.status_code == 404
    assert answer.json()["error"]


def test_a_rollout_comes_with_every_figure_of_its_tokens(inspector: Inspector) -> None:
    found = inspector.json("api/rollout", run="hostile", id="g0-r0")
    tokens = found["tokens"]
    assert tokens["ids"] == [5, 6, 90, 91, 7]
    assert tokens["mask"] == [1, 1, 0, 0, 1]
    assert tokens["logprobs"][0] == pytest.approx(-0.25)
    assert tokens["trainer_logprobs"][1] == pytest.approx(-0.75 + 0.1)
    assert tokens["trainer_logprobs"][2] is None  # the tool's token
    assert tokens["weights"][4] == pytest.approx(1.105)
    assert tokens["mark_words"][str(tokens["marks"][0])] == ["clipped high"]
    classes = [tokens["palette"][place] for place in tokens["classes"]["marks"]]
    assert classes == ["clipped-high", "trained", "untrained", "untrained", "trained"]
    assert tokens["texts"] is None
    assert "token texts are left out" in tokens["texts_missing"]
    assert found["rollout"]["turns"][0]["tool_calls"][0]["result"] == HOSTILE
    assert "logprobs" not in found["rollout"]


def test_rows_up_to_a_seq_stay_as_they_are_while_a_run_writes(tmp_path: Path) -> None:
    root = write_run(tmp_path / "live", num_steps=1)
    with serving(root) as inspector, RolloutStore(RunDir(root).rollouts) as store:
        until = inspector.json("api/summary")["until"]
        before = inspector.json("api/rollouts", until=until, count=1)
        append_steps(store, [2], first=100)
        for _ in range(100):  # the table looks again at most twice a second
            beat = inspector.json("api/pulse")
            if beat["counts"]["groups"] == 6:
                break
        assert (beat["counts"], beat["until"]) == ({"rollouts": 24, "groups": 6}, 5)
        assert inspector.json("api/rollouts", until=until, count=1) == before
        assert inspector.json("api/rollouts", count=1)["counts"]["rollouts"] == 24


def test_histogram_and_steps_are_those_of_the_query(inspector: Inspector) -> None:
    histogram = inspector.json("api/histogram", run="one", field="reward", q="step=1")
    assert sum(histogram["counts"]) == 12
    assert (histogram["counts"][0], histogram["counts"][-1]) == (9, 3)  # of step 1 one rollout of four has reward 1
    steps = inspector.json("api/steps", run="one")["steps"]
    assert [(step["step"], step["reward_mean"]) for step in steps] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]


def test_the_same_prompt_is_found_in_all_steps(inspector: Inspector) -> None:
    first = inspector.json("api/group", run="one", id=0)["summary"]
    groups = inspector.json("api/prompt", run="one", hash=first["prompt_hash"])["groups"]
    assert [(group["group_id"], group["step"]) for group in groups] == [(0, 1), (3, 2), (6, 3), (9, 4)]
    improved = inspector.json("api/extremes", run="one", k=1)["improved"]
    assert (improved[0]["prompt_hash"], improved[0]["change"]) == (first["prompt_hash"], 0.75)


def test_metrics_grow_and_later_lines_of_a_step_count(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", num_steps=1)
    path = RunDir(root).metrics
    path.write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": NaN}\n{"step": 3, "rew', encoding="utf-8")
    with serving(root) as inspector:
        # NaN is no JSON: orjson refuses that line, and the torn one is not whole yet
        assert inspector.json("api/metrics", names="reward")["series"] == {"reward": [0.5]}
        with path.open("a", encoding="utf-8") as file:
            file.write('ard": 3.0}\n{"step": 2, "reward": 2.0, "kl": 1}\n')  # a resume from step 1 writes step 2 again
        found = inspector.json("api/metrics", names="reward,kl")
        assert found["steps"] == [1, 2]
        assert found["series"] == {"reward": [0.5, 2.0], "kl": [None, 1.0]}
        assert found["known"]["reward"]["help"]


def test_metrics_that_a_resume_replaced_are_read_anew_also_where_the_file_is_no_shorter(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", num_steps=1)
    path = RunDir(root).metrics
    path.write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.5}\n', encoding="utf-8")
    with serving(root) as inspector:
        assert inspector.json("api/metrics", names="reward")["series"] == {"reward": [0.5, 0.5]}
        other = path.with_suffix(".new")
        other.write_text('{"step": 1, "reward": 0.1}\n{"step": 2, "reward": 0.25, "kl": 1}\n', encoding="utf-8")
        other.replace(path)
        assert inspector.json("api/metrics", names="reward")["series"] == {"reward": [0.1, 0.25]}
        path.unlink()
        assert inspector.json("api/metrics", names="reward")["steps"] == []


def test_who_waited_for_whom_is_of_the_window_alone(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", num_steps=1)
    spans = [("step", "trainer", 0, 10), ("wait for samples", "trainer", 0, 4), ("train", "trainer", 4, 10)]
    spans += [("generate", "rollout/0", 1, 5)]
    lines = [
        json.dumps({"name": name, "lane": lane, "start": 1000 + start, "end": 1000 + end, "details": {}})
        for name, lane, start, end in spans
    ]
    with serving(root) as inspector:
        assert inspector.json("api/usage") == {"wall_s": None}
        RunDir(root).events.write_text("\n".join([*lines, ""]), encoding="utf-8")
        whole = inspector.json("api/usage")
        assert (whole["wall_s"], whole["trainer_waits_s"], whole["trainer_waits_generating_s"]) == (10.0, 4.0, 3.0)
        assert (whole["generation_idle_s"], whole["both_s"]) == (6.0, 1.0)
        assert [(wait["name"], wait["end"]) for wait in whole["waits"]] == [("wait for samples", 1004.0)]
        part = inspector.json("api/usage", start=1002, end=1006)
        assert (part["wall_s"], part["trainer_waits_s"], part["generation_idle_s"]) == (4.0, 2.0, 1.0)


def test_the_state_of_a_run_is_judged_and_not_only_read(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", num_steps=1)
    status = {"state": "running", "host": platform.node(), "pid": 2**31 - 2, "pid_started_at": 1.0, "step": 3}
    with serving(root) as inspector:
        assert inspector.json("api/pulse")["status"]["state"] is None
        RunDir(root).status.write_text(json.dumps(status), encoding="utf-8")
        found = inspector.json("api/pulse")["status"]
        assert (found["state"], found["step"]) == ("killed", 3)
        assert "gone" in found["why"]


def test_a_window_of_the_timeline_has_what_touches_it(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", num_steps=1)
    spans = [(0.0, 10.0, "long"), (1.0, 2.0, "early"), (7.0, 8.0, "late")]
    lines = [
        json.dumps({"name": name, "lane": "trainer", "start": 1000 + start, "end": 1000 + end, "details": {}})
        for start, end, name in spans
    ]
    path = RunDir(root).events
    with serving(root) as inspector:
        assert inspector.json("api/timeline") == {"spans": None}
        path.write_text("\n".join([*lines, '{"name": "torn']), encoding="utf-8")
        found = inspector.json("api/timeline", start=1006, end=1009)
        assert [span["name"] for span in found["spans"]] == ["long", "late"]
        assert (found["first"], found["last"], found["num_left_out"]) == (1000.0, 1010.0, 0)
        path.write_text("\n".join([lines[1], ""]), encoding="utf-8")  # shorter: read anew
        assert [span["name"] for span in inspector.json("api/timeline")["spans"]] == ["early"]


def test_evaluations_are_runs_of_their_own(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", num_steps=1)
    with RolloutStore(RunDir(root).evaluation(5)) as store:
        append_steps(store, [1], word="evaluated", groups_a_step=1)
    with serving(root) as inspector:
        assert inspector.json("api/runs")["runs"][0]["evaluations"] == [{"name": "run@5", "step": 5}]
        rows = inspector.json("api/rollouts", run="run@5", sort="index")["rows"]
        assert [row["completion_preview"] for row in rows] == [f"evaluated 1 {i}" for i in range(4)]


def test_two_runs_of_one_name_keep_apart(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a" / "run", num_steps=1)
    second = write_run(tmp_path / "b" / "run", num_steps=2)
    with serving(first, second) as inspector:
        assert [run["name"] for run in inspector.json("api/runs")["runs"]] == ["run", "run~2"]
        assert inspector.json("api/summary", run="run~2")["counts"]["groups"] == 6


# -- starting


def test_a_taken_port_and_a_wrong_query_are_said_before_anything_is_served(tmp_path: Path) -> None:
    root = RunDir(write_run(tmp_path / "run", num_steps=1))
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}.*--port"):
            serve([root], port=port)
    with pytest.raises(ConfigError, match="rewrd"):
        serve([root], query="rewrd<1")
    with pytest.raises(ConfigError, match="rewrd"):
        serve([root], sort="-rewrd")
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        serve([root], host="192.0.2.1")


def test_a_run_has_its_own_port_so_that_links_hold_after_the_next_start(tmp_path: Path) -> None:
    one, two = RunDir(tmp_path / "one"), RunDir(tmp_path / "two")
    port = own_port([one])
    assert port == own_port([RunDir(tmp_path / "two" / ".." / "one")])
    assert len({port, own_port([two]), own_port([one, two])}) == 3
    assert 1024 < port < 32768  # not of those that a system gives to whoever asks for any
    with _listen_at_own_port([one], "127.0.0.1") as first, _listen_at_own_port([one], "127.0.0.1") as second:
        ports = [listener.getsockname()[1] for listener in (first, second)]
    assert ports[0] == port or ports[0] >= 32768  # where somebody else has it
    assert ports[1] != ports[0]


def test_beyond_loopback_addresses_are_answered_and_foreign_names_are_not(tmp_path: Path) -> None:
    with serving(write_run(tmp_path / "run", num_steps=1), host="0.0.0.0") as inspector:
        bearer = {"authorization": f"Bearer {TOKEN}"}
        assert inspector.get("api/runs", headers={**bearer, "host": "10.0.0.7:80"}).status_code == 200
        assert inspector.get("api/runs", headers={**bearer, "host": "evil.example"}).status_code == 403


def test_the_command_prints_an_address_that_opens_and_ends_by_ctrl_c(tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", num_steps=1)
    command = [sys.executable, "-m", "grpo_async", "inspect-rollouts", str(root), "--web", "--no-browser"]
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


def test_a_browser_is_opened_by_a_file_of_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, str]] = []

    def note(url: str) -> bool:
        opened.append((url, Path(unquote(url.removeprefix("file://"))).read_text(encoding="utf-8")))
        return False

    monkeypatch.setattr(webbrowser, "open", note)
    said: list[str] = []
    _open_in_browser('http://127.0.0.1:1/#token=a"b', tmp_path, said.append)
    ((url, page),) = opened
    assert "token" not in url  # which everybody on the machine may see
    assert "url=http://127.0.0.1:1/#token=a&quot;b" in page
    assert "no browser" in said[0]
