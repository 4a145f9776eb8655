"""The step's benchmark, small: both sides compute the same, and what is counted is counted."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import _step_sides, step
from benchmarks._step_sides import PlainSide, StepOutcome
from benchmarks.report import Report
from grpo_async.batching.prompts import num_prompt_tokens
from grpo_async.records import RolloutSample
from tests.benchmarks.support import run_apart

TINY = [
    "--samples", "32", "--group-size", "8", "--prompt-tokens", "8", "--completion-tokens", "32", "--micro-batch-tokens", "128",
    "--vocab", "256", "--hidden", "32", "--layers", "2", "--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--chunk", "16",
    "--rounds", "2", "--device", "cpu",
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.slow
def test_the_step_and_the_padded_loops_compute_the_same_and_are_compared(tmp_path: Path) -> None:
    """Exit code 1 may only come from the speed, which two rounds of a tiny step do not tell; what differs raises SystemExit."""
    report = tmp_path / "report.json"
    assert run_apart("step", [*TINY, "--minibatches", "2", "--json", str(report)]) in (0, 1)
    found = json.loads(report.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    for side in ("packed", "padded", "sorted"):
        assert rows[f"{side}: trained tokens/s"]["lowest"] > 0.0
        assert 0.0 < rows[f"{side}: needed / computed tokens"]["median"] <= 1.0
    assert rows["packed: needed / computed tokens"]["median"] > rows["padded: needed / computed tokens"]["median"]
    assert rows["packed: computed tokens"]["median"] < sum(len(sample.token_ids) for sample in _samples())
    assert rows["packed over padded"]["n"] == 2
    assert rows["padded: needed / computed tokens"]["median"] == pytest.approx(_real_over_padded())


def _real_over_padded() -> float:
    """Of the samples of TINY in two updates, in the order in which they come."""
    side = PlainSide.__new__(PlainSide)
    side._is_sorted, side._num_ranks, side._options = False, 1, Namespace(micro_batch_tokens=128)
    samples = _samples()
    batches = [batch for part in (samples[:16], samples[16:]) for batch in side._cut(part)[0]]
    real = sum(len(sample.token_ids) for sample in samples)
    return real / sum(_step_sides.pad(batch)[0].numel() for batch in batches)


def _samples() -> list[RolloutSample]:
    """Those of TINY."""
    return _step_sides.make_samples(
        Namespace(samples=32, group_size=8, prompt_tokens=8, completion_tokens=32, vocab=256, seed=0)
    )


def test_a_group_has_one_prompt_and_completions_of_its_own() -> None:
    samples = _samples()
    prompts = [tuple(sample.token_ids[: num_prompt_tokens(sample)]) for sample in samples]
    assert [len(set(prompts[start : start + 8])) for start in range(0, 32, 8)] == [1, 1, 1, 1]
    assert len(set(prompts)) == 4
    assert len({tuple(sample.token_ids) for sample in samples}) == 32


def test_the_median_round_decides_and_speed_counts_trained_tokens_only() -> None:
    """A step of 200 tokens, 120 of them trained. Rounds of 2, 2 and 1 s against 3, 4 and 0.5 s."""
    report = Report("step", {"seed": 0})
    seconds = {"packed": [2.0, 2.0, 1.0], "padded": [3.0, 4.0, 0.5], "sorted": [1.0, 1.0, 1.0]}
    outcomes = {
        name: StepOutcome(
            loss=0.0, grad_norm=1.0, computed_tokens=computed, shared_tokens=shared, num_micro_batches=number
        )
        for number, (name, computed, shared) in enumerate(
            [("packed", 160, 48), ("padded", 400, 0), ("sorted", 250, 0)], 1
        )
    }
    step._report_speed(report, seconds, outcomes, trained=120, real=200)
    rows = {row.name: row.values for row in report.rows}
    assert rows["packed: trained tokens/s"] == (60.0, 60.0, 120.0)
    assert rows["packed over padded"] == (1.5, 2.0, 0.5)
    assert rows["packed over sorted"] == (0.5, 0.5, 1.0)
    assert rows["packed: needed / computed tokens"] == (0.95,)
    assert rows["padded: needed / computed tokens"] == (0.5,)
    assert rows["sorted: micro-batches"] == (3.0,)
    (target,) = report.targets
    assert (target.value, target.at_least, target.met) == (1.5, 1.0, True)


def test_padding_keeps_what_a_sample_is_and_the_grid_is_what_is_computed() -> None:
    samples = [_sample([1, 2, 3], trained=1, advantage=0.5), _sample([4, 5, 6], trained=2, advantage=-1.0)]
    ids, mask, trained, old, advantages = (tensor.tolist() for tensor in _step_sides.pad(samples))
    assert ids == [[1, 2, 3, 0], [0, 4, 5, 6]]
    assert mask == [[1, 1, 1, 0], [0, 1, 1, 1]]
    assert trained == [[1.0, 0.0], [1.0, 1.0]]
    assert old == [[-3.0, 0.0], [-2.0, -3.0]]
    assert advantages == [0.5, -1.0]
    assert _step_sides._grid(samples) == (2, 4)


@pytest.mark.parametrize(("is_sorted", "num_ranks", "lengths"), [
    (False, 1, [[[2, 5], [3, 5]]]),  # 2 x 5 of at most 10 tokens
    (True, 1, [[[5, 5], [3, 2]]]),
    (False, 2, [[[2, 3]], [[5, 5]]]),
])  # fmt: skip
def test_the_loop_fills_its_micro_batches_with_padding_counted(
    is_sorted: bool, num_ranks: int, lengths: list[list[list[int]]]
) -> None:
    side = PlainSide.__new__(PlainSide)
    side._is_sorted, side._num_ranks, side._options = is_sorted, num_ranks, Namespace(micro_batch_tokens=10)
    samples = [_sample(list(range(length)), trained=1, advantage=0.0) for length in (2, 5, 3, 5)]
    found = side._cut(samples)
    assert [[[len(sample.token_ids) for sample in batch] for batch in rank] for rank in found] == lengths
    for batch in (batch for rank in found for batch in rank):
        rows, length = _step_sides._grid(batch)
        assert rows * length == _step_sides.pad(batch)[0].numel() <= 10


def _sample(ids: list[int], *, trained: int, advantage: float) -> RolloutSample:
    prompt = len(ids) - trained
    return RolloutSample(
        group_id=0, rollout_id="0", token_ids=ids, loss_mask=[0] * prompt + [1] * trained,
        sampler_logprobs=[0.0] * prompt + [-float(place + 1) for place in range(prompt, len(ids))],
        policy_versions=[-1] * prompt + [0] * trained, advantage=advantage, rewards={}, reward=None, truncated=False,
    )  # fmt: skip
