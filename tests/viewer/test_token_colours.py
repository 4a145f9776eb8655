"""Which colour a token gets, and what the legend says it means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from grpo_async.records import TokenMark
from grpo_async.viewer.token_colours import SWATCHES, ColourMode, legend, mark_words, token_classes


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    advantage: float | None = 1.0
    mask: Sequence[int] = (1,)
    logprobs: Sequence[float | None] = (-1.0,)
    versions: Sequence[int] = (0,)
    trainer_logprobs: Sequence[float | None] | None = None
    entropies: Sequence[float | None] | None = None
    marks: Sequence[int | None] | None = field(default=None)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (0.0, "even"), (0.04, "even"), (0.05, "up-1"), (-0.4, "down-1"),
        (0.5, "up-2"), (-1.4, "down-2"), (1.5, "up-3"), (-9.0, "down-3"),
    ],
)  # fmt: skip
def test_advantages_by_their_size_and_sign(advantage: float, expected: str) -> None:
    assert token_classes(ColourMode.ADVANTAGE, _Tokens(advantage=advantage)) == [expected]


def test_a_clipped_token_has_no_gradient_and_a_tools_token_was_not_trained_on() -> None:
    tokens = _Tokens(
        advantage=2.0, mask=[1, 1, 0], logprobs=[-1.0, -1.0, 0.0], versions=[0, 0, -1], marks=[0, TokenMark.CLIPPED_HIGH, None]
    )  # fmt: skip
    assert token_classes(ColourMode.ADVANTAGE, tokens) == ["up-3", "no-gradient", "untrained"]
    assert [entry.text for entry in legend(ColourMode.ADVANTAGE, tokens)][-2:] == ["no gradient", "not trained on"]


def test_log_ratios_are_trainer_minus_sampler() -> None:
    # differences 0.01, 0.1, -0.3, 1.0; unknown where one of the two is
    tokens = _Tokens(
        mask=[1] * 6, versions=[0] * 6,
        logprobs=[-1.0, -1.0, -1.0, -2.0, None, -1.0], trainer_logprobs=[-0.99, -0.9, -1.3, -1.0, -1.0, None],
    )  # fmt: skip
    assert token_classes(ColourMode.LOG_RATIO, tokens) == ["even", "up-1", "down-2", "up-3", "unknown", "unknown"]
    assert token_classes(ColourMode.LOG_RATIO, _Tokens()) == ["unknown"]  # the trainer never saw it


def test_probabilities_and_entropies_have_five_levels() -> None:
    chances = [0.95, 0.89, 0.49, 0.09, 0.009]
    tokens = _Tokens(
        mask=[1] * 5, versions=[0] * 5, logprobs=[math.log(p) for p in chances], entropies=[0.05, 0.1, 0.6, 1.5, 2.0]
    )  # fmt: skip
    assert token_classes(ColourMode.PROBABILITY, tokens) == [f"level-{level}" for level in range(5)]
    assert token_classes(ColourMode.ENTROPY, tokens) == [f"level-{level}" for level in range(5)]
    assert token_classes(ColourMode.ENTROPY, _Tokens()) == ["unknown"]


def test_neighbouring_versions_differ_and_the_legend_names_those_that_are_there() -> None:
    tokens = _Tokens(mask=[1, 1, 0, 1], versions=[5, 6, -1, 11], logprobs=[-1.0, -1.0, 0.0, -1.0])
    assert token_classes(ColourMode.VERSION, tokens) == ["version-5", "version-0", "untrained", "version-5"]
    assert [(entry.name, entry.text) for entry in legend(ColourMode.VERSION, tokens)] == [
        ("version-5", "5, 11"), ("version-0", "6"), ("untrained", "not trained on"),
    ]  # fmt: skip


def test_the_strongest_mark_gives_the_colour_and_all_are_named() -> None:
    marks = TokenMark.CLIPPED_LOW | TokenMark.CORRECTED_AWAY
    tokens = _Tokens(mask=[1, 1], versions=[0, 0], logprobs=[-1.0, -1.0], marks=[0, marks])
    assert token_classes(ColourMode.MARKS, tokens) == ["trained", "corrected-away"]
    assert mark_words(marks) == ["masked by correction", "clipped low"]
    assert mark_words(None) == mark_words(0) == []
    assert [entry.name for entry in legend(ColourMode.MARKS, tokens)] == ["trained", "corrected-away"]


@pytest.mark.parametrize("mode", list(ColourMode))
def test_every_class_of_a_legend_has_its_colours(mode: ColourMode) -> None:
    for entry in legend(mode):
        assert entry.name in SWATCHES
        assert entry.text
    for mark in TokenMark:
        (name,) = token_classes(mode, _Tokens(marks=[mark], entropies=[1.0], trainer_logprobs=[-1.0]))
        assert name in SWATCHES


def test_the_cycle_of_modes_returns() -> None:
    mode, seen = ColourMode.ADVANTAGE, []
    for _ in ColourMode:
        seen.append(mode)
        mode = mode.following
    assert seen == list(ColourMode)
    assert mode is ColourMode.ADVANTAGE
