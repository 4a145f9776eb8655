"""The worker over a scripted client: whatever fails, every group is accounted for."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from grpo_async.buffer.group import OpenGroup
from grpo_async.buffer.ledger import is_balanced
from grpo_async.buffer.resume import ResumeState
from grpo_async.buffer.sample_buffer import Watch
from grpo_async.config.sections import AdvantageSection, RolloutSection, SamplingSection
from grpo_async.data.rows import Rows
from grpo_async.data.stream import PromptStream, SourceRows
from grpo_async.errors import NothingToLearnError, RequestRejectedError, RunError
from grpo_async.inference.api import GenerateRequest
from grpo_async.inference.client import Generation
from grpo_async.inference.sampling import SamplingSettings
from grpo_async.records import Branch, FinishReason, GroupStatus, RolloutCompletion, ScoredGroup
from grpo_async.rewards import RewardFunction
from grpo_async.rollout.conversation import ConversationProducer
from grpo_async.rollout.group import ErrorLog
from grpo_async.rollout.metrics import group_metrics
from grpo_async.rollout.worker import RolloutWorker
from grpo_async.scoring.scorer import Scorer
from tests.rollout.fakes import FakeClient, FakeRenderer
from tests.support.records import make_completion, make_turn
from tests.support.stored import LineStore, read_groups

Script = Callable[[str], Generation | Exception]


class _Renderer(FakeRenderer):
    def completion_text(self, token_ids: Sequence[int]) -> str:
        return str(token_ids[0])


class _Client(FakeClient):
    """Answers by script, keyed by the rollout's name ("g3-r1")."""

    def __init__(self, script: Script) -> None:
        super().__init__(lambda request: self.script(_name(request)))
        self.script = script
        self.version = 0

    @property
    def names(self) -> list[str]:
        return [_name(request) for request in self.requests]


def _name(request: GenerateRequest) -> str:
    return request.request_id.rpartition("-")[0]


def _answer(value: int, *, version: int = 0) -> Generation:
    return Generation(
        token_ids=array("i", [value, 2]),
        logprobs=array("f", [-0.1, -0.2]),
        policy_versions=array("i", [version] * 2),
        finish_reason=FinishReason.STOP,
    )


def _alternating(name: str) -> Generation:
    """Rollouts 0 and 2 are right (1), 1 and 3 wrong (0): a learning signal in every group."""
    return _answer(1 - int(name[-1]) % 2)


def reward_of_first_token(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(text) for text in completions]


class _Setup:
    def __init__(
        self,
        folder: Path,
        script: Script = _alternating,
        *,
        reward: Callable[..., list[float]] = reward_of_first_token,
        zero_variance: str = "skip",
        texts: Sequence[str] = ("ab", "cd", "ef"),
        resume: ResumeState | None = None,
        version: int = 0,
        max_staleness: int = 1,
        size_of_source: int | None = None,
        sampling: SamplingSection | None = None,
    ) -> None:
        self.client = _Client(script)
        self.errors = ErrorLog()
        self.folder = folder
        self.store = LineStore(folder)
        self.stream = PromptStream(
            [SourceRows(rows=Rows([{"prompt": text} for text in texts], locations=texts), group_size=size_of_source)],
            seed=0,
            shuffle=False,
            sampling=sampling,
            state=resume.data if resume else None,
        )
        client: Any = self.client
        renderer: Any = _Renderer()
        self.worker = RolloutWorker(
            section=RolloutSection(
                group_size=4,
                groups_per_step=2,  # 8 failures in a row end the run
                max_staleness=max_staleness,
                zero_variance=zero_variance,  # type: ignore[arg-type]
                max_rounds_without_signal=6,  # 12 groups
            ),
            seed=0,
            stream=self.stream,
            producer=ConversationProducer(
                client,
                renderer,
                SamplingSettings(temperature=1.0, max_completion_tokens=8, max_model_len=20),
                slots=asyncio.Semaphore(64),
                rollout_timeout_s=30.0,
                max_result_chars=100,
                errors=self.errors,
            ),
            errors=self.errors,
            scorer=Scorer(
                [RewardFunction(reward)],
                advantage=AdvantageSection(),
                train_zero_variance=zero_variance == "train",
            ),
            store=self.store,
            num_steps=50,
            resume=resume,
            version=version,
        )
        self.table, self.buffer = self.worker.table, self.worker.buffer

    async def queue_up(self) -> None:
        """Until all groups that are admitted at version 0 are in the buffer: rewards are computed in threads, in any order."""
        async with asyncio.timeout(10.0):
            while len(self.table.queued()) < 4:
                await asyncio.sleep(0)

    async def take(self, count: int, version: int = 0) -> list[ScoredGroup]:
        watch = Watch(timeout_s=5.0, progress=lambda: 0)
        groups = await asyncio.to_thread(self.buffer.take, count, trainer_version=version, watch=watch)
        return groups or []

    def run(self, steps: Callable[[asyncio.Task[None]], Any]) -> None:
        """Run the worker beside `steps`, then cancel it and check the books."""

        async def main() -> None:
            task = asyncio.create_task(self.worker.run())
            try:
                await asyncio.wait_for(steps(task), timeout=20.0)
            finally:
                task.cancel()
                await asyncio.wait([task], timeout=5.0)
            assert task.done()

        asyncio.run(main())
        self.store.close()
        assert is_balanced(self.table.ledger())
        assert self.table.ledger()["groups"]["in_flight"] == 0

    def taken(self, count: int, *, after_queueing: bool = True) -> list[ScoredGroup]:
        """Run the worker until so many groups were taken."""
        groups: list[ScoredGroup] = []

        async def steps(task: asyncio.Task[None]) -> None:
            if after_queueing:
                await self.queue_up()
            groups.extend(await self.take(count))

        self.run(steps)
        return groups

    def fails(self, error: type[Exception], match: str) -> None:
        """Run the worker until it ends with `error`."""

        async def steps(task: asyncio.Task[None]) -> None:
            with pytest.raises(error, match=match):
                await task

        self.run(steps)

    def produce_instead(self, produce: Callable[[OpenGroup], Sequence[RolloutCompletion]]) -> None:
        @asynccontextmanager
        async def context(group: OpenGroup) -> AsyncIterator[None]:
            group.completions = produce(group)
            yield

        self.worker._producer.produce = context  # type: ignore[method-assign]

    def groups(self) -> dict[str, int]:
        return self.table.ledger()["groups"]

    def statuses(self) -> Counter[str]:
        return Counter(str(row.status) for row in read_groups(self.folder))


def test_groups_have_the_size_of_their_source(tmp_path: Path) -> None:
    """Two completions, where those of the run have four."""
    assert [len(group.samples) for group in _Setup(tmp_path, size_of_source=2).taken(2)] == [2, 2]


def test_a_group_with_a_failed_rollout_continues_with_the_others(tmp_path: Path) -> None:
    """R1.2, R6.6: the reward columns are those of the others."""

    def script(name: str) -> Generation | Exception:
        return RequestRejectedError(400, "bad") if name.endswith("r3") else _alternating(name)

    setup = _Setup(tmp_path, script)
    setup.client.tokens_before_error = 5
    (group, _) = setup.taken(2)
    assert len(group.samples) == 3
    assert [part["reward_of_first_token"] for part in group.reward_parts] == [1.0, 0.0, 1.0]
    tokens = setup.table.ledger()["tokens"]
    assert tokens["failed"] == 4 * 5  # one rollout of each of the four groups got that far
    assert tokens["queued"] == 4 * 3 * 2


def test_a_group_with_one_trainable_rollout_is_dropped_and_its_place_is_free_again(tmp_path: Path) -> None:
    """R1.2, R6.6."""

    def script(name: str) -> Generation | Exception:
        fails = name.startswith("g0-") and not name.endswith("r0")
        return RequestRejectedError(400, "bad") if fails else _alternating(name)

    setup = _Setup(tmp_path, script)
    # a fifth was admitted in place of the first
    assert [group.group.group_id for group in setup.taken(4, after_queueing=False)] == [1, 2, 3, 4]
    assert setup.statuses()["failed"] == 1
    assert setup.table.ledger()["tokens"]["failed"] == 2  # of the only one that did not fail


def test_a_reward_that_raises_fails_its_group_only_and_is_logged_once_with_its_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R1.2: logged, counted, its group dropped."""
    calls = Counter[str]()

    def sometimes(completions: Sequence[str], **_: Any) -> list[float]:
        calls["all"] += 1
        if calls["all"] <= 3:
            raise ZeroDivisionError("in the reward")
        return [float(text) for text in completions]

    setup = _Setup(tmp_path, reward=sometimes)
    setup.taken(4, after_queueing=False)
    assert setup.statuses()["failed"] == 3
    logged = [record for record in caplog.records if "group failed" in record.message]
    assert len(logged) == 1
    assert "ZeroDivisionError" in caplog.text
    assert sum(setup.errors.counts.values()) == 3
    failed = [group for group in read_groups(setup.folder) if group.status is GroupStatus.FAILED]
    assert len(failed) == 3
    assert all("in the reward" in str(rollout.error) for group in failed for rollout in group.rollouts)


def test_the_run_stops_with_the_cause_when_everything_fails(tmp_path: Path) -> None:
    """R6.6: only when everything fails does the run end."""
    setup = _Setup(tmp_path, lambda name: RequestRejectedError(400, "no such model"))
    setup.fails(RunError, r"8 consecutive failures and no group succeeded.*no such model")


def test_groups_whose_task_never_began_are_closed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends between the start of a group and the first step of its task, which is cancelled without having run."""
    setup = _Setup(tmp_path)
    admitted = 0

    async def admit() -> None:
        nonlocal admitted
        admitted += 1
        if admitted > 2:
            raise RunError("the run ends")

    monkeypatch.setattr(setup.table, "admit", admit)
    setup.fails(RunError, "the run ends")
    assert setup.statuses() == {"cancelled": 2}


@pytest.mark.parametrize("mode", ["skip", "resample", "train"])
def test_groups_without_a_learning_signal(tmp_path: Path, mode: str) -> None:
    """Group 0 is all right: skip keeps its place, resample replaces it, train gives it advantage 0."""

    def script(name: str) -> Generation:
        return _answer(1) if name.startswith("g0-") else _alternating(name)

    setup = _Setup(tmp_path, script, zero_variance=mode)
    seen: list[ScoredGroup] = []

    async def steps(task: asyncio.Task[None]) -> None:
        await setup.queue_up()
        groups = await setup.take(2)
        ids = [group.group.group_id for group in groups]
        if mode == "resample":
            assert ids == [1, 2]
            assert [dropped.group.group_id for dropped in setup.buffer.dropped()] == [0]
        else:
            assert ids == [0, 1]
            assert [len(group.samples) for group in groups] == ([0, 4] if mode == "skip" else [4, 4])
        if mode == "train":
            assert {sample.advantage for sample in groups[0].samples} == {0.0}

        seen.extend([*groups, *setup.buffer.take_dropped()])
        for group in groups:  # as the trainer does
            status = GroupStatus.TRAINED if group.samples else GroupStatus.FILTERED
            setup.worker.close_group(group.group, status, scored=group, step=1)

    setup.run(steps)
    assert setup.groups()["filtered"] == (0 if mode == "train" else 1)
    rewards = [r.reward for row in read_groups(tmp_path) if row.step == 1 for r in row.rollouts if r.reward is not None]
    assert fmean(rewards) == pytest.approx(group_metrics(seen)["reward"])


@pytest.mark.parametrize("mode", ["skip", "resample"])
def test_a_run_without_any_learning_signal_stops_instead_of_generating_for_ever(tmp_path: Path, mode: str) -> None:
    setup = _Setup(tmp_path, lambda name: _answer(0), zero_variance=mode)

    async def steps(task: asyncio.Task[None]) -> None:
        taking = asyncio.create_task(setup.take(2))  # while the trainer waits for samples
        with pytest.raises(
            NothingToLearnError, match=r"12 groups in a row had nothing to learn from\nof the last one all rew"
        ):
            await task
        setup.buffer.interrupt()
        assert await taking == []

    setup.run(steps)
    counts = setup.groups()
    assert counts["filtered"] + counts["queued"] >= 12


def test_a_store_that_cannot_write_stops_the_run_with_its_own_message(tmp_path: Path) -> None:
    setup = _Setup(tmp_path, lambda name: _answer(0), zero_variance="resample")

    def append(*_: Any, **__: Any) -> None:
        raise RunError("No space left on device")

    setup.store.append = append  # type: ignore[method-assign]
    setup.fails(RunError, "No space left")


def test_a_prompt_that_is_too_long_is_skipped_and_counted_and_a_run_of_such_prompts_stops(tmp_path: Path) -> None:
    """R6.4: skipped, truncated=True, counted."""
    setup = _Setup(tmp_path / "a", texts=["x" * 20, "ab"])
    assert [group.group.group_id for group in setup.taken(2)] == [1, 3]  # 0 and 2 are the long prompt
    assert setup.statuses()["filtered"] >= 2
    assert setup.errors.counts["prompt too long"] >= 2 * 4  # every rollout of both groups
    row = next(row for row in read_groups(tmp_path / "a") if str(row.status) == "filtered")
    assert all(rollout.truncated for rollout in row.rollouts)
    setup = _Setup(tmp_path / "b", texts=["x" * 20])
    setup.fails(NothingToLearnError, "fewer than two rollouts sampled a token: its prompt is too long")


def test_groups_that_fail_by_one_cause_count_as_one_failure(tmp_path: Path) -> None:
    """R6.6: one call of a rollout function that fails takes all of its groups with it; that is not everything failing."""
    setup = _Setup(tmp_path)
    cause = ConnectionError("the environment's server is away")
    failing = iter(range(12))  # twelve groups; eight failures in a row would end the run
    produce = setup.worker._producer.produce

    @asynccontextmanager
    async def one_cause(group: OpenGroup) -> AsyncIterator[None]:
        if next(failing, None) is not None:
            raise cause
        async with produce(group):
            yield

    setup.worker._producer.produce = one_cause  # type: ignore[method-assign]
    setup.taken(2, after_queueing=False)
    assert setup.groups()["failed"] == 12


def test_what_cancelled_calls_of_an_agent_had_sampled_is_failed_and_the_rest_trained(tmp_path: Path) -> None:
    """Of 5 tokens that each rollout sampled, 2 + 1 are in its paths. 4 groups of 4 rollouts: 16 x 2 lost."""
    setup = _Setup(tmp_path)

    def produce(group: OpenGroup) -> list[RolloutCompletion]:
        made = []
        for index in range(group.size):
            group.received(index, 5, 0)
            made.append(make_completion(f"{group.name}-r{index}", ids=[index, 2], text=str(index)))
            branch = Branch(name="b1", parent=0, prompt_ids=[1], turns=[make_turn([7])])
            made[-1] = replace(made[-1], branches=[branch])
        return made

    setup.produce_instead(produce)
    groups = setup.taken(4)
    assert sum(sample.num_trained_tokens for group in groups for sample in group.samples) == 16 * 3
    tokens = setup.table.ledger()["tokens"]
    assert (tokens["started"], tokens["failed"]) == (16 * 5, 16 * 2)
