"""Evaluations on the rollout thread, beside generation: against a server that a test scripts."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from grpo_async.config import ExperimentConfig
from grpo_async.errors import DeadlineError
from grpo_async.evaluation.evaluator import EvaluationTask
from grpo_async.evaluation.metrics import EvaluationResult
from grpo_async.trainer.rollout_side import RolloutSide
from tests.support.local_server import Request, line, local_server
from tests.trainer.sides import open_side, side_config

NUM_PROMPTS = 6


def _config(folder: Path, model: Path, **sections: Any) -> ExperimentConfig:
    held_out = folder / "held.jsonl"
    rows = [{"prompt": f"7 + {n}", "answer": "1"} for n in range(NUM_PROMPTS)]
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = {
        "data": {"type": "jsonl", "path": str(held_out)},
        "samples_per_prompt": 2,
        "temperature": 0.7,
    }
    return side_config(folder, model, evaluation=evaluation, **sections)


def _begin(side: RolloutSide, *, max_in_flight: int = 4) -> Future[EvaluationResult]:
    evaluator = side.evaluator
    assert evaluator is not None
    version = lambda: side.source.served_version  # noqa: E731
    task = EvaluationTask(step=3, served_version=version, max_in_flight=max_in_flight, store=Mock())
    return side.source.begin_evaluation(evaluator.run(task), num_tokens=lambda: evaluator.num_tokens)


async def _slow_evaluation(request: Request) -> AsyncIterator[bytes]:
    """Training's requests are silent; those of an evaluation take almost three seconds, token by token."""
    name = str(request["request_id"]).split("-")  # of "eval-v3-0-r1-t0"
    if name[0] != "eval":
        await asyncio.Event().wait()
    for _ in range(7):
        yield line([5 + int(name[3].removeprefix("r")) % 2], finish=None)
        await asyncio.sleep(0.4)
    yield line(request["stop_token_ids"][:1])


def test_whoever_waits_for_samples_is_woken_when_an_evaluation_ends_and_its_tokens_are_a_sign_of_life(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The trainer may be waiting for the push that the evaluation holds back: no stall while that runs, one afterward."""
    config = _config(tmp_path, tiny_model, training={"queue_timeout_s": 2.0}, rollout={"max_completion_tokens": 16})
    with local_server(_slow_evaluation) as server, open_side(config, server) as side:
        side.source.start()
        running = _begin(side, max_in_flight=12)
        began = time.monotonic()
        assert side.source.take(2, trainer_version=0) is None
        assert running.done()
        with pytest.raises(DeadlineError, match=r"training\.queue_timeout_s"):
            side.source.take(2, trainer_version=0)
        assert time.monotonic() - began > 2.0


def test_a_stop_ends_an_evaluation_that_is_waited_for_and_one_that_begins_later(
    tiny_model: Path, tmp_path: Path
) -> None:
    async def silent(request: Request) -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    with local_server(silent) as server, open_side(_config(tmp_path, tiny_model), server) as side:
        running = _begin(side)
        server.wait_for(lambda: len(server.requests) == 4, "the first requests")
        threading.Timer(0.2, side.source.interrupt).start()
        side.source.wait_for_change()
        assert running.cancelled()
        assert _begin(side).cancelled()
