"""Servers of their own: two workers, and what is left when a process is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.support.weight_push import push_state_dict
from tests.vllm.reference import TOLERANCE, Reference, largest_difference
from tests.vllm.server import VllmServer, experiment, join, running_server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = [5, 6, 7, 8, 9, 10]


def _assert_serves(server: VllmServer, model: Reference, version: int) -> None:
    completion = server.generate(PROMPT, max_tokens=24)
    assert set(completion.versions) == {version}
    expected = model.logprobs(PROMPT, completion.token_ids, temperature=1.0)
    assert largest_difference(completion.logprobs, expected) < TOLERANCE


def test_two_workers_serve_pushed_weights_and_a_killed_server_leaves_no_process(
    needs_vllm: None, tiny_model: Path, model_a: Reference, model_b: Reference, tmp_path: Path
) -> None:
    with running_server(experiment(str(tiny_model), tensor_parallel_size=2), tmp_path) as server:
        assert server.info().num_workers == 2
        _assert_serves(server, model_a, 0)  # as loaded from disk
        push_state_dict(server.url, server.token, model_b.parameters(), 1)
        _assert_serves(server, model_b, 1)

        processes = server.processes()
        assert len(processes) >= 4  # API server, engine core, two workers
        server.process.kill()
        server.process.wait()
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert [process.cmdline() for process in alive] == []


def test_a_dead_engine_ends_streams_with_an_error_and_then_the_server(
    needs_vllm: None, tiny_model: Path, tmp_path: Path
) -> None:
    with running_server(experiment(str(tiny_model)), tmp_path) as server:
        stream = server.chunks(PROMPT, max_tokens=900, flush_interval_s=0.0)
        first = next(stream)
        (engine,) = [process for process in server.processes() if "EngineCore" in " ".join(process.cmdline())]
        engine.send_signal(signal.SIGKILL)
        rest = join(stream)
        assert first.token_ids
        assert rest.finish_reason is None
        assert "engine" in (rest.error or "")
        server.process.wait(20)  # the launcher sees its child end
        assert psutil.wait_procs([engine], timeout=10)[1] == []
