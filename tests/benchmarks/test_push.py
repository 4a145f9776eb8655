"""benchmarks/push.py on the embedded engine: every quantity is there, and those that belong together fit."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import push
from benchmarks.push_parts.streams import Tokens, Window
from tests.benchmarks.support import run_apart


@pytest.mark.nightly
def test_a_push_is_measured_beside_its_broadcast_and_seen_by_streams(tmp_path: Path) -> None:
    file = tmp_path / "push.json"
    sizes = ["--engine", "embedded", "--megabytes", "4", "--rounds", "2", "--requests", "2", "--bucket-mb", "1"]
    code = run_apart("push", [*sizes, "--json", str(file)])
    found = json.loads(file.read_text())
    assert code == (0 if found["targets"][0]["met"] else 1)
    values = {(row["name"], row["unit"]): row["values"] for row in found["rows"]}
    for quantity in (("push", "ms"), ("bare broadcast", "ms"), ("load, by the server", "ms"), ("transfer", "MB/s")):
        assert len(values[quantity]) == 2
    for whole_push, load, *phases in zip(
        values["push", "ms"], values["load, by the server", "ms"],
        *(values[f"  {phase}", "ms"] for phase in ("start", "transfer", "pause", "finish", "resume")),
        strict=True,
    ):  # fmt: skip
        assert load <= phases[3]  # finish
        assert sum(phases) == pytest.approx(whole_push, rel=0.2)
    assert all(p < whole for p, whole in zip(values["  paused", "ms"], values["push", "ms"], strict=True))
    assert len(values["2 requests: longest gap - usual", "ms"]) == 4  # 2 pushes x 2 streams


def _push(push_s: float, **milliseconds: float) -> dict[str, float]:
    phases = {f"sync/{phase}_ms": 1.0 for phase in push.PHASES}
    phases |= {f"sync/{phase}_ms": value for phase, value in milliseconds.items()}
    return {**phases, "sync/push_s": push_s, "sync/pause_s": 0.25, "sync/bytes": 4e8, "sync/bytes_per_s": 2e9}


def test_a_push_is_compared_with_the_broadcast_and_the_load_of_its_own_round(tmp_path: Path) -> None:
    """Bounds of 1.2 x 1 + 0.8 = 2 s and 1.2 x 0.5 + 0.4 = 1 s: pushes of 1 s, 1.1 s and 1.8 s are 0.5, 1.1 and 0.9 of them."""
    quiet = push.Quiet(
        pushes=[_push(1.0), _push(1.1, gather=80.0, send=200.0, transfer=220.0), _push(1.8)],
        load_s=[0.8, 0.4, 0.8],
        bare_s=[1.0, 0.5, 1.0],
    )
    busy = push.Busy([_push(1.5)], usual_gap_s=0.02, longest_gaps_s=[0.5, 0.32])
    file = tmp_path / "push.json"
    options = {"json": file, "seed": 0, "requests": 2, "dtype": "float32", "engine": "vllm", "transport": "gloo",
               "device": "cpu", "mode": "recompute", "bucket_mb": 8}  # fmt: skip
    assert push._report(quiet, busy, Namespace(**options)) == 0
    found = json.loads(file.read_text())
    values = {(row["name"], row["unit"]): row["values"] for row in found["rows"]}
    assert values["push / (1.2 x bare + load)", "ratio"] == pytest.approx([0.5, 1.1, 0.9])
    (target,) = found["targets"]
    assert (target["value"], target["at_most"], target["met"]) == (pytest.approx(0.9), 1.0, True)
    assert values["push", "ms"] == pytest.approx([1000.0, 1100.0, 1800.0])
    assert values["load, by the server", "ms"] == pytest.approx([800.0, 400.0, 800.0])
    assert values["  paused", "ms"] == pytest.approx([250.0] * 3)
    assert values["transfer", "MB/s"] == pytest.approx([2000.0] * 3)
    assert values["bare broadcast", "MB/s"] == pytest.approx([400.0, 800.0, 400.0])
    assert values["gather hidden behind send", "share"] == pytest.approx([1.0, 0.75, 1.0])
    assert values["2 requests: longest gap - usual", "ms"] == pytest.approx([480.0, 300.0])
    quiet.bare_s[:] = [0.1, 0.1, 0.1]
    assert push._report(quiet, None, Namespace(**options)) == 1


def test_the_first_round_warms_up_and_the_turns_alternate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    log = tmp_path / "server.log"
    log.write_text("")

    def one_push() -> dict[str, float]:
        told.append("push")
        with log.open("a") as lines:
            lines.write(f"loaded 9 parameters in {len(told)} s\n")
        return _push(float(len(told)))

    @contextmanager
    def bare(sizes: list[int], *, timeout_s: float) -> Iterator[Callable[[], float]]:
        assert sizes == [7]
        yield lambda: float(told.append("bare") or len(told))

    monkeypatch.setattr(push.broadcast, "bare_broadcast", bare)
    pusher: Any = SimpleNamespace(push=one_push, bucket_sizes=[7])
    quiet = push._measure_quiet(pusher, log, Namespace(device="cpu", rounds=2))
    assert told == ["bare", "push", "push", "bare", "bare", "push"]
    assert [each["sync/push_s"] for each in quiet.pushes] == quiet.load_s == [3.0, 6.0]
    assert quiet.bare_s == [4.0, 5.0]


def test_the_gap_of_a_push_is_the_longest_that_touches_it_and_the_usual_one_is_of_the_others() -> None:
    tokens = Tokens(num_streams=1, timeout_s=1.0)
    tokens.arrivals = [[0.0, 1.0, 2.0, 7.0, 8.0, 9.0, 12.0]]
    # the push from 2.5 to 4.0 falls into the gap of 5 s; 1, 1, 1, 1 and 3 s are left
    assert tokens.gaps([Window(2.5, 4.0)]) == (1.0, [5.0])
    # the one from 9 to 12 began within it
    assert tokens.gaps([Window(8.5, 9.5)]) == (1.0, [3.0])
