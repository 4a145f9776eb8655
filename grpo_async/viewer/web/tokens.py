"""One rollout with its tokens as the page draws them: texts, figures, and the class of each token in each colour mode."""

from __future__ import annotations

from typing import Any

from grpo_async.store.rows import RolloutRow
from grpo_async.viewer.safe_text import visible
from grpo_async.viewer.token_colours import SWATCHES, ColourMode, legend, mark_words, token_classes
from grpo_async.viewer.token_text import TokenTexts


def token_view(rollout: RolloutRow, texts: TokenTexts | str) -> dict[str, Any]:
    """Lists with one entry per completion token.

    `classes[mode][i]` is a place in `palette`; `texts` is None where there is no tokenizer, and `texts_missing` says why.
    `mark_words` has the words of each value that occurs in `marks`.
    """
    palette: list[str] = []
    classes: dict[str, list[int]] = {}
    for mode in ColourMode:
        named = token_classes(mode, rollout)
        palette.extend(sorted(set(named) - set(palette)))
        places = {name: place for place, name in enumerate(palette)}
        classes[mode.value] = [places[name] for name in named]
    marks = rollout.marks
    return {
        "ids": rollout.completion_ids,
        "texts": [visible(texts.of(each)) for each in rollout.completion_ids]
        if isinstance(texts, TokenTexts)
        else None,
        "texts_missing": None if isinstance(texts, TokenTexts) else texts,
        "prompt_texts": [visible(texts.of(each)) for each in rollout.prompt_ids]
        if isinstance(texts, TokenTexts)
        else None,
        "prompt_ids": rollout.prompt_ids,
        "mask": rollout.mask,
        "logprobs": rollout.logprobs,
        "versions": rollout.versions,
        "trainer_logprobs": rollout.trainer_logprobs,
        "proximal_logprobs": rollout.proximal_logprobs,
        "weights": rollout.weights,
        "entropies": rollout.entropies,
        "marks": marks,
        "mark_words": {value: mark_words(value) for value in set(marks or ()) - {None}},
        "palette": palette,
        "classes": classes,
        "modes": [
            {
                "name": mode.value,
                "label": mode.label,
                "legend": [{"name": entry.name, "text": entry.text} for entry in legend(mode, rollout)],
            }
            for mode in ColourMode
        ],
    }


def token_style_sheet() -> str:
    """The classes as CSS, for light and dark screens."""
    light = "\n".join(f".token-{name} {{ background: {each.light}; }}" for name, each in SWATCHES.items() if each.light)
    dark = "\n".join(f"  .token-{name} {{ background: {each.dark}; }}" for name, each in SWATCHES.items() if each.dark)
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"
