"""The rollout side of a run (worker, client, conversations, rewards, buffer, store, timeline) against a server that computes
nothing, and the calls by which a trainer uses it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._rollout_server import ServerSettings
from benchmarks.report import ROOT
from grpo_async.rewards.text import final_text

GROUP_SIZE = 8
WAIT_S = 60.0
MODEL_LENGTH = 8192
_QUESTION = (
    "What does the following function return for an empty list, and which lines decide that? Explain step by step. "
)


@functools.cache
def load_tokenizer() -> Any:
    """A tokenizer that every machine can make in seconds: byte-level BPE with 16,384 tokens, trained on Python's own library."""
    from grpo_async.quickstart.model import train_tokenizer

    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return train_tokenizer((file.read_text(encoding="utf-8", errors="replace") for file in library), num_tokens=16_384)


def reward(completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Reads the text once, like a reward that compares an answer. It differs within a group, so that every group is trained."""
    texts = map(final_text, completions)
    return [float("return" in text) + ids[0] / 65536 for text, ids in zip(texts, completion_ids, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is generated. `rate`: tokens per second of each rollout; `tokens`: mean length of a rollout."""

    in_flight: int
    tokens: int
    rate: float
    seed: int = 0

    @property
    def group_size(self) -> int:
        return min(GROUP_SIZE, max(2, self.in_flight))

    @property
    def groups_per_step(self) -> int:
        """A quarter of what is in flight: enough that the steps themselves cost little."""
        return max(1, self.in_flight // self.group_size // 4)


@contextmanager
def rollout_server(**settings: Any) -> Iterator[str]:
    """The address of a _rollout_server with these ServerSettings, in a process of its own."""
    described = json.dumps(asdict(ServerSettings(**settings)))
    command = [sys.executable, "-m", "benchmarks._rollout_server", str(os.getpid()), described]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            if not url:
                raise RuntimeError("the benchmark's server did not start; its error is above")
            yield url
        finally:
            server.kill()


class Side:
    """A running rollout side, as its trainer sees it."""

    def __init__(self, source: Any, control: Any, load: Load) -> None:
        self._source, self._control, self._load = source, control, load
        self._version = 0
        self.rollouts = 0
        """Rollouts taken so far."""
        (self._thread,) = [thread for thread in threading.enumerate() if thread.name == "rollout"]

    def so_far(self) -> dict[str, float]:
        """Wall seconds, CPU seconds of the rollout thread and of the process, rollouts taken, and tokens generated (by the
        ledger)."""
        assert self._thread.ident is not None
        return {
            "wall": time.perf_counter(),
            "thread": time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident)),
            "process": time.process_time(),
            "rollouts": self.rollouts,
            "tokens": self._source.ledger_snapshot()["tokens"].get("started", 0),
        }

    def step(self) -> None:
        """Take the groups of a step, close them as trained, and serve the next version."""
        from grpo_async.records import GroupStatus

        groups = None
        while groups is None:
            groups = self._source.take(self._load.groups_per_step, trainer_version=self._version)
        self._source.close_groups(groups, GroupStatus.TRAINED, step=self._version)
        self._version += 1
        self._control.finish_weight_update(self._version)
        self._source.advance(self._version)
        self.rollouts += sum(len(group.group.completions) for group in groups)


@contextmanager
def rollout_side(folder: Path, load: Load) -> Iterator[Side]:
    """A rollout side in this process, generating, and its server in another. Data and store are in `folder`."""
    from grpo_async.chat.renderer import ChatRenderer
    from grpo_async.config import ExperimentConfig
    from grpo_async.inference.control import ServerControl
    from grpo_async.inference.router import FixedServers
    from grpo_async.store.rollout_store import RolloutStore
    from grpo_async.tracking.timeline import recording
    from grpo_async.trainer.rollout_side import build_rollout_side

    tokenizer = load_tokenizer()
    data = folder / "train.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"{number}. {_QUESTION * 4}"}]} for number in range(512)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = ExperimentConfig.model_validate(
        {
            "run": {"name": "bench", "dir": str(folder / "runs"), "seed": load.seed},
            "model": {"path": str(folder)},
            "data": {"train": {"type": "jsonl", "path": str(data)}},
            "rollout": {
                "group_size": load.group_size,
                "groups_per_step": load.groups_per_step,
                "max_staleness": 8,  # 9 steps of a quarter are more than enough to keep all in flight
                "max_in_flight": load.in_flight,
                "max_completion_tokens": MODEL_LENGTH // 2,
            },
            "rewards": [{"function": "benchmarks._rollout_side:reward"}],
            "inference": {"engine": "embedded", "max_model_len": MODEL_LENGTH},
            "training": {"max_steps": 1_000_000, "queue_timeout_s": WAIT_S, "micro_batch_tokens": MODEL_LENGTH},
        }
    )
    config.run_path.mkdir(parents=True, exist_ok=True)  # as a run does it, long before its rollouts
    with (
        rollout_server(
            rate=load.rate, tokens=load.tokens, ids=(10, len(tokenizer)), end_id=tokenizer.eos_token_id, seed=load.seed
        ) as url,
        contextlib.closing(ServerControl(url, token=None, timeout_s=WAIT_S)) as control,
        RolloutStore(config.run_path / "rollouts", settings=config.record.rollouts) as store,
        recording(config.run_path / "events.jsonl"),
    ):
        built = build_rollout_side(
            config,
            fleet=FixedServers([url]),
            renderer=ChatRenderer(tokenizer),
            vocab_size=1 << 20,
            store=store,
            state=None,
        )
        with contextlib.closing(built.source) as source:
            source.start()
            yield Side(source, control, load)
