"""A worker that goes on from a checkpoint: what was finished is reused, what was begun goes on, and every group counts once."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_async.buffer.ledger import is_balanced
from grpo_async.buffer.resume import ResumeState, read_resume_state
from grpo_async.config.sections import SamplingSection
from grpo_async.inference.api import GenerateRequest
from grpo_async.inference.client import Generation, OnTokens
from grpo_async.records import GroupStatus, ScoredGroup
from tests.rollout.test_worker import _answer, _Setup
from tests.support.waiting import until


class _Slow(_Setup):
    """Rollouts of the groups in `held` get one token and wait there; `begun` is what each request was given to go on from."""

    def __init__(self, folder: Path, held: tuple[int, ...] = (), **arguments: Any) -> None:
        super().__init__(folder, **arguments)
        self.held = held
        self.begun: dict[str, list[int]] = {}
        generate = self.client.generate

        async def slowly(
            request: GenerateRequest, *, on_tokens: OnTokens | None = None, affinity: str = "", partial: Generation
        ) -> Generation:
            name = request.request_id.rpartition("-")[0]
            self.begun[name] = list(partial.token_ids)
            if int(name[1 : name.index("-")]) in self.held:
                partial.token_ids.append(9)
                partial.logprobs.append(-0.5)
                partial.policy_versions.append(self.client.version)
                assert on_tokens is not None
                on_tokens(1, self.client.version)
                await asyncio.Event().wait()
            answer = await generate(request, on_tokens=on_tokens, affinity=affinity, partial=partial)
            return replace(  # the tokens that were there come last: the reward looks at the first one
                answer,
                token_ids=[*answer.token_ids, *partial.token_ids],
                logprobs=[*answer.logprobs, *partial.logprobs],
                policy_versions=[*answer.policy_versions, *partial.policy_versions],
            )

        self.client.generate = slowly  # type: ignore[method-assign]


def _state_when(setup: _Setup, condition: Any) -> ResumeState:
    """What a checkpoint has of a run in the moment in which `condition` holds."""
    kept: list[ResumeState] = []

    async def steps(task: asyncio.Task[None]) -> None:
        await until(condition)
        kept.append(setup.worker.resume_state())

    setup.run(steps)
    return kept[0]


def _of_a_run(folder: Path, *, held: tuple[int, ...] = (2,)) -> ResumeState:
    """Groups 0 to 3 were admitted at version 0; `held` are in progress, the others are queued.
    What comes back has gone through JSON."""
    setup = _Slow(folder, held)
    state = _state_when(setup, lambda: len(setup.table.queued()) == 4 - len(held) and len(setup.begun) == 16)
    return read_resume_state(json.loads(json.dumps(state.small())), list(state.lines()), setup.stream.prompt)


def _resumed(
    folder: Path, state: ResumeState, take: int, *, at: int = 0, **arguments: Any
) -> tuple[_Slow, list[ScoredGroup]]:
    setup = _Slow(folder, resume=state, version=at, **arguments)
    setup.client.version = at
    setup.client.script = lambda name: _answer(1 - int(name[-1]) % 2, version=at)
    taken: list[ScoredGroup] = []

    async def steps(task: asyncio.Task[None]) -> None:
        taken.extend(await setup.take(take, version=at))
        for group in taken:
            setup.worker.close_group(group.group, GroupStatus.TRAINED, scored=group, step=at + 1)

    setup.run(steps)
    return setup, taken


def test_finished_groups_are_not_generated_again_and_others_go_on_with_the_tokens_they_have(tmp_path: Path) -> None:
    state = _of_a_run(tmp_path / "a", held=(2,))
    assert [queued.group.group_id for queued in state.queued] == [0, 1, 3]
    assert state.outstanding == [0, 1, 2, 3]
    assert state.ledger["groups"]["started"] == 0
    (group,) = state.in_progress
    assert (group.group_id, sorted(group.rollouts)) == (2, [0, 1, 2, 3])
    setup, taken = _resumed(tmp_path / "b", state, 4, at=1)
    assert [group.group.group_id for group in taken] == [0, 1, 2, 3]
    assert not {"g0", "g1", "g3"} & {name.partition("-")[0] for name in setup.client.names}
    assert {name: ids for name, ids in setup.begun.items() if name.startswith("g2")} == {
        f"g2-r{index}": [9] for index in range(4)
    }
    counts = setup.table.ledger()
    assert is_balanced(counts)
    assert counts["groups"]["trained"] == 4  # each group counts once
    assert not {0, 1, 2, 3}.intersection(setup.worker.resume_state().outstanding)  # nor is one issued again
    # 3 groups of 4 rollouts with 2 tokens, kept; one whose 4 rollouts had 1 token and got 2 more of the script
    assert counts["tokens"]["trained"] == 3 * 8 + 4 * 3


def test_a_group_without_samples_keeps_its_place_in_the_queue_of_the_resumed_run(tmp_path: Path) -> None:
    """A step that counts on it must not take another prompt instead."""
    setup = _Setup(tmp_path / "a", lambda name: _answer(1 if name.startswith("g1-") else 1 - int(name[-1]) % 2))
    state = _state_when(setup, lambda: len(setup.table.queued()) == 4)
    assert [(q.group.group_id, bool(q.samples)) for q in state.queued] == [
        (0, True), (1, False), (2, True), (3, True),
    ]  # fmt: skip
    resumed = _Setup(tmp_path / "b", resume=state)
    assert [group.group.group_id for group in resumed.taken(2, after_queueing=False)] == [0, 1]
    counts = resumed.groups()
    assert (counts["queued"], counts["started"]) == (4, 4), "the two taken ones are the trainer's to close"


def test_groups_that_were_replaced_have_their_rows_and_count_in_the_step_after_the_resume(tmp_path: Path) -> None:
    """Group 1 was solved: its row is retired, it is replaced, and its rewards belong to the mean of the next step."""
    script: Any = lambda name: _answer(1 if name.startswith("g1-") else 1 - int(name[-1]) % 2)  # noqa: E731
    settings: Any = {"zero_variance": "resample", "sampling": SamplingSection(retire_solved=1)}
    setup = _Setup(tmp_path / "a", script, **settings)
    state = _state_when(setup, lambda: len(setup.table.queued()) == 4)
    data = json.loads(json.dumps(state.small()))["data"]
    resumed = _Setup(tmp_path / "b", resume=replace(state, data=data), **settings)
    assert resumed.stream.prompt(1).messages[0].content == "cd"
    assert [scored.group.group_id for scored in resumed.buffer.take_dropped()] == [1]


def test_finished_groups_that_would_be_too_stale_are_issued_again(tmp_path: Path) -> None:
    """Version 0, at version 2, with max_staleness 1."""
    setup, taken = _resumed(tmp_path / "b", _of_a_run(tmp_path / "a", held=()), 4, at=2)
    assert sorted({name.partition("-")[0] for name in setup.client.names}) == ["g0", "g1", "g2", "g3"]
    assert {group.oldest_version for group in taken} == {2}
    assert setup.table.ledger()["groups"] == {
        **setup.table.ledger()["groups"], "started": 4, "trained": 4, "stale": 0, "cancelled": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("held", "take", "how"), [((2,), 4, {"at": 2}), ((0, 1, 2, 3), 2, {"max_staleness": 0})])
def test_open_turns_are_generated_again_where_they_would_be_too_stale_or_the_run_is_synchronous(
    tmp_path: Path, held: tuple[int, ...], take: int, how: dict[str, Any]
) -> None:
    """A synchronous run generates the turn again from its seed, which gives the same bits."""
    setup, _ = _resumed(tmp_path / "b", _of_a_run(tmp_path / "a", held=held), take, **how)
    assert setup.begun[f"g{held[0]}-r0"] == []


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_what_was_not_taken_up_yet_is_in_the_next_checkpoint_too(tmp_path: Path, max_staleness: int) -> None:
    """With 0 there is no place for groups 2 and 3 yet: 0 and 1 are queued; with 1 they are admitted and have not begun to run."""
    state = _of_a_run(tmp_path / "a", held=(2, 3))
    setup = _Slow(tmp_path / "b", resume=state, max_staleness=max_staleness)
    again = _state_when(setup, lambda: True)
    assert again.in_progress == state.in_progress
    assert again.outstanding == state.outstanding
    assert [queued.group.group_id for queued in again.queued] == [0, 1]
    assert again.ledger["groups"]["started"] == 0


def test_a_checkpoint_that_is_written_after_generation_has_failed_has_the_prompts_of_its_groups(tmp_path: Path) -> None:
    setup = _Slow(tmp_path, (2,))
    kept: list[ResumeState] = []

    async def steps(task: asyncio.Task[None]) -> None:
        await until(lambda: len(setup.table.queued()) == 3)
        task.cancel()
        await asyncio.wait([task], timeout=5.0)
        kept.append(setup.worker.resume_state())

    setup.run(steps)
    assert setup.groups()["cancelled"] == 1
    assert kept[0].outstanding == [0, 1, 2, 3]
