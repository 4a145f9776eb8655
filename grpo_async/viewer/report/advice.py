"""The section with advice: what bounds the run, and which setting to change. The rules are `findings.speed`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_async.config.loader import load_config
from grpo_async.errors import ConfigError
from grpo_async.findings.pipeline_figures import figures_of, setup_of
from grpo_async.findings.speed import advise
from grpo_async.viewer.report.markup import Markup, element
from grpo_async.viewer.report.run_data import RunData
from grpo_async.viewer.report.sections import missing, section

_STEPS = 50  # of the end of the run
_WARM_UP = 2  # steps at its beginning that are unlike the others
_MOST_SAID = 5


def advice_section(runs: Sequence[RunData]) -> Markup:
    """For each run one sentence from its last steps, and what was said while it ran."""
    parts = [_of_run(run, has_heading=len(runs) > 1) for run in runs]
    return section("advice", "What bounds the speed", *parts)


def _of_run(run: RunData, *, has_heading: bool) -> Markup:
    said = [text for each in run.advice if isinstance(text := each.get("text"), str) and text.strip()]
    earlier = list(dict.fromkeys(said))[-_MOST_SAID:]
    return element(
        "div",
        element("h3", run.label) if has_heading else None,
        _now(run),
        element(
            "details",
            element("summary", "what was said while it ran"),
            element("ul", [element("li", _step(run.advice, text), sentence(text)) for text in earlier]),
        )
        if earlier
        else None,
    )


def sentence(text: str) -> str:
    """ "trainer idle 41%: raise x" -> "Trainer idle 41%: raise x."; lines and displays show it without."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _step(said: Sequence[Mapping[str, Any]], text: str) -> str:
    step = next((each.get("step") for each in reversed(said) if each.get("text") == text), None)
    return f"step {step}: " if isinstance(step, int) else ""


def _now(run: RunData) -> Markup:
    if not run.metrics:
        return missing("No optimizer step was finished, so nothing was measured.")
    try:
        config = load_config(run.run_dir.config)
    except ConfigError:
        return missing(
            "config.yaml is of another version, or it cannot be read: there is no advice without the settings."
        )
    steps = list(run.metrics[_WARM_UP:] if len(run.metrics) > 2 * _WARM_UP else run.metrics)[-_STEPS:]
    setup = setup_of(config, engine=run.engine, on_gpu=run.on_gpu, num_gpus=run.num_gpus)
    advice = advise(figures_of(steps), setup)
    if advice is None:
        return missing("Too little was measured to say.")
    change = None
    if advice.setting is not None:
        change = element("p", element("code", f"{advice.setting}: {advice.current} → {advice.suggested}"))
    return element(
        "div",
        element("p", element("strong", f"{advice.what}. "), sentence(advice.text)),
        change,
        element("p", f"From the last {len(steps)} steps.", class_="note"),
        class_="advice",
    )
