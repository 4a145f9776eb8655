"""How tokens are coloured: one figure of each token -> a class, and a legend that says what the classes mean. Pure.

A class is a word (`up-2`, `level-3`, `version-1`, `clipped-high`); `SWATCHES` has its background for dark and light screens. The
terminal makes styles of them, the web page CSS. Worked example, log ratio: trainer -1.0, sampler -1.3 -> 0.3 -> `up-2`, "≥0.2".
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from grpo_async.records import TokenMark


class ColourMode(StrEnum):
    """What the colours of the tokens stand for. The order is that of the key that cycles them."""

    ADVANTAGE = "advantage"  # what the token was pushed by
    LOG_RATIO = "log_ratio"  # trainer's logprob - sampler's logprob
    PROBABILITY = "probability"  # how likely the sampler found it
    ENTROPY = "entropy"  # of the trainer's distribution at the token, nats
    VERSION = "version"  # the policy version that sampled it
    MARKS = "marks"  # trained on or not, and what took its gradient

    @property
    def label(self) -> str:
        return _LABELS[self]

    @property
    def following(self) -> ColourMode:
        """The next in the cycle."""
        modes = list(ColourMode)
        return modes[(modes.index(self) + 1) % len(modes)]


class Tokens(Protocol):
    """The lists that colours are made of, one entry per completion token; a `store.RolloutRow` is one.

    The figures of the trainer are None where it never saw the rollout; their entries are None where the mask is 0, and any figure
    where it was not finite.
    """

    @property
    def advantage(self) -> float | None: ...
    @property
    def mask(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float | None]: ...
    @property
    def versions(self) -> Sequence[int]: ...
    @property
    def trainer_logprobs(self) -> Sequence[float | None] | None: ...
    @property
    def entropies(self) -> Sequence[float | None] | None: ...
    @property
    def marks(self) -> Sequence[int | None] | None: ...


@dataclass(frozen=True, slots=True)
class Swatch:
    """Background of a class as #rrggbb on a dark and on a light screen; None: the screen's own."""

    dark: str | None
    light: str | None


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """One class of a mode and what it means."""

    name: str  # the class
    text: str


UNTRAINED = "untrained"  # mask 0: tokens of the prompt's template, tools, environments; shown dim
UNKNOWN = "unknown"  # the figure was not recorded
NO_GRADIENT = "no-gradient"  # trained on, but clipped or left out
NUM_VERSION_COLOURS = 6  # version-0 .. version-5, then from the start: neighbours always differ

SWATCHES: dict[str, Swatch] = {
    UNTRAINED: Swatch(None, None),
    UNKNOWN: Swatch(None, None),
    NO_GRADIENT: Swatch("#4a4a4a", "#d4d4d4"),
    "down-3": Swatch("#8a1f2b", "#ff9ea6"),
    "down-2": Swatch("#652630", "#ffc4c8"),
    "down-1": Swatch("#45262c", "#ffe2e4"),
    "even": Swatch(None, None),
    "up-1": Swatch("#1d3a2a", "#dcf5e3"),
    "up-2": Swatch("#1d5636", "#b3e8c3"),
    "up-3": Swatch("#147a42", "#7fd69b"),
    "level-0": Swatch(None, None),
    "level-1": Swatch("#3b3520", "#fff6d1"),
    "level-2": Swatch("#5c4a14", "#ffe79a"),
    "level-3": Swatch("#7d4a10", "#ffc876"),
    "level-4": Swatch("#97330f", "#ff9c66"),
    "version-0": Swatch("#1f3f6b", "#cfe2ff"),
    "version-1": Swatch("#1d5147", "#c9f0e4"),
    "version-2": Swatch("#5a3a6e", "#ead6f7"),
    "version-3": Swatch("#66501b", "#fbe9b5"),
    "version-4": Swatch("#6b2f45", "#fbd3e0"),
    "version-5": Swatch("#3d5220", "#e0efc4"),
    "trained": Swatch("#1d3a2a", "#dcf5e3"),
    "clipped-low": Swatch("#1f3f6b", "#b9d4ff"),
    "clipped-high": Swatch("#7d4a10", "#ffc876"),
    "corrected-away": Swatch("#5a3a6e", "#dcbcf2"),
    "off-policy": Swatch("#8a1f2b", "#ff9ea6"),
    "low-entropy": Swatch("#1d5147", "#b4e5d6"),
    "skipped": Swatch("#4a4a4a", "#d4d4d4"),
}

_LABELS = {
    ColourMode.ADVANTAGE: "advantage",
    ColourMode.LOG_RATIO: "log ratio (trainer - sampler)",
    ColourMode.PROBABILITY: "sampler's probability",
    ColourMode.ENTROPY: "entropy",
    ColourMode.VERSION: "policy version",
    ColourMode.MARKS: "mask and marks",
}
ADVANTAGE_BOUNDS = (0.05, 0.5, 1.5)  # of the absolute value: even, 1, 2, 3
LOG_RATIO_BOUNDS = (0.02, 0.2, 0.7)  # 0.18 is ln 1.2, the usual clip range; 0.7 is twice as likely
PROBABILITY_BOUNDS = (0.9, 0.5, 0.1, 0.01)  # level 0 from 0.9 up
ENTROPY_BOUNDS = (0.1, 0.5, 1.0, 2.0)  # nats; 0.69 is a fair choice between two tokens

# The strongest first: a token has one colour, and its words have all marks.
_MARKS: tuple[tuple[TokenMark, str, str], ...] = (
    (TokenMark.SKIPPED, "skipped", "update skipped"),
    (TokenMark.OFF_POLICY, "off-policy", "off policy"),
    (TokenMark.CORRECTED_AWAY, "corrected-away", "masked by correction"),
    (TokenMark.LOW_ENTROPY, "low-entropy", "low entropy"),
    (TokenMark.CLIPPED_LOW, "clipped-low", "clipped low"),
    (TokenMark.CLIPPED_HIGH, "clipped-high", "clipped high"),
)


def token_classes(mode: ColourMode, tokens: Tokens) -> list[str]:
    """The class of every completion token. [num_tokens]"""
    figures = _FIGURES[mode]
    return [figures(tokens, index) if kept else UNTRAINED for index, kept in enumerate(tokens.mask)]


def legend(mode: ColourMode, tokens: Tokens | None = None) -> list[LegendEntry]:
    """What the classes of a mode mean, weakest to strongest; with `tokens`, of the versions and marks only those it has."""
    present = None if tokens is None else set(token_classes(mode, tokens))
    entries = _legend_of(mode, tokens)
    if present is not None:
        if mode in (ColourMode.VERSION, ColourMode.MARKS):
            entries = [entry for entry in entries if entry.name in present]
        for name, text in ((NO_GRADIENT, "no gradient"), (UNKNOWN, "not recorded"), (UNTRAINED, "not trained on")):
            if name in present and all(entry.name != name for entry in entries):
                entries.append(LegendEntry(name, text))
    return entries


def mark_words(marks: int | None) -> list[str]:
    """4 | 1 -> ['masked by correction', 'clipped low']; none for 0 and None."""
    return [words for mark, _, words in _MARKS if (marks or 0) & mark]


def log_ratio(trainer: float | None, sampler: float | None) -> float | None:
    """trainer - sampler, None where one is not known (or was not finite)."""
    return None if trainer is None or sampler is None else trainer - sampler


def _advantage_class(tokens: Tokens, index: int) -> str:
    if tokens.advantage is None:
        return UNKNOWN
    if _mark_at(tokens, index):
        return NO_GRADIENT
    return _signed(tokens.advantage, ADVANTAGE_BOUNDS)


def _log_ratio_class(tokens: Tokens, index: int) -> str:
    trainer = None if tokens.trainer_logprobs is None else tokens.trainer_logprobs[index]
    ratio = log_ratio(trainer, tokens.logprobs[index])
    return UNKNOWN if ratio is None else _signed(ratio, LOG_RATIO_BOUNDS)


def _probability_class(tokens: Tokens, index: int) -> str:
    if (logprob := tokens.logprobs[index]) is None:
        return UNKNOWN
    probability = math.exp(min(logprob, 0.0))
    return f"level-{sum(probability < bound for bound in PROBABILITY_BOUNDS)}"


def _entropy_class(tokens: Tokens, index: int) -> str:
    entropy = None if tokens.entropies is None else tokens.entropies[index]
    return UNKNOWN if entropy is None else f"level-{bisect_right(ENTROPY_BOUNDS, entropy)}"


def _version_class(tokens: Tokens, index: int) -> str:
    return f"version-{tokens.versions[index] % NUM_VERSION_COLOURS}"


def _mark_class(tokens: Tokens, index: int) -> str:
    marks = _mark_at(tokens, index)
    if tokens.advantage is None or marks is None:  # never scored, or the trainer's figures are not recorded
        return UNKNOWN
    return next((name for mark, name, _ in _MARKS if marks & mark), "trained")


_FIGURES = {
    ColourMode.ADVANTAGE: _advantage_class,
    ColourMode.LOG_RATIO: _log_ratio_class,
    ColourMode.PROBABILITY: _probability_class,
    ColourMode.ENTROPY: _entropy_class,
    ColourMode.VERSION: _version_class,
    ColourMode.MARKS: _mark_class,
}


def _mark_at(tokens: Tokens, index: int) -> int | None:
    return None if tokens.marks is None else tokens.marks[index]


def _signed(value: float, bounds: tuple[float, float, float]) -> str:
    level = bisect_right(bounds, abs(value))
    return "even" if level == 0 else f"{'up' if value > 0 else 'down'}-{level}"


def _legend_of(mode: ColourMode, tokens: Tokens | None) -> list[LegendEntry]:
    match mode:
        case ColourMode.ADVANTAGE:
            return _signed_legend(ADVANTAGE_BOUNDS)
        case ColourMode.LOG_RATIO:
            return _signed_legend(LOG_RATIO_BOUNDS)
        case ColourMode.PROBABILITY:
            first, *rest = PROBABILITY_BOUNDS
            texts = [f"≥{first:g}", *(f"≥{bound:g}" for bound in rest), f"<{rest[-1]:g}"]
        case ColourMode.ENTROPY:
            texts = [f"<{ENTROPY_BOUNDS[0]:g}", *(f"≥{bound:g}" for bound in ENTROPY_BOUNDS)]
        case ColourMode.VERSION:
            return _version_legend(tokens)
        case ColourMode.MARKS:
            marks = [LegendEntry(name, words) for _, name, words in reversed(_MARKS)]
            return [LegendEntry("trained", "trained on"), *marks]
    return [LegendEntry(f"level-{level}", text) for level, text in enumerate(texts)]


def _signed_legend(bounds: tuple[float, float, float]) -> list[LegendEntry]:
    low, middle, high = bounds
    return [
        LegendEntry("down-3", f"≤-{high:g}"),
        LegendEntry("down-2", f"≤-{middle:g}"),
        LegendEntry("down-1", f"≤-{low:g}"),
        LegendEntry("even", "about 0"),
        LegendEntry("up-1", f"≥{low:g}"),
        LegendEntry("up-2", f"≥{middle:g}"),
        LegendEntry("up-3", f"≥{high:g}"),
    ]


def _version_legend(tokens: Tokens | None) -> list[LegendEntry]:
    """The versions of these tokens; of none, the colours only."""
    if tokens is None:
        return [LegendEntry(f"version-{number}", f"{number}") for number in range(NUM_VERSION_COLOURS)]
    sampled = sorted({version for version, kept in zip(tokens.versions, tokens.mask, strict=True) if kept})
    by_colour: dict[str, list[str]] = {}
    for version in sampled:
        by_colour.setdefault(f"version-{version % NUM_VERSION_COLOURS}", []).append(str(version))
    return [LegendEntry(name, ", ".join(versions)) for name, versions in by_colour.items()]
