"""The section with rollouts: the best, the worst, the prompts that changed most, tools and errors."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_async.findings import figure
from grpo_async.viewer.report.markup import Markup, element, joined, table
from grpo_async.viewer.report.rollouts import Change, Example
from grpo_async.viewer.report.run_data import RunData
from grpo_async.viewer.report.sections import inspect_command, missing, section


def rollouts(runs: Sequence[RunData]) -> Markup:
    """Of each run; texts are shown as text, whatever they hold."""
    parts: list[Markup] = []
    for run in runs:
        if len(runs) > 1:
            parts.append(element("h3", run.label))
        parts.append(_of_run(run))
    return section("rollouts", "Rollouts", *parts)


def _of_run(run: RunData) -> Markup:
    facts = run.rollouts
    if not facts.num_rollouts:
        return missing(" ".join(facts.notes) or "There are no rollouts.")
    place = f"{run.label}-" if run.label else ""
    return joined(
        element(
            "p",
            f"{facts.num_rollouts:,} rollouts in {facts.num_groups:,} groups. Look at all of them: ",
            element("code", inspect_command(run, None)),
        ),
        element("div", _histogram_place("rewards", place), _histogram_place("lengths", place), class_="grid"),
        _examples("Most improved prompts", [_change(each) for each in facts.improved], is_open=True)
        or element(
            "p", "No prompt came up twice with another reward, so there is no most improved one.", class_="note"
        ),
        _examples("Best rollouts", [_example(each) for each in facts.best], is_open=True),
        _examples("Worst rollouts", [_example(each) for each in facts.worst], is_open=True),
        _examples("Prompts that got worse", [_change(each) for each in facts.worsened], is_open=False),
        _tools(run),
        _errors(run),
    )


def histogram_id(kind: str, label: str) -> str:
    """Of the element that holds the histogram of rewards or lengths of a run."""
    return f"histogram-{kind}-{''.join(letter if letter.isalnum() else '-' for letter in label)}"


def _histogram_place(kind: str, place: str) -> Markup:
    return element("div", element("div", id=histogram_id(kind, place.removesuffix("-"))), class_="card plot")


def _examples(title: str, cards: Sequence[Markup], *, is_open: bool) -> Markup | None:
    if not cards:
        return None
    return element(
        "details", element("summary", element("h3", title)), element("div", cards, class_="examples"), open=is_open
    )


def _example(example: Example) -> Markup:
    return element(
        "article",
        element("h4", f"Reward {_number(example.reward)}", element("span", _facts(example), class_="example-facts")),
        _texts(example),
        class_="card example",
    )


def _change(change: Change) -> Markup:
    moved = f"{figure(change.first_reward)} → {figure(change.last_reward)}"
    return element(
        "article",
        element(
            "h4",
            f"Reward {moved}",
            element(
                "span",
                f"mean of its group, step {_step(change.first_step)} and step {_step(change.last_step)}",
                class_="example-facts",
            ),
        ),
        element("p", "prompt", class_="text-name"),
        element("pre", change.last.prompt, class_="text"),
        element(
            "div",
            element(
                "div",
                element(
                    "p", f"step {_step(change.first_step)}, reward {_number(change.first.reward)}", class_="text-name"
                ),
                element("pre", change.first.completion or "(empty)", class_="text"),
            ),
            element(
                "div",
                element(
                    "p", f"step {_step(change.last_step)}, reward {_number(change.last.reward)}", class_="text-name"
                ),
                element("pre", change.last.completion or "(empty)", class_="text"),
            ),
            class_="before-after",
        ),
        class_="card example",
    )


def _texts(example: Example) -> Markup:
    return joined(
        element("p", "prompt", class_="text-name"),
        element("pre", example.prompt or "(empty)", class_="text"),
        element("p", "completion", class_="text-name"),
        element("pre", example.completion or "(empty)", class_="text"),
        element("p", "error", class_="text-name") if example.error else None,
        element("pre", example.error, class_="text error") if example.error else None,
    )


def _facts(example: Example) -> str:
    parts = (
        ", ".join(f"{name} {_number(value)}" for name, value in example.rewards.items())
        if len(example.rewards) > 1
        else ""
    )
    calls = f"{example.num_tool_calls} tool calls" if example.num_tool_calls else ""
    ended = "" if example.status == "finished" else example.status
    words = (
        f"rollout {example.rollout_id}",
        f"step {_step(example.step)}",
        f"{example.num_tokens} tokens",
        calls,
        ended,
        parts,
    )
    return " · ".join(word for word in words if word)


def _tools(run: RunData) -> Markup | None:
    last = next((row for row in reversed(run.metrics) if any(name.startswith("tools/") for name in row)), {})
    rows = []
    for name, count in run.rollouts.tools:
        figures = [last.get(f"tools/{name}/{what}") for what in ("call_frequency", "failure_frequency", "duration_s")]
        rows.append(
            [element("code", name), f"{count:,}", *("" if value is None else figure(value) for value in figures)]
        )
    if not rows:
        return None
    heads = [
        "tool",
        "rollouts that called it",
        "calls of a rollout, last step",
        "share that failed",
        "seconds of a call",
    ]
    return joined(element("h3", "Tools"), table(heads, rows))


def _errors(run: RunData) -> Markup | None:
    if not run.rollouts.errors:
        return None
    rows = [[f"{count:,}", message] for message, count in run.rollouts.errors]
    return joined(
        element("h3", "Why rollouts failed"),
        table(["rollouts", "error"], rows, class_="errors"),
        element("pre", element("code", inspect_command(run, "failed", "-step")), class_="command"),
    )


def _number(value: float | None) -> str:
    return "none" if value is None else figure(value)


def _step(step: int | None) -> str:
    return "?" if step is None else str(step)
