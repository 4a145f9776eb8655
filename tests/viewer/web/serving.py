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

from grpo_async.records import (
    FinishReason,
    GroupStatus,
    Origin,
    Prompt,
    RolloutCompletion,
    RolloutGroup,
    RolloutSample,
    RolloutStatus,
    TaggedMessage,
    TokenFigures,
    TokenMark,
    ToolCallRecord,
    TurnRecord,
)
from grpo_async.rundir import RunDir
from grpo_async.store import RolloutStore
from grpo_async.viewer.web.api import WHOLE_RUN, Opening
from grpo_async.viewer.web.app import build_app
from grpo_async.viewer.web.serve import listen
from grpo_async.viewer.web.sources import Library

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
        with httpx.Client(timeout=LIMIT_S) as client:
            bearer = {"authorization": f"Bearer {TOKEN}"}
            return client.get(
                f"{self.origin}/{path}", params=parameters, headers=bearer if headers is None else headers
            )

    def json(self, path: str, **parameters: Any) -> Any:
        answer = self.get(path, **parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def serving(*runs: Path, host: str = "127.0.0.1", opening: Opening = WHOLE_RUN) -> Iterator[Inspector]:
    """Serve until the end of the block."""
    listener = listen(host, 0)
    library = Library([RunDir(run) for run in runs])
    app = build_app(library, token=TOKEN, host=host, opening=opening)
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
        library.close()


def write_run(root: Path, *, num_steps: int = 4, groups_a_step: int = 3, word: str = "apple", first: int = 0) -> Path:
    """A run of `num_steps` steps. Of each step's groups the first is of the prompt that every step has; the reward rises."""
    run = RunDir(root)
    run.create()
    with RolloutStore(run.rollouts) as store:
        append_steps(store, range(1, num_steps + 1), groups_a_step=groups_a_step, word=word, first=first)
    return root


def append_steps(
    store: RolloutStore, steps: Sequence[int], *, groups_a_step: int = 3, word: str = "apple", first: int = 0
) -> None:
    """Groups of four rollouts each; ids go on from `first`."""
    for place, step in enumerate(steps):
        for index in range(groups_a_step):
            group_id = first + place * groups_a_step + index
            prompt = "the prompt of all steps" if index == 0 else f"question {group_id}"
            completions = [plain_rollout(f"g{group_id}-r{i}", f"{word} {step} {i}", step - 1) for i in range(4)]
            rewards = [1.0 if i < step else 0.0 for i in range(4)]
            append_group(store, group_id, prompt, completions, rewards, step=step)
    store.flush()


def plain_rollout(
    rollout_id: str, text: str, version: int = 0, *, ids: Sequence[int] = (5, 6, 7), truncated: bool = False
) -> RolloutCompletion:
    turn = TurnRecord(
        output_ids=list(ids),
        output_logprobs=[-0.25 - 0.5 * place for place in range(len(ids))],
        policy_versions=[version] * len(ids),
        finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP,
        messages=[TaggedMessage(role="assistant", content=text, origin=Origin.POLICY)],
        generation_duration_s=0.5,
        started_at=1_700_000_000.0,
    )
    return RolloutCompletion(
        rollout_id=rollout_id,
        prompt_ids=[1, 2],
        turns=[turn],
        status=RolloutStatus.TRUNCATED if truncated else RolloutStatus.FINISHED,
        truncated=truncated,
        total_duration_s=0.75,
        started_at=1_700_000_000.0,
    )


def tool_rollout(rollout_id: str, *, said: str, result: str, name: str = "python") -> RolloutCompletion:
    """Turn 0 samples two tokens and calls a tool, which fails and adds two tokens; turn 1 samples one."""
    call = ToolCallRecord(
        tool_call_id="c1", name=name, arguments={"code": said}, result=result, failed=True, duration_s=0.25
    )
    turns = [
        replace(
            plain_rollout("x", said, ids=(5, 6)).turns[0],
            tool_calls=[call],
            tool_response_ids=[90, 91],
            tool_execution_duration_s=0.25,
        ),
        plain_rollout("x", "done", 1, ids=(7,)).turns[0],
    ]
    return replace(plain_rollout(rollout_id, "x"), turns=turns)


def append_group(
    store: RolloutStore,
    group_id: int,
    prompt: str,
    completions: Sequence[RolloutCompletion],
    rewards: Sequence[float],
    *,
    step: int | None,
    status: GroupStatus = GroupStatus.TRAINED,
    reward_name: str = "exact",
    columns: dict[str, Any] | None = None,
) -> None:
    """With figures of the trainer: logprobs 0.1 above the sampler's, weight 1.105, entropy 0.5, the first token clipped high."""
    group = RolloutGroup(
        group_id=group_id,
        prompt=Prompt(
            prompt_id=group_id,
            messages=[TaggedMessage(role="user", content=prompt, origin=Origin.PROMPT)],
            columns=columns or {"answer": "4"},
        ),
        completions=list(completions),
    )
    samples, figures = [], {}
    for completion, reward in zip(completions, rewards, strict=True):
        zeros = len(completion.prompt_ids)
        sample = RolloutSample(
            group_id=group_id,
            rollout_id=completion.rollout_id,
            token_ids=[*completion.prompt_ids, *completion.completion_ids],
            loss_mask=[0] * zeros + completion.completion_mask,
            sampler_logprobs=[0.0] * zeros + completion.logprobs,
            policy_versions=[-1] * zeros + completion.versions,
            advantage=reward - sum(rewards) / len(rewards),
            rewards={reward_name: reward},
            reward=reward,
            truncated=completion.truncated,
        )
        samples.append(sample)
        sampled = [
            logprob for logprob, kept in zip(completion.logprobs, completion.completion_mask, strict=True) if kept
        ]
        figures[completion.rollout_id] = TokenFigures(
            logprobs=[each + 0.1 for each in sampled],
            proximal_logprobs=sampled,
            weights=[1.105] * len(sampled),
            entropies=[0.5] * len(sampled),
            marks=[int(TokenMark.CLIPPED_HIGH)] + [0] * (len(sampled) - 1),
        )
    store.append(group, samples, status, step, figures=figures)


def write_hostile_run(root: Path) -> Path:
    """Group 0: everything that a model, the data or a tool may write is `HOSTILE`; group 1 failed with such an error."""
    run = RunDir(root)
    run.create()
    with RolloutStore(run.rollouts) as store:
        completions = [
            tool_rollout("g0-r0", said=HOSTILE, result=HOSTILE, name=HOSTILE),
            plain_rollout("g0-r1", HOSTILE),
        ]
        append_group(
            store, 0, HOSTILE, completions, [0.0, 1.0], step=1, reward_name=HOSTILE, columns={HOSTILE: HOSTILE}
        )
        failed = RolloutCompletion(
            rollout_id="g1-r0", prompt_ids=[1], turns=[], status=RolloutStatus.FAILED, error=HOSTILE
        )
        group = RolloutGroup(group_id=1, prompt=Prompt(prompt_id=1, messages=[]), completions=[failed])
        store.append(group, [], GroupStatus.FAILED, None)
    return root
