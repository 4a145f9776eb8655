"""What a weight push costs and what requests see of it, beside a bare broadcast of the same bytes.

    python -m benchmarks push [--engine vllm] [--megabytes 400] [--rounds 15] [--requests 4] [--json FILE]
    python -m benchmarks push --transport nccl --device cuda --dtype bfloat16 --shape 1.7b      # two GPUs
    python -m benchmarks push --transport ipc --device cuda --dtype bfloat16 --shape 0.6b       # one GPU

A server started as a run does serves a model with random weights. Without requests, in every round and in turns: a bare broadcast
(another process receives the same buckets into fresh memory) and a push as a run makes it; the server's log has its load time.
Then as many pushes with --requests streams in flight: the longest gap between two tokens of a stream around a push, less its usual
gap. --trainer-dtype float32 --dtype bfloat16 makes gathering a cast, which the sends of other buckets can hide.

Target on the CPU: the median of  push / (1.2 x bare broadcast + load)  is at most 1.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.push_parts import broadcast, server, streams
from benchmarks.report import Report, add_options, in_turns, median_interval

MAX_RATIO = 1.0
BARE_SHARE = 1.2
STEP_TIMEOUT_S = 300.0
PHASES = ("start", "transfer", "gather", "send", "pause", "finish", "resume")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["vllm", "embedded"], default="vllm")
    parser.add_argument("--transport", choices=["gloo", "nccl", "ipc"], default="gloo")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of trainer and server")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the server")
    parser.add_argument("--trainer-dtype", choices=["float32", "bfloat16"], help="without it the server's")
    parser.add_argument("--shape", choices=sorted(server.SHAPES), help="of a Qwen3; without it one of --megabytes")
    parser.add_argument("--megabytes", type=int, default=400, help="of float32 parameters")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=4, help="streams in flight in the second half; 0: no such half")
    parser.add_argument("--bucket-mb", type=int, default=8)
    parser.add_argument("--mode", choices=["recompute", "keep_kv", "drain", "abort"], default="recompute")
    add_options(parser)
    options = parser.parse_args(arguments)
    os.environ.setdefault("GRPO_ASYNC_TOKEN", secrets.token_urlsafe(16))
    with tempfile.TemporaryDirectory(prefix="bench-push-") as name:
        folder = Path(name)
        model = server.make_model(folder / "model", options)
        config = server.write_config(folder, options)
        with server.serving(config, folder, options) as (url, log), _connected(url, model, options) as pusher:
            quiet = _measure_quiet(pusher, log, options)
            busy = _measure_busy(pusher, url, options) if options.requests else None
    return _report(quiet, busy, options)


class Pusher:
    """A trainer's end, as `train` has it: pushes version 1, 2, 3, ... of one model to one server."""

    def __init__(self, fleet: Any, transport: Any, parameters: Any, options: argparse.Namespace) -> None:
        from grpo_async.weights.push import PushSettings

        self._fleet, self._transport, self._parameters = fleet, transport, parameters
        self._settings = PushSettings(
            mode=options.mode, timeout_s=STEP_TIMEOUT_S, drain_timeout_s=STEP_TIMEOUT_S
        )  # fmt: skip
        self._version = 0
        self.bucket_sizes = [
            sum(tensor.nbytes for tensor in tensors) for tensors in parameters.buckets(transport.bucket_bytes)
        ]

    def push(self) -> dict[str, float]:
        """One push; its metrics (PushReport.metrics)."""
        from grpo_async.weights.push import push_weights

        self._version += 1
        (member,) = self._fleet.members()
        metrics: dict[str, float] = push_weights(
            self._parameters, version=self._version, targets=[member.control], transport=self._transport,
            settings=self._settings, applying=self._fleet.applying,
        ).metrics()  # fmt: skip
        return metrics


@contextmanager
def _connected(url: str, model: Any, options: argparse.Namespace) -> Iterator[Pusher]:
    import torch

    from grpo_async.inference.fleet import Fleet, FleetSettings
    from grpo_async.training.parameters import ShardedParameters
    from grpo_async.weights.transport import WeightTransport

    torch.set_num_threads(1)  # as the ranks of a run
    settings = FleetSettings(
        heartbeat_interval_s=5.0,
        heartbeat_timeout_s=120.0,
        startup_timeout_s=server.START_TIMEOUT_S,
        longest_startup_s=server.START_TIMEOUT_S,
    )
    fleet = Fleet([url], token=os.environ["GRPO_ASYNC_TOKEN"], settings=settings, control_timeout_s=STEP_TIMEOUT_S)
    transport = WeightTransport(
        options.transport, host="127.0.0.1", bucket_bytes=options.bucket_mb << 20, timeout_s=STEP_TIMEOUT_S,
        device=torch.device(options.device),
    )  # fmt: skip
    parameters = ShardedParameters(model, wire_dtype=getattr(torch, options.dtype), device=transport.device)
    fleet.start()
    try:
        fleet.wait_for_members(
            stop=threading.Event(), deadline_s=server.START_TIMEOUT_S, setting="inference.startup_timeout_s"
        )
        transport.connect([member.control for member in fleet.members()])
        yield Pusher(fleet, transport, parameters, options)
    finally:
        transport.close()
        fleet.close()


@dataclass(frozen=True, slots=True)
class Quiet:
    """Of each round without requests; seconds."""

    pushes: list[dict[str, float]]
    load_s: list[float]
    bare_s: list[float]  # empty on a GPU


def _measure_quiet(pusher: Pusher, log: Path, options: argparse.Namespace) -> Quiet:
    measured = Quiet([], [], [])

    def push() -> None:
        seen = len(server.load_times(log))
        measured.pushes.append(pusher.push())
        measured.load_s.append(server.wait_for_load_time(log, seen))

    if options.device != "cpu":
        for _ in range(options.rounds + 1):
            push()
    else:
        with broadcast.bare_broadcast(pusher.bucket_sizes, timeout_s=STEP_TIMEOUT_S) as bare:
            for _, variant in in_turns(("bare", "push"), options.rounds + 1):
                push() if variant == "push" else measured.bare_s.append(bare())
    # the first round warms up
    return Quiet(measured.pushes[1:], measured.load_s[1:], measured.bare_s[1:])


@dataclass(frozen=True, slots=True)
class Busy:
    """Of the rounds with requests in flight; seconds."""

    pushes: list[dict[str, float]]
    usual_gap_s: float
    """Median between two tokens of a stream, away from pushes."""
    longest_gaps_s: list[float]
    """Of each stream at each push."""


def _measure_busy(pusher: Pusher, url: str, options: argparse.Namespace) -> Busy:
    pushes, windows = [], []
    with streams.streaming(url, options.requests, seed=options.seed, timeout_s=STEP_TIMEOUT_S) as tokens:
        tokens.wait_for_more(streams.TOKENS_BETWEEN)
        for _ in range(options.rounds):
            with tokens.window() as window:
                pushes.append(pusher.push())
                tokens.wait_for_more(1)  # the first after the push ends the gap
            windows.append(window)
            tokens.wait_for_more(streams.TOKENS_BETWEEN)
    usual_gap_s, longest = tokens.gaps(windows)
    return Busy(pushes, usual_gap_s, longest)


def _report(quiet: Quiet, busy: Busy | None, options: argparse.Namespace) -> int:
    report = Report("push", options)
    num_bytes = quiet.pushes[0]["sync/bytes"]
    if quiet.bare_s:
        report.row("bare broadcast", [1e3 * seconds for seconds in quiet.bare_s], "ms")
    report.row("load, by the server", [1e3 * seconds for seconds in quiet.load_s], "ms")
    report.row("push", [1e3 * push["sync/push_s"] for push in quiet.pushes], "ms")
    for phase in PHASES:
        report.row(f"  {phase}", [push[f"sync/{phase}_ms"] for push in quiet.pushes], "ms")
    report.row("  paused", [1e3 * push["sync/pause_s"] for push in quiet.pushes], "ms")
    report.row("gather hidden behind send", [_hidden(push) for push in quiet.pushes], "share")
    report.row("transfer", [push["sync/bytes_per_s"] / 1e6 for push in quiet.pushes], "MB/s")
    if quiet.bare_s:
        report.row("bare broadcast", [num_bytes / seconds / 1e6 for seconds in quiet.bare_s], "MB/s")
        ratios = [
            push["sync/push_s"] / (BARE_SHARE * bare_s + load_s)
            for push, bare_s, load_s in zip(quiet.pushes, quiet.bare_s, quiet.load_s, strict=True)
        ]
        report.row(f"push / ({BARE_SHARE:g} x bare + load)", ratios, "ratio")
        report.target(
            f"push / ({BARE_SHARE:g} x bare broadcast + load), median", statistics.median(ratios), at_most=MAX_RATIO
        )
        low, high = median_interval(ratios, seed=options.seed)
        report.note(f"the median of the ratio is within {low:.3f} and {high:.3f} (95%, bootstrap)")
    if busy is not None:
        with_requests = f"{options.requests} requests: "
        report.row(with_requests + "push", [1e3 * push["sync/push_s"] for push in busy.pushes], "ms")
        report.row(with_requests + "transfer", [push["sync/transfer_ms"] for push in busy.pushes], "ms")
        report.row(with_requests + "paused", [1e3 * push["sync/pause_s"] for push in busy.pushes], "ms")
        report.row(with_requests + "usual gap", [1e3 * busy.usual_gap_s], "ms")
        report.row(
            with_requests + "longest gap - usual", [1e3 * (s - busy.usual_gap_s) for s in busy.longest_gaps_s], "ms"
        )
    report.note(
        f"{num_bytes / 1e6:.1f} MB of {options.dtype} in {len(quiet.pushes)} pushes; engine {options.engine}, {options.transport} "
        f"on {options.device}, weights.mode {options.mode}, buckets of {options.bucket_mb} MiB"
    )
    return report.finish()


def _hidden(push: dict[str, float]) -> float:
    """Share of the gathering that took no time of its own, 0 to 1: what gather and send together took beyond the transfer.
    Worked example: gather 80 ms, send 200 ms, transfer 220 ms -> (80 + 200 - 220) / 80 = 0.75."""
    gather, send, transfer = (push[f"sync/{name}_ms"] for name in ("gather", "send", "transfer"))
    return min(1.0, max(0.0, (gather + send - transfer) / max(gather, 1e-9)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
