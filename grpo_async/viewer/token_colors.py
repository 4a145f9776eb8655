"""How tokens are colored: one value of each token -> a class, and a legend that says what the classes mean. Pure.

A class is a word (`up-2`, `level-3`, `version-1`, `clipped-high`); `SWATCHES` has its background for dark and light screens. The
terminal makes styles of them, the web page CSS. Worked example, log ratio: trainer -1.0, sampler -1.3 -> 0.3 -> `up-2`, "≥0.2".
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from grpo_async.records import TokenFlag
from grpo_async.store import RolloutRow

T = TypeVar("T")


class ColorMode(StrEnum):
    """What the colors of the tokens stand for. The order is that of the key that cycles them."""

    LOG_RATIO = "log_ratio"  # trainer's logprob - sampler's logprob
    ENTROPY = "entropy"  # of the trainer's distribution at the token, nats
    PROBABILITY = "probability"  # how likely the sampler found it
    ADVANTAGE = "advantage"  # what the token was pushed by: one value in all of a rollout
    VERSION = "version"  # the policy version that sampled it
    FLAGS = "flags"  # trained on or not, and what took its gradient

    @property
    def label(self) -> str:
        return _LABELS[self]


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """One class of a mode and what it means."""

    name: str  # the class
    text: str


UNTRAINED = "untrained"  # mask 0: tokens of the prompt's template, tools, environments; shown dim
UNKNOWN = "unknown"  # the value was not recorded
NO_GRADIENT = "no-gradient"  # trained on, but clipped or left out
NUM_VERSION_COLORS = 6  # version-0 .. version-5, then from the start: neighbors always differ

SWATCHES: dict[str, tuple[str, str]] = {
    NO_GRADIENT: ("#4a4a4a", "#d4d4d4"),
    "down-3": ("#8a1f2b", "#ff9ea6"),
    "down-2": ("#652630", "#ffc4c8"),
    "down-1": ("#45262c", "#ffe2e4"),
    "up-1": ("#1d3a2a", "#dcf5e3"),
    "up-2": ("#1d5636", "#b3e8c3"),
    "up-3": ("#147a42", "#7fd69b"),
    "level-1": ("#3b3520", "#fff6d1"),
    "level-2": ("#5c4a14", "#ffe79a"),
    "level-3": ("#7d4a10", "#ffc876"),
    "level-4": ("#97330f", "#ff9c66"),
    "version-0": ("#1f3f6b", "#cfe2ff"),
    "version-1": ("#1d5147", "#c9f0e4"),
    "version-2": ("#5a3a6e", "#ead6f7"),
    "version-3": ("#66501b", "#fbe9b5"),
    "version-4": ("#6b2f45", "#fbd3e0"),
    "version-5": ("#3d5220", "#e0efc4"),
    "trained": ("#1d3a2a", "#dcf5e3"),
    "clipped-low": ("#1f3f6b", "#b9d4ff"),
    "clipped-high": ("#7d4a10", "#ffc876"),
    "is-masked": ("#5a3a6e", "#dcbcf2"),
    "off-policy": ("#8a1f2b", "#ff9ea6"),
    "skipped": ("#4a4a4a", "#d4d4d4"),
}
"""Background of a class as #rrggbb on a dark and on a light screen; classes that are not here have the screen's own."""

_LABELS = {
    ColorMode.ADVANTAGE: "advantage",
    ColorMode.LOG_RATIO: "log ratio (trainer - sampler)",
    ColorMode.PROBABILITY: "sampler's probability",
    ColorMode.ENTROPY: "entropy",
    ColorMode.VERSION: "policy version",
    ColorMode.FLAGS: "mask and flags",
}
ADVANTAGE_BOUNDS = (0.05, 0.5, 1.5)  # of the absolute value: even, 1, 2, 3
LOG_RATIO_BOUNDS = (0.02, 0.2, 0.7)  # 0.18 is ln 1.2, the usual clip range; 0.7 is twice as likely
PROBABILITY_BOUNDS = (0.9, 0.5, 0.1, 0.01)  # level 0 from 0.9 up
ENTROPY_BOUNDS = (0.1, 0.5, 1.0, 2.0)  # nats; 0.69 is a fair choice between two tokens

# The strongest first: a token has one color, and its tooltip names all its flags.
_FLAGS: tuple[tuple[TokenFlag, str, str], ...] = (
    (TokenFlag.SKIPPED, "skipped", "update skipped"),
    (TokenFlag.OFF_POLICY, "off-policy", "off policy"),
    (TokenFlag.IS_MASKED, "is-masked", "masked by correction"),
    (TokenFlag.CLIPPED_LOW, "clipped-low", "clipped low"),
    (TokenFlag.CLIPPED_HIGH, "clipped-high", "clipped high"),
)


def token_classes(mode: ColorMode, rollout: RolloutRow) -> list[str]:
    """The class of every completion token. [num_tokens]"""
    class_of = _CLASS_OF[mode]
    return [class_of(rollout, index) if kept else UNTRAINED for index, kept in enumerate(rollout.mask)]


def legend(mode: ColorMode, rollout: RolloutRow) -> list[LegendEntry]:
    """What the classes of a mode mean, weakest to strongest; of the versions and flags only those that the rollout has."""
    present = set(token_classes(mode, rollout))
    entries = _all_entries(mode, rollout)
    if mode is ColorMode.FLAGS:
        entries = [entry for entry in entries if entry.name in present]
    for name, text in ((NO_GRADIENT, "no gradient"), (UNKNOWN, "not recorded"), (UNTRAINED, "not trained on")):
        if name in present:
            entries.append(LegendEntry(name, text))
    return entries


def flag_names(flags: int | None) -> list[str]:
    """4 | 1 -> ['masked by correction', 'clipped low']; none for 0 and None."""
    return [name for flag, _, name in _FLAGS if (flags or 0) & flag]


def at(values: Sequence[T | None] | None, index: int) -> T | None:
    """One value of a token, None where the trainer's values were not recorded."""
    return None if values is None else values[index]


def log_ratio(rollout: RolloutRow, index: int) -> float | None:
    """The trainer's logprob - the sampler's, None where one is not known (or was not finite)."""
    trainer, sampler = at(rollout.trainer_logprobs, index), rollout.logprobs[index]
    return None if trainer is None or sampler is None else trainer - sampler


def _advantage_class(rollout: RolloutRow, index: int) -> str:
    if rollout.advantage is None:
        return UNKNOWN
    return NO_GRADIENT if at(rollout.token_flags, index) else _signed(rollout.advantage, ADVANTAGE_BOUNDS)


def _log_ratio_class(rollout: RolloutRow, index: int) -> str:
    ratio = log_ratio(rollout, index)
    return UNKNOWN if ratio is None else _signed(ratio, LOG_RATIO_BOUNDS)


def _probability_class(rollout: RolloutRow, index: int) -> str:
    if (logprob := rollout.logprobs[index]) is None:
        return UNKNOWN
    probability = math.exp(min(logprob, 0.0))
    return f"level-{sum(probability < bound for bound in PROBABILITY_BOUNDS)}"


def _entropy_class(rollout: RolloutRow, index: int) -> str:
    entropy = at(rollout.entropies, index)
    return UNKNOWN if entropy is None else f"level-{bisect_right(ENTROPY_BOUNDS, entropy)}"


def _version_class(rollout: RolloutRow, index: int) -> str:
    return f"version-{rollout.versions[index] % NUM_VERSION_COLORS}"


def _flag_class(rollout: RolloutRow, index: int) -> str:
    flags = at(rollout.token_flags, index)
    if rollout.advantage is None or flags is None:  # never scored, or the trainer's values are not recorded
        return UNKNOWN
    return next((name for flag, name, _ in _FLAGS if flags & flag), "trained")


_CLASS_OF = {
    ColorMode.ADVANTAGE: _advantage_class,
    ColorMode.LOG_RATIO: _log_ratio_class,
    ColorMode.PROBABILITY: _probability_class,
    ColorMode.ENTROPY: _entropy_class,
    ColorMode.VERSION: _version_class,
    ColorMode.FLAGS: _flag_class,
}


def _signed(value: float, bounds: tuple[float, float, float]) -> str:
    level = bisect_right(bounds, abs(value))
    return "even" if level == 0 else f"{'up' if value > 0 else 'down'}-{level}"


def _all_entries(mode: ColorMode, rollout: RolloutRow) -> list[LegendEntry]:
    match mode:
        case ColorMode.ADVANTAGE | ColorMode.LOG_RATIO:
            bounds = ADVANTAGE_BOUNDS if mode is ColorMode.ADVANTAGE else LOG_RATIO_BOUNDS
            down = [LegendEntry(f"down-{level}", f"≤-{bounds[level - 1]:g}") for level in (3, 2, 1)]
            up = [LegendEntry(f"up-{level}", f"≥{bounds[level - 1]:g}") for level in (1, 2, 3)]
            return [*down, LegendEntry("even", "about 0"), *up]
        case ColorMode.PROBABILITY:
            texts = [*(f"≥{bound:g}" for bound in PROBABILITY_BOUNDS), f"<{PROBABILITY_BOUNDS[-1]:g}"]
        case ColorMode.ENTROPY:
            texts = [f"<{ENTROPY_BOUNDS[0]:g}", *(f"≥{bound:g}" for bound in ENTROPY_BOUNDS)]
        case ColorMode.VERSION:
            by_color: dict[int, list[str]] = {}
            for version in sorted(rollout.sampled_versions):
                by_color.setdefault(version % NUM_VERSION_COLORS, []).append(str(version))
            return [LegendEntry(f"version-{color}", ", ".join(shown)) for color, shown in by_color.items()]
        case ColorMode.FLAGS:
            return [LegendEntry("trained", "trained on"), *(LegendEntry(*entry) for _, *entry in reversed(_FLAGS))]
    return [LegendEntry(f"level-{level}", text) for level, text in enumerate(texts)]
