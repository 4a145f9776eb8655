"""The nearest known key of an unknown one: in the same section first, then anywhere.

rollout.group_sise -> 'group_size'         a slip within the section: the key alone
rollout.lr         -> 'optimizer.lr'       right key, wrong section: the whole path
optim.lrr          -> 'optimizer.lr'
"""

from __future__ import annotations

from difflib import SequenceMatcher, get_close_matches

from grpo_async.config.shape import Shape
from grpo_async.config.tree import Path

_CLOSE_ENOUGH = 0.7  # difflib's ratio; below it a suggestion is more often noise than help


def did_you_mean(word: str, known: list[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no known word is near."""
    near = get_close_matches(word, known, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def suggest_key(root: Shape, path: Path) -> str:
    """`; did you mean '...'?` for a path whose last key (or an earlier one) is unknown; empty without a good guess."""
    section = root
    for depth, key in enumerate(path):
        below = section.below(key)
        if below is None:
            last = depth == len(path) - 1
            near = get_close_matches(key, section.keys(), n=1) if last else []
            if near:
                return f"; did you mean '{near[0]}'?"
            break
        section = below
    anywhere = _nearest_path(root, path)
    if anywhere:
        return f"; did you mean '{anywhere}'?"
    return did_you_mean(key, section.keys())


def _nearest_path(root: Shape, path: Path) -> str | None:
    dotted, last = ".".join(path), path[-1]
    best, best_score = None, _CLOSE_ENOUGH
    for candidate in root.dotted_paths():
        below = root.find(tuple(candidate.split(".")))
        if below is not None and below.models:
            continue  # a section is no answer to "which setting?": rollout.zzz would get 'rollout'
        score = SequenceMatcher(None, dotted, candidate).ratio()
        if candidate.rpartition(".")[2] == last:
            score += 1.0  # the same word in another section beats any likeness of letters
        if score > best_score:
            best, best_score = candidate, score
    return best
