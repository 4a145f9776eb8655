"""Figures of each trained token: what a step collects, against the formulas; how they come to their rollouts; what it costs."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_async.batching.pack import MicroBatch, pack_rank
from grpo_async.batching.plan import plan_batch
from grpo_async.batching.weights import token_weights
from grpo_async.config.loss_sections import BaseLoss, LossSection
from grpo_async.config.model_sections import ModelSection, OptimizerSection
from grpo_async.records import RolloutSample, TokenFigures, TokenMark
from grpo_async.training.load import load_policy
from grpo_async.training.loss import Objective, ObjectiveOutput
from grpo_async.training.metrics import UpdateFigures
from grpo_async.training.model import Policy
from grpo_async.training.optimizer import make_optimizer
from grpo_async.training.step import StepResult, train_step
from grpo_async.training.token_figures import FigureOrder, FigurePlan, TokenCollector
from tests.support.ranks import run_on_ranks
from tests.support.records import make_sample
from tests.training.figure_jobs import MODULE, TRAINER_VERSION, figure_groups

CPU = torch.device("cpu")
Found = dict[str, list[tuple[float, float]]]  # rollout id -> (logprob, entropy) of each trained token

_RECOMPUTED = {"proximal": "recomputed"}
_TOKENS = {"level": "token", "action": "mask", "cap": 1.25, "floor": 0.8}
_SEQUENCES = {"level": "sequence", "action": "truncate", "cap": 1.5, "floor": 0.8}
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"type": "grpo"},
    "delta": {"type": "dapo", "delta": 1.3, "epsilon": 0.1},
    "gspo": {"type": "gspo", "epsilon": 0.05, "epsilon_high": 0.05},
    "cispo": {"type": "cispo", "epsilon_high": 1.2},
    "sapo": {"type": "sapo"},
    "custom": {"type": "custom", "function": "tests.training.test_losses_user:reinforce"},
    "token correction": {"type": "grpo", **_RECOMPUTED, "correction": _TOKENS},
    "sequence correction": {"type": "dapo", **_RECOMPUTED, "correction": _SEQUENCES},
    "sequence mask": {"type": "dr_grpo", **_RECOMPUTED, "correction": {**_SEQUENCES, "action": "mask"}},
    "log_linear": {"type": "dapo", "proximal": "log_linear", "correction": {"level": "token", "action": "none"}},
    "off_policy_mask": {"type": "dapo", "off_policy_mask": 0.001},
    "top_entropy_share": {"type": "dapo", "top_entropy_share": 0.6, "off_policy_mask": 0.001},
}


def _build(model: Path) -> tuple[Policy, torch.optim.Optimizer]:
    policy = load_policy(ModelSection(path=str(model)), temperature=1.0, chunk_tokens=16, max_model_len=256)
    return policy, make_optimizer(policy, OptimizerSection(lr=1e-2))


def _section(values: Mapping[str, Any]) -> BaseLoss:
    section: BaseLoss = TypeAdapter(LossSection).validate_python(values)
    return section


def _samples(num_groups: int = 6) -> list[RolloutSample]:
    return [sample for group in figure_groups(num_groups) for sample in group.samples]


def _plan_and_pack(
    minibatches: Sequence[Sequence[RolloutSample]],
    *,
    kept: Callable[[RolloutSample], bool] = lambda sample: True,
    micro_batch_tokens: int = 64,
) -> tuple[FigurePlan, list[list[MicroBatch]]]:
    figures, packed = FigurePlan(1), []
    for samples in minibatches:
        lengths = [len(sample.token_ids) for sample in samples]
        plan = plan_batch(lengths, num_ranks=1, micro_batch_tokens=micro_batch_tokens, pack=True)
        weights = token_weights(samples, plan, reduction="dapo", max_completion_tokens=32)
        packed.append(pack_rank(samples, weights, plan, 0, trainer_version=TRAINER_VERSION))
        figures.add(samples, plan, is_wanted=[kept(sample) for sample in samples])
    return figures, packed


def _step(
    model: Path, section: BaseLoss, minibatches: Sequence[Sequence[RolloutSample]], **settings: Any
) -> tuple[dict[str, TokenFigures], StepResult, Policy]:
    """One step on one rank without a process group; the figures of the samples that are kept."""
    policy, optimizer = _build(model)
    figures, packed = _plan_and_pack(minibatches, **settings)
    (order,) = figures.orders()
    tokens = None if order is None else TokenCollector(order, CPU)
    result = _train(policy, optimizer, packed, section, tokens)
    return ({} if tokens is None else figures.by_rollout([tokens.on_host()], result.updates)), result, policy


def _train(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    packed: Sequence[Sequence[MicroBatch]],
    section: BaseLoss,
    tokens: TokenCollector | None,
) -> StepResult:
    objective = Objective(section, num_minibatches=len(packed))
    return train_step(
        policy, optimizer, packed, objective=objective, reference=None, lr=1e-2, max_grad_norm=0.5, device=CPU, tokens=tokens
    )  # fmt: skip


def _look(policy: Policy, samples: Sequence[RolloutSample]) -> Found:
    """What the policy says of each sample, one alone in a forward."""
    found = {}
    for sample in samples:
        (batch,) = _plan_and_pack([[sample]])[1][0]
        with torch.no_grad():
            output = policy(batch)
        found[sample.rollout_id] = list(zip(output.logprobs.tolist(), output.entropy.tolist(), strict=True))
    return found


def _by_hand(section: Any, samples: Sequence[RolloutSample], start: Found, now: Found) -> dict[str, list[list[float]]]:
    """The figures of one minibatch from the formulas of the papers, token by token. `start`: of the policy at the start of the
    step; `now`: at its forward. Rows of logprob, proximal logprob, weight, entropy, marks."""
    entropies = [entropy for sample in samples for _, entropy in start[sample.rollout_id]]
    threshold = float(np.quantile(entropies, 1.0 - section.top_entropy_share))
    rows = {}
    for sample in samples:
        trained = [position for position, mask in enumerate(sample.loss_mask) if mask]
        sampler = [sample.sampler_logprobs[position] for position in trained]
        ages = [TRAINER_VERSION - sample.policy_versions[position] for position in trained]
        logprobs = [logprob for logprob, _ in now[sample.rollout_id]]
        proximal = {
            "sampler": sampler,
            "recomputed": [logprob for logprob, _ in start[sample.rollout_id]],
            "log_linear": [s + a / (a + 1) * (p - s) for s, a, p in zip(sampler, ages, logprobs, strict=True)],
        }[section.proximal]
        logs = [p - old for p, old in zip(logprobs, proximal, strict=True)]
        if section.type == "gspo":
            logs = [sum(logs) / len(logs)] * len(logs)
        weights = ratios = [math.exp(value) for value in logs]
        low = 1.0 - getattr(section, "epsilon", 1.0)
        high = section.epsilon_high if section.type == "cispo" else 1.0 + getattr(section, "epsilon_high", math.inf)
        cap = section.epsilon_high if section.type == "cispo" else getattr(section, "delta", None) or math.inf
        weights = [min(ratio, cap) for ratio in ratios]
        correction, is_away = section.correction, [False] * len(logs)
        if correction is not None:
            apart = [old - s for old, s in zip(proximal, sampler, strict=True)]
            if correction.level == "sequence":
                apart = [sum(apart)] * len(apart)
            weights = [math.exp(value) for value in apart]
            floor = correction.floor or 0.0
            if correction.action == "mask":
                is_away = [not floor <= weight <= correction.cap for weight in weights]
                weights = [0.0 if away else weight for weight, away in zip(weights, is_away, strict=True)]
            if correction.action == "truncate":
                weights = [min(max(weight, floor), correction.cap) for weight in weights]
        divergence = sum(s - p for s, p in zip(sampler, logprobs, strict=True)) / len(logprobs)
        limit = section.off_policy_mask
        is_off = limit is not None and sample.advantage < 0 and divergence > limit
        marks = []
        for number, ratio in enumerate(ratios):
            mark = TokenMark.NONE
            if ratio < low and sample.advantage < 0 and section.type != "cispo":
                mark |= TokenMark.CLIPPED_LOW
            if ratio > high and sample.advantage > 0:
                mark |= TokenMark.CLIPPED_HIGH
            if is_away[number]:
                mark |= TokenMark.CORRECTED_AWAY
            if is_off:
                mark |= TokenMark.OFF_POLICY
            if section.top_entropy_share < 1.0 and start[sample.rollout_id][number][1] < threshold:
                mark |= TokenMark.LOW_ENTROPY
            marks.append(float(mark))
        rows[sample.rollout_id] = [logprobs, proximal, weights, [e for _, e in now[sample.rollout_id]], marks]
    return rows


def _rows(figures: TokenFigures) -> list[list[float]]:
    columns = (figures.logprobs, figures.proximal_logprobs, figures.weights, figures.entropies, figures.marks)
    return [[float(value) for value in column] for column in columns]


def _assert_rows(found: Mapping[str, TokenFigures], expected: Mapping[str, list[list[float]]]) -> None:
    assert found.keys() == expected.keys()
    for rollout_id, rows in expected.items():
        mine = _rows(found[rollout_id])
        for row, values in zip(mine[:4], rows[:4], strict=True):
            assert row == pytest.approx(values, rel=1e-4, abs=2e-5)
        assert mine[4] == rows[4], rollout_id


@pytest.mark.parametrize("name", LOSSES)
def test_the_figures_of_a_step_are_those_of_the_formulas(tiny_model: Path, name: str) -> None:
    """Twelve samples with tool tokens between sampled ones, in several packed micro-batches."""
    section, samples = _section(LOSSES[name]), _samples()
    policy, _ = _build(tiny_model)
    looked = _look(policy, samples)
    figures, _, _ = _step(tiny_model, section, [samples])
    expected = _by_hand(section, samples, looked, looked)
    _assert_rows(figures, expected)
    for sample in samples:
        mine = figures[sample.rollout_id]
        assert len(mine.logprobs) == len(mine.marks) == sample.num_trained_tokens < sum(map(bool, sample.token_ids))
    marked = {int(mark) for row in figures.values() for mark in row.marks}
    assert (marked == {0}) == (name in ("sapo", "custom", "sequence correction")), "the case says little"


def test_every_mark_is_met_by_one_of_these_losses(tiny_model: Path) -> None:
    """But for SKIPPED, which is no loss's: or the test above would say little."""
    bits = 0
    for values in LOSSES.values():
        for row in _step(tiny_model, _section(values), [_samples()])[0].values():
            bits |= int(np.bitwise_or.reduce(row.marks))
    assert {mark for mark in TokenMark if mark & bits} == set(TokenMark) - {TokenMark.SKIPPED}


@pytest.mark.parametrize("name", ["recomputed", "log_linear", "top_entropy_share"])
def test_the_second_update_of_a_step_has_the_policy_that_the_first_one_made(tiny_model: Path, name: str) -> None:
    """And the proximal policy of the start of the step, or what its own forward gives."""
    values = {"recomputed": {"type": "dapo", **_RECOMPUTED, "correction": _TOKENS}, **LOSSES}[name]
    section, samples = _section(values), _samples()
    halves = [samples[:6], samples[6:]]
    policy, optimizer = _build(tiny_model)
    start = _look(policy, samples)
    _train(policy, optimizer, _plan_and_pack([halves[0]])[1], section, None)
    later = _look(policy, halves[1])
    assert any(abs(a[0] - b[0]) > 1e-2 for key in later for a, b in zip(later[key], start[key], strict=True))
    figures, _, _ = _step(tiny_model, section, halves)
    _assert_rows(figures, {**_by_hand(section, halves[0], start, start), **_by_hand(section, halves[1], start, later)})


@pytest.mark.parametrize("bad", [0, 1])
def test_the_tokens_of_an_update_that_was_skipped_are_marked(tiny_model: Path, bad: int) -> None:
    samples = _samples()
    halves = [samples[:6], samples[6:]]
    halves[bad] = [replace(halves[bad][0], advantage=float("nan")), *halves[bad][1:]]
    figures, result, _ = _step(tiny_model, _section({"type": "dapo"}), halves)
    assert result.updates == (bad != 0, bad != 1)
    for half, is_made in zip(halves, result.updates, strict=True):
        for sample in half:
            marks = [TokenMark(int(mark)) for mark in figures[sample.rollout_id].marks]
            assert all((TokenMark.SKIPPED in mark) != is_made for mark in marks)
    assert sum(len(row.marks) for row in figures.values()) == sum(sample.num_trained_tokens for sample in samples)


def test_the_mean_of_the_weights_and_the_other_metrics_follow_from_the_figures(tiny_model: Path) -> None:
    figures, result, _ = _step(tiny_model, _section({"type": "dapo", "epsilon": 0.1}), [_samples()])
    weights = np.concatenate([row.weights for row in figures.values()]).astype(np.float64)
    entropies = np.concatenate([row.entropies for row in figures.values()]).astype(np.float64)
    marks = np.concatenate([row.marks for row in figures.values()])
    metrics = result.metrics
    assert len(weights) == metrics["num_tokens"]
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(weights.mean(), rel=1e-9)
    assert metrics["sampling/importance_sampling_ratio/min"] == weights.min()
    assert metrics["sampling/importance_sampling_ratio/max"] == weights.max()
    assert metrics["entropy"] == pytest.approx(entropies.mean(), rel=1e-6)
    assert metrics["clip_ratio/low_mean"] == pytest.approx(np.mean(marks & TokenMark.CLIPPED_LOW > 0))
    assert metrics["clip_ratio/high_mean"] == pytest.approx(np.mean(marks & TokenMark.CLIPPED_HIGH > 0))


def test_collecting_changes_nothing_of_the_step(tiny_model: Path) -> None:
    """To the last bit: a synchronous run is the same whether it stores figures or not."""
    section = _section({"type": "dapo", **_RECOMPUTED, "correction": _TOKENS, "top_entropy_share": 0.7})
    samples = _samples()
    halves = [samples[:6], samples[6:]]
    with_figures, without = (
        _step(tiny_model, section, halves, kept=lambda sample, kept=kept: kept) for kept in (True, False)
    )
    assert without[0] == {}
    assert with_figures[1].metrics == without[1].metrics
    for one, other in zip(with_figures[2].parameters(), without[2].parameters(), strict=True):
        assert torch.equal(one, other)


# who has what


def test_only_micro_batches_with_a_token_that_is_stored_are_collected(tiny_model: Path) -> None:
    """Ten of twelve samples are not stored: what is collected is the whole of the micro-batches of the two."""
    samples = [replace(sample, group_id=index) for index, sample in enumerate(_samples())]
    chosen = {samples[2].rollout_id, samples[7].rollout_id}
    figures, packed = _plan_and_pack([samples], kept=lambda sample: sample.rollout_id in chosen)
    (order,) = figures.orders()
    assert order is not None
    assert len(order.is_wanted) == len(packed[0]) > sum(order.is_wanted) > 0
    wanted = [batch for batch, is_wanted in zip(packed[0], order.is_wanted, strict=True) if is_wanted]
    assert order.room == sum(batch.num_trained_tokens for batch in wanted)
    assert order.room < sum(sample.num_trained_tokens for sample in samples)
    section = _section({"type": "dapo"})
    some, _, _ = _step(tiny_model, section, [samples], kept=lambda sample: sample.rollout_id in chosen)
    everything, _, _ = _step(tiny_model, section, [samples])
    assert some.keys() == chosen
    for rollout_id in chosen:
        assert _rows(some[rollout_id]) == _rows(everything[rollout_id])


def test_where_nothing_is_stored_nothing_is_asked_of_any_rank() -> None:
    plan = plan_batch([4, 4], num_ranks=2, micro_batch_tokens=8, pack=True)
    figures = FigurePlan(2)
    figures.add([make_sample(), make_sample()], plan, is_wanted=[False, False])
    assert figures.orders() == [None, None]


def test_all_ranks_make_the_same_room_also_the_one_without_samples() -> None:
    """Two ranks and one sample of three trained tokens; then a minibatch of two samples, a rank for each."""
    figures = FigurePlan(2)
    one = make_sample(completion=(5, 6, 7))
    cut: dict[str, Any] = {"num_ranks": 2, "micro_batch_tokens": 8, "pack": True}
    figures.add([one], plan_batch([5], **cut), is_wanted=[True])
    assert figures.orders() == [FigureOrder(is_wanted=[True], room=3), FigureOrder(is_wanted=[], room=3)]
    figures.add([one, one], plan_batch([5, 5], **cut), is_wanted=[False, True])
    first, second = figures.orders()
    assert first is not None
    assert second is not None
    assert (first.room, second.room) == (3, 3)
    assert (first.is_wanted, second.is_wanted) == ([True, False], [True])


def test_a_sample_without_trained_tokens_has_no_figures(tiny_model: Path) -> None:
    samples = _samples(2)
    samples[1] = replace(samples[1], loss_mask=[0] * len(samples[1].loss_mask))
    figures, _, _ = _step(tiny_model, _section({"type": "dapo"}), [samples])
    assert sorted(figures) == [samples[0].rollout_id, samples[2].rollout_id, samples[3].rollout_id]
    _assert_rows(
        figures,
        _by_hand(_section({"type": "dapo"}), [samples[0], *samples[2:]], *[_look(_build(tiny_model)[0], samples)] * 2),
    )


# what it costs


class _Reads(TorchDispatchMode):
    """Counts what brings a number of a tensor to the host, or moves one between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.unique")) or (
            name.startswith("aten._to_copy") and (kwargs or {}).get("device") is not None
        ):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def _counted_methods(monkeypatch: pytest.MonkeyPatch, counts: dict[str, int]) -> Any:
    """Counts the methods that read a tensor without going through the dispatcher."""
    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
            original = getattr(torch.Tensor, name)

            def counted(tensor: torch.Tensor, *args: Any, _name: str = name, _original: Any = original) -> Any:
                counts[_name] = counts.get(_name, 0) + 1
                return _original(tensor, *args)

            patch.setattr(torch.Tensor, name, counted)
        yield


def test_a_step_reads_nothing_more_from_the_device_when_it_collects(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every way by which the host could wait for a device is counted in a step of two updates and several micro-batches, with and
    without: .item, .tolist and so on, the dispatcher's reads, and boolean indexing."""
    samples = _samples()
    section = _section({"type": "dapo", **_RECOMPUTED, "correction": _TOKENS, "off_policy_mask": 0.001})
    found = []
    for collects in (False, True):
        policy, optimizer = _build(tiny_model)
        figures, packed = _plan_and_pack([samples[:6], samples[6:]])
        (order,) = figures.orders()
        assert order is not None
        assert len(order.is_wanted) >= 4
        tokens = TokenCollector(order, CPU) if collects else None
        counts: dict[str, int] = {}
        with _counted_methods(monkeypatch, counts), _Reads() as reads:
            _train(policy, optimizer, packed, section, tokens)
        found.append((counts, reads.names))
    assert found[0] == found[1]
    assert found[0][0]["tolist"] >= 2  # that of each update, and those of the layouts of rows: the counting works


def test_the_copy_to_the_host_is_begun_before_the_transfer_of_the_last_update(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it is then over when that transfer is, and nothing waits for the optimizer's update."""
    events: list[str] = []
    policy, optimizer = _build(tiny_model)
    for owner, name in ((TokenCollector, "begin_copy"), (UpdateFigures, "gather"), (optimizer, "step")):
        original: Any = getattr(owner, name)

        def noted(*arguments: Any, _name: str = name, _original: Any = original) -> Any:
            events.append(_name)
            return _original(*arguments)

        monkeypatch.setattr(owner, name, noted)
    samples = _samples()
    figures, packed = _plan_and_pack([samples[:6], samples[6:]])
    (order,) = figures.orders()
    assert order is not None
    _train(policy, optimizer, packed, _section({"type": "dapo"}), TokenCollector(order, CPU))
    assert events == ["gather", "step", "begin_copy", "gather", "step"]


def test_a_token_takes_twenty_bytes_and_nothing_of_a_micro_batch_is_kept(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    add = TokenCollector.add

    def watched(self: TokenCollector, output: ObjectiveOutput) -> None:
        gc.collect()
        alive.append(sum(reference() is not None for reference in outputs))
        outputs.append(weakref.ref(output.total))
        add(self, output)

    monkeypatch.setattr(TokenCollector, "add", watched)
    samples = _samples()
    policy, optimizer = _build(tiny_model)
    figures, packed = _plan_and_pack([samples])
    (order,) = figures.orders()
    assert order is not None
    tokens = TokenCollector(order, CPU)
    result = _train(policy, optimizer, packed, _section({"type": "dapo"}), tokens)
    assert len(alive) > 3
    assert max(alive) <= 1  # the one before is let go when the next is there
    collected = tokens.on_host()
    assert collected.nbytes == 20 * sum(sample.num_trained_tokens for sample in samples)
    by_rollout = figures.by_rollout([collected], result.updates)
    for row in by_rollout.values():
        assert not np.shares_memory(np.asarray(row.logprobs), collected.numpy())
        assert (np.asarray(row.weights).dtype, np.asarray(row.marks).dtype) == (np.float32, np.uint8)


# ranks

_EVERY = {
    "proximal": "recomputed",
    "beta": 0.1,
    "off_policy_mask": 0.001,
    "entropy_bonus": 0.01,
    "top_entropy_share": 0.7,
}
ON_RANKS: dict[str, dict[str, Any]] = {
    "grpo": {"type": "grpo", **_EVERY, "correction": _TOKENS},
    "gspo": {"type": "gspo", "epsilon": 0.05, "epsilon_high": 0.05, "off_policy_mask": 0.001},
    "dapo": {"type": "dapo", **_EVERY, "correction": _SEQUENCES},
    "cispo": {"type": "cispo", "epsilon_high": 1.1},
}


@pytest.fixture(scope="module")
def plain(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One rank, one sample per row, everything of a minibatch in one micro-batch."""
    folder = tmp_path_factory.mktemp("plain")
    return run_on_ranks("train", 1, folder, module=MODULE, **models, losses=ON_RANKS, minibatches=2, pack=False)


def _assert_same_figures(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["figures"].keys() == other["figures"].keys()
    for rollout_id, rows in one["figures"].items():
        mine = other["figures"][rollout_id]
        for name in ("logprobs", "proximal_logprobs", "weights", "entropies"):
            assert mine[name] == pytest.approx(rows[name], rel=2e-4, abs=1e-4), (rollout_id, name)
        assert mine["marks"] == rows["marks"], rollout_id


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (1, {}),  # packed
        (1, {"pack": False, "micro_batch_tokens": 78}),  # two or more samples in a micro-batch
        (2, {"micro_batch_tokens": 64}),  # packed, several micro-batches, two ranks
        (4, {"num_nodes": 2, "pack": False, "micro_batch_tokens": 78}),  # 2 x 2: hybrid sharding
    ],
    ids=["packed", "many-micro-batches", "two-ranks", "hybrid"],
)
def test_every_rollout_has_the_same_figures_however_a_step_is_cut(
    models: dict[str, Path], tmp_path: Path, plain: dict[str, Any], num_ranks: int, settings: dict[str, Any]
) -> None:
    """Two updates, by the loop of rank 0 and its followers."""
    found = run_on_ranks(
        "train", num_ranks, tmp_path, module=MODULE, **models, losses=ON_RANKS, minibatches=2, **settings
    )
    for name in ON_RANKS:
        assert len(plain[name]["figures"]) == 12
        assert {mark for row in plain[name]["figures"].values() for mark in row["marks"]} - {0.0}, "no token is marked"
        _assert_same_figures(plain[name], found[name])


@pytest.mark.slow
def test_a_rank_without_samples_and_groups_that_are_not_stored_do_no_harm(
    models: dict[str, Path], tmp_path: Path, plain: dict[str, Any]
) -> None:
    """Two groups of two samples in two updates on three ranks: each update leaves one rank with nothing. Of the first only it is
    stored, and the second one's update is not finite."""
    settings: dict[str, Any] = {"losses": {"grpo": {"type": "grpo"}}, "num_groups": 2, "minibatches": 2, "pack": False}
    every = run_on_ranks("train", 3, tmp_path / "three", module=MODULE, **models, poisoned=[1], **settings)["grpo"]
    alone = run_on_ranks("train", 1, tmp_path / "one", module=MODULE, **models, kept=[0], **settings)["grpo"]
    assert every["updates"] == [True, False]
    assert sorted(every["figures"]) == ["g0-r0", "g0-r1", "g1-r0", "g1-r1"]
    assert sorted(alone["figures"]) == ["g0-r0", "g0-r1"]
    for rollout_id, rows in every["figures"].items():
        assert {int(mark) & TokenMark.SKIPPED for mark in rows["marks"]} == {
            TokenMark.SKIPPED if rollout_id.startswith("g1") else 0
        }
    kept = {"figures": {key: rows for key, rows in every["figures"].items() if key.startswith("g0")}}
    _assert_same_figures(alone, kept)


@pytest.mark.slow
def test_a_rank_that_does_not_bring_its_figures_ends_the_wait_at_its_deadline(tmp_path: Path) -> None:
    error = run_on_ranks("wait_for_a_rank", 2, tmp_path, module=MODULE, timeout_s=5.0)
    assert error["type"] == "DeadlineError"
    assert "the figures of the tokens" in error["text"]
    assert "training.queue_timeout_s" in error["text"]
