"""The inspector over HTTP in a thread of the test, and runs for it to show."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from grpo_async.records import GroupStatus, Origin, RolloutCompletion, TaggedMessage
from grpo_async.run_directory import RunDir
from grpo_async.store import RolloutStore
from grpo_async.viewer.web.api import build_app
from grpo_async.viewer.web.serve import listen
from grpo_async.viewer.web.sources import RunRegistry
from tests.store.builders import (
    append,
    build_failed_rollout,
    build_group,
    build_rollout,
    build_sample,
    build_stats,
    build_tool_rollout,
)

TOKEN = "the-token-of-this-start"
LIMIT_S = 30.0
HOSTILE = '<img src=x onerror="alert(1)"><script>alert(2)</script>"\'><svg onload=alert(3)>\x1b]0;x\x07\u202ejavascript:alert(4)'


@dataclass(frozen=True, kw_only=True)
class Inspector:
    """`origin` is "http://127.0.0.1:PORT"; `url` the address that a person opens."""

    origin: str

    @property
    def url(self) -> str:
        return f"{self.origin}/#token={TOKEN}"

    def get(self, path: str, headers: dict[str, str] | None = None, **parameters: Any) -> httpx.Response:
        given = {"authorization": f"Bearer {TOKEN}"} if headers is None else headers
        return httpx.get(f"{self.origin}/{path}", params=parameters, headers=given, timeout=LIMIT_S)

    def json(self, path: str, **parameters: Any) -> Any:
        answer = self.get(path, **parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def serving(*runs: Path | RunDir, folder: Path | None = None, host: str = "127.0.0.1") -> Iterator[Inspector]:
    """Serve until the end of the block: these runs, or what is below `folder`."""
    listener = listen(host, 0)
    registry = RunRegistry([RunDir(run) if isinstance(run, Path) else run for run in runs], folder)
    app = build_app(registry, token=TOKEN, host=host)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", lifespan="off", ws="none", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield Inspector(origin=f"http://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "the server did not end"
        registry.close()


def write_stored_run(root: Path, *, num_steps: int = 4, groups_a_step: int = 3) -> Path:
    """A run of `num_steps` steps. Of each step's groups the first is of the prompt that every step has; the reward rises."""
    run = RunDir(root)
    run.create()
    with RolloutStore(run.rollouts) as store:
        append_steps(store, range(1, num_steps + 1), groups_a_step=groups_a_step)
    return root


def append_steps(
    store: RolloutStore, steps: Sequence[int], *, groups_a_step: int = 3, word: str = "apple", first: int = 0
) -> None:
    """Groups of four rollouts each; ids go on from `first`."""
    for place, step in enumerate(steps):
        for index in range(groups_a_step):
            group_id = first + place * groups_a_step + index
            completions = [
                build_rollout(f"g{group_id}-r{i}", text=f"{word} {step} {i}", version=step - 1) for i in range(4)
            ]
            rewards = [1.0 if i < step else 0.0 for i in range(4)]
            prompt = "the prompt of all steps" if index == 0 else f"question {group_id}"
            append_group(store, group_id, prompt, completions, rewards, step=step)
    store.flush()


def append_group(
    store: RolloutStore,
    group_id: int,
    prompt: str,
    completions: Sequence[RolloutCompletion],
    rewards: Sequence[float],
    *,
    step: int,
    name: str = "exact",
    **columns: object,
) -> None:
    """With what the trainer found for each token (`build_stats`); the advantage is the reward less the mean of the group."""
    mean = sum(rewards) / len(rewards)
    pairs = zip(completions, rewards, strict=True)
    samples = [replace(build_sample(group_id, each, r, r - mean), rewards={name: r}) for each, r in pairs]
    stats = {each.rollout_id: build_stats(sum(each.completion_mask)) for each in completions}
    append(
        store,
        build_group(group_id, completions, text=prompt, **columns),
        samples,
        GroupStatus.TRAINED,
        step,
        stats=stats,
    )


def tool_rollout(rollout_id: str, text: str) -> RolloutCompletion:
    """`build_tool_rollout` whose tool's name, argument and result, and what the model said, are `text`."""
    rollout = build_tool_rollout(rollout_id)
    call = replace(rollout.turns[0].tool_calls[0], name=text, arguments={"code": text}, result=text)
    said = [TaggedMessage(role="assistant", content=text, origin=Origin.POLICY)]
    return replace(rollout, turns=[replace(rollout.turns[0], messages=said, tool_calls=[call]), rollout.turns[1]])


def write_hostile_run(root: Path) -> Path:
    """Group 0: everything that a model, the data or a tool may write is `HOSTILE`, and an environment has changed the prompt of
    rollout 0 to "count to 3"; group 1 failed with such an error."""
    run = RunDir(root)
    run.create()
    with RolloutStore(run.rollouts) as store:
        asked = [TaggedMessage(role="user", content="count to 3", origin=Origin.ENVIRONMENT)]
        completions = [
            replace(tool_rollout("g0-r0", HOSTILE), prompt_messages=asked),
            build_rollout("g0-r1", text=HOSTILE),
        ]
        append_group(store, 0, HOSTILE, completions, [0.0, 1.0], step=1, name=HOSTILE, **{HOSTILE: HOSTILE})
        failed = build_group(1, [build_failed_rollout("g1-r0", HOSTILE)], text=HOSTILE)
        append(store, failed, [], GroupStatus.FAILED, None)
    return root
