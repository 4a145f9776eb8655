"""The preflight's checks of addresses, memory and disk, and the runner that isolates each check."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from grpo_async.checks import preflight_machine
from grpo_async.checks.doctor_hardware import Memory
from grpo_async.checks.memory import estimate_trainer
from grpo_async.checks.preflight_context import PreflightContext
from grpo_async.checks.preflight_machine import check_addresses, check_disk, check_memory
from grpo_async.checks.report import (
    Check,
    as_json,
    from_json,
    passed,
    print_checks,
    run_check,
    warned,
    worst_status,
)
from grpo_async.errors import ConfigError
from grpo_async.inference.surface import ServerInfo
from grpo_async.rundir import RunDir
from grpo_async.utils.loopback import is_loopback
from grpo_async.weights.verify import TrainerScores
from tests.launcher.support import make_config

SHAPES = {"a": (1000, 1000), "b": (500,)}  # 1,000,500 parameters
NUMBER = 1_000_500


def _context(folder: Path, **changes: Any) -> PreflightContext:
    config = make_config(folder, **changes.pop("sections", {}))
    rundir = RunDir(config.run_path)
    rundir.create()
    fields: dict[str, Any] = {
        "config": config,
        "rundir": rundir,
        "renderer": None,
        "servers": [],
        "prompts": [],
        "probes": [],
        "score_on_trainer": lambda *_: TrainerScores(logprobs=[], rounded_anew=[]),
        "parameter_problems": [],
        "parameter_shapes": SHAPES,
        "num_embeddings": 10,
        "policy_version": 0,
        "transport": "gloo",
        "first_push": {},
        "device": "cpu",
        "token": "secret",
    }
    return PreflightContext(**{**fields, **changes})


def _server(url: str = "http://127.0.0.1:9") -> Any:
    info = ServerInfo(
        engine="embedded", engine_version="1", model="m", dtype="float32", max_model_len=64, policy_version=0
    )
    return SimpleNamespace(name="server 0", url=url, info=info, control=None)


@contextmanager
def _answering(status: int) -> Iterator[int]:
    """A server that answers every GET with `status`; yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert "authorization" not in self.headers
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join(10.0)


# Addresses.


@pytest.mark.parametrize(
    ("host", "status", "words"),
    [
        ("127.0.0.1", "pass", "is not reached from outside"),
        ("192.0.2.1", "fail", "cannot be bound on this machine"),  # TEST-NET-1: nobody's
        ("0.0.0.0", "warn", "listens on every network"),
    ],
)
def test_the_address_of_the_weight_group(tmp_path: Path, host: str, status: str, words: str) -> None:
    (check,) = check_addresses(_context(tmp_path, sections={"weights": {"host": host}}))
    assert (check.status, words in check.detail) == (status, True), check.detail


@pytest.mark.parametrize(
    ("host", "answer", "status", "words"),
    [
        ("127.0.0.1", 401, "pass", "is on loopback and wants the token"),
        ("127.0.0.1", 200, "warn", "answers 200 without a token"),
        ("127.0.0.1", 404, "warn", "answers 404 without a token"),
        # inet_aton's spelling of 127.0.0.1, which is_loopback does not know: stands for an address on a network
        ("127.1", 401, "warn", "without TLS"),
        ("127.1", 200, "fail", "answers 200 without a token"),
    ],
)
def test_a_server_must_want_the_token(tmp_path: Path, host: str, answer: int, status: str, words: str) -> None:
    with _answering(answer) as port:
        _, check = check_addresses(_context(tmp_path, servers=[_server(f"http://{host}:{port}")]))
    assert (check.status, words in check.detail) == (status, True), check.detail


@pytest.mark.parametrize(("url", "status"), [("http://127.0.0.1:9", "warn"), ("http://10.1.2.3:9", "fail")])
def test_a_run_without_a_token_is_for_loopback_only(tmp_path: Path, url: str, status: str) -> None:
    _, check = check_addresses(_context(tmp_path, servers=[_server(url)], token=None))
    assert check.status == status


def test_what_counts_as_loopback() -> None:
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1"))
    assert not any(is_loopback(host) for host in ("", "0.0.0.0", "10.0.0.1", "example.org", "localhost.example.org"))


# Memory and disk.


@pytest.mark.parametrize(("share", "status"), [(2.0, "pass"), (1.05, "warn"), (0.9, "warn"), (0.1, "warn")])
def test_memory_that_training_will_still_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, status: str
) -> None:
    """Available = share x what is to come: more than 1 / 0.9 passes; an estimate never refuses."""
    context = _context(tmp_path, sections={"launch": {"num_trainer_ranks": 2}})
    estimate = estimate_trainer(context.config, NUMBER, on_gpu=False)
    coming = 2 * (estimate.total - estimate.weights)
    monkeypatch.setattr(
        preflight_machine, "machine_memory", lambda: Memory(total=1 << 40, available=int(share * coming))
    )
    (check,) = check_memory(context)
    assert check.status == status
    assert "2 trainer rank(s)" in check.detail
    if status != "pass":
        assert "training.micro_batch_tokens" in check.detail


def test_the_cache_of_embedded_servers_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_machine, "machine_memory", lambda: Memory(total=1 << 40, available=2 << 30))
    slots = {"inference": {"engine": "embedded", "embedded": {"max_slots": 100_000}}}
    assert check_memory(_context(tmp_path, servers=[_server()]))[0].status == "pass"
    (check,) = check_memory(_context(tmp_path, servers=[_server()], sections=slots))
    assert check.status == "warn"
    assert "1 server(s): weights" in check.detail


def test_servers_of_others_are_not_counted(tmp_path: Path) -> None:
    sections = {"inference": {"urls": ["http://127.0.0.1:9"], "embedded": {"max_slots": 100_000}}}
    (check,) = check_memory(_context(tmp_path, servers=[_server()], sections=sections))
    assert "server(s)" not in check.detail


def _with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(preflight_machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


# keep_last 2: three checkpoints of 3 x 4 bytes x N, and an export of 4 bytes x N
NEEDED = 40 * NUMBER


@pytest.mark.parametrize(("free", "status"), [(2 * NEEDED, "pass"), (int(1.05 * NEEDED), "warn"), (NEEDED - 1, "fail")])
def test_disk_for_checkpoints_and_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: str
) -> None:
    _with_free(monkeypatch, free)
    check = check_disk(_context(tmp_path))
    assert check.status == status
    assert check.detail.startswith("3 checkpoint(s) of 11.4 MiB and the model of 3.8 MiB need 38.2 MiB")


def test_checkpoints_that_are_there_need_no_further_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = _context(tmp_path)
    for step in (1, 2):
        context.rundir.checkpoint(step).mkdir(parents=True)
    _with_free(monkeypatch, 2 * 16 * NUMBER)
    check = check_disk(context)
    assert check.status == "pass"
    assert check.detail.startswith("1 checkpoint(s)")


# The runner and the report.


def test_errors_of_a_check_become_its_result() -> None:
    def refuse() -> Check:
        raise ConfigError("write 127.0.0.1")

    def broken() -> Check:
        raise KeyError("oops")

    def slow() -> Check:
        raise TimeoutError("a time limit within the check")

    assert run_check("one", refuse, limit_s=5.0) == [Check("one", "fail", "write 127.0.0.1")]
    assert run_check("two", broken, limit_s=5.0) == [Check("two", "fail", "the check itself broke: KeyError: 'oops'")]
    assert run_check("three", slow, limit_s=5.0)[0].detail == "TimeoutError: a time limit within the check"


def test_a_check_that_hangs_is_left_after_its_limit() -> None:
    never = threading.Event()

    def hang() -> Check:
        never.wait(20.0)
        return passed("x", "too late")

    (timed,) = run_check("x", hang, limit_s=0.1, setting="weights.timeout_s")
    assert timed.status == "fail"
    assert "raise `weights.timeout_s`" in timed.detail
    (plain,) = run_check("x", hang, limit_s=0.1)
    assert plain.detail.startswith("no result within 0 s")
    never.set()


def test_the_worst_status_is_that_of_the_worst_check() -> None:
    good, doubtful, bad = passed("a", ""), warned("b", ""), Check("c", "fail", "")
    assert worst_status([]) == "pass"
    assert worst_status([good, doubtful]) == "warn"
    assert worst_status([bad, good, doubtful]) == "fail"


def test_json_brings_the_checks_back() -> None:
    checks = [passed("a", "x"), warned("b", "y")]
    assert from_json(as_json(checks)) == checks
    for text in ("{}", "[]", '{"checks": [{"name": 1}]}', "not json"):
        with pytest.raises(ValueError, match=r".+"):
            from_json(text)


def test_the_table_shows_text_as_text() -> None:
    console = Console(file=StringIO(), width=120)
    print_checks(console, [passed("a", "fine"), warned("b", "[red]no markup[/red]")], title="Checks")
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert [line.split() for line in output.splitlines()] == [
        ["Checks"],
        ["pass", "a", "fine"],
        ["warn", "b", "[red]no", "markup[/red]"],
        ["1", "passed,", "1", "warned,", "0", "failed"],
    ]
