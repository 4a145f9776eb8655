"""What benchmarks of whole processes share: a run's config, a server as `train` starts it, a command with a log."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.report import ROOT
from grpo_async.processes.machine import free_ports

START_TIMEOUT_S = 600.0
_END_TIMEOUT_S = 30.0
_LOG_TIMEOUT_S = 10.0
_LOADED = re.compile(r"loaded \d+ parameters in ([0-9.]+) s")


def write_config(folder: Path, **sections: Any) -> Path:
    """The config of a run in `folder`, with the model in `folder`/model where `sections` name no other."""
    config = {
        "run": {"name": "bench", "dir": str(folder)},
        "model": {"path": str(folder / "model")},
        "data": {"train": {"type": "jsonl", "path": str(folder / "train.jsonl")}},
        "rewards": [{"function": "grpo_async.rewards.text:exact_match"}],
        **sections,
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")  # JSON is YAML
    return path


def read_lines(path: Path) -> list[Any]:
    """The values of a file with one line of JSON each."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    url: str
    log: Path

    def load_times(self) -> list[float]:
        """Seconds of each load of pushed weights in the server's log so far."""
        return [float(value) for value in _LOADED.findall(self.log.read_text(errors="replace"))]

    def wait_for_load_time(self, seen: int) -> float:
        """The load time of the push that just ended, for the slowest worker; `seen`: the number of load times before it.

        Raises:
            SystemExit: the log does not say.
        """
        ends_at = time.monotonic() + _LOG_TIMEOUT_S
        while len(times := self.load_times()) <= seen:
            if time.monotonic() > ends_at:
                raise SystemExit(f"the server's log has no load time: {self.log}")
            time.sleep(0.01)
        return max(times[seen:])


# `serve-vllm` would make a token where there is none, and TRL sends none
_WITHOUT_TOKEN = """
import sys
from grpo_async.config.loader import load_config
from grpo_async.servers.vllm.command import serve_vllm
serve_vllm(load_config(sys.argv[1]), int(sys.argv[3]))
"""


@contextmanager
def serving(
    config: Path, engine: str, *, environment: Mapping[str, str] | None = None, has_token: bool = True
) -> Iterator[Server]:
    """A server as `train` starts it, once it answers. `environment` is that of its process; None: this one's. Without a token (vLLM
    only) everybody on this machine may use it."""
    (port,) = free_ports("127.0.0.1", 1)
    log = config.with_name("server.log")
    command = ["-m", "grpo_async", f"serve-{engine}"] if has_token else ["-c", _WITHOUT_TOKEN]
    command = [sys.executable, *command, str(config), "--port", str(port)]
    with log.open("wb") as output, _started(command, output, environment) as process:
        try:
            server = Server(f"http://127.0.0.1:{port}", log)
            _wait_until_healthy(server.url, process)
            yield server
        except BaseException:
            print(_tail(log), file=sys.stderr)
            raise


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    import httpx

    ends_at = time.monotonic() + START_TIMEOUT_S
    while True:
        with suppress(httpx.TransportError):  # not yet
            if httpx.get(f"{url}/health", timeout=5.0, trust_env=False).is_success:
                return
        if process.poll() is not None:
            raise SystemExit(f"the server has ended with {process.returncode}")
        if time.monotonic() > ends_at:
            raise SystemExit(f"the server does not answer within {START_TIMEOUT_S:g} s")
        time.sleep(0.1)


def run_logged(command: Sequence[str], log: Path, *, environment: Mapping[str, str], timeout_s: float) -> None:
    """Run a command in the checkout, until it ends.

    Raises:
        RuntimeError: it failed or took longer than `timeout_s`; with the end of its log.
    """
    with log.open("wb") as output:
        code = run_command(command, output, environment=environment, timeout_s=timeout_s)
    if code != 0:
        ended = f"did not end within {timeout_s:g} s" if code is None else f"ended with {code}"
        raise RuntimeError(f"{' '.join(command)} {ended}; the end of its log:\n{_tail(log)}")


def run_command(
    command: Sequence[str], output: IO[bytes] | None = None, *, environment: Mapping[str, str], timeout_s: float
) -> int | None:
    """Run a command in the checkout; returns its exit code, or None when it was stopped after `timeout_s`. It prints to `output`;
    None: where this process prints."""
    with _started(command, output, environment) as process, suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=timeout_s)
    return None


@contextmanager
def _started(
    command: Sequence[str], output: IO[bytes] | None, environment: Mapping[str, str] | None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, which is ended with all of that session."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_END_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=_END_TIMEOUT_S)


def _tail(log: Path) -> str:
    return log.read_bytes()[-4000:].decode(errors="replace")
