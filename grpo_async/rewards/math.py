r"""Mathematical answers, compared symbolically by math-verify (extra `math`).

Meant for `run_in: process`: math-verify limits its time with signals, which work in the main thread of a process only.
In a thread it runs without that limit, and only the reward's own `timeout_s` holds. What would keep sympy busy for ever
(`tame`) is compared as it stands and never evaluated.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Sequence
from typing import Any

from grpo_async.rewards.completion import after_thinking, final_text, last_boxed
from grpo_async.rewards.tame import MAX_TEXT, is_tame, is_tame_text

if importlib.util.find_spec("math_verify") is None:
    raise ModuleNotFoundError(
        "math_answer needs math-verify: pip install 'grpo-async[math]'", name="math_verify"
    )  # at import, so that it is a config error and not the failure of every group

_EXPRESSION_TIMEOUT_S = 5


def prepare_worker() -> None:
    """Called once in each worker process: importing sympy takes seconds, which are not part of a call."""
    import math_verify

    math_verify.parse("$1$")  # builds its regular expressions


def math_answer(
    completions: Sequence[Any],
    answer: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    *,
    require_boxed: bool = False,
    **_: Any,
) -> list[float | None]:
    r"""1.0 if the final answer equals the gold one mathematically, else 0.0; None where the gold cannot be read.

    The final answer is the content of the last \boxed{} after any thinking; without one, what math-verify finds in the
    text. The gold is the `answer` column, or else `solution`: its last \boxed{}, or what follows `####`, or all of it.

    Example: r"... \boxed{0.5}" and the gold r"$\frac{1}{2}$" -> 1.0.

    Args:
        completions: plain text or messages.
        answer: gold answers.
        solution: gold answers where the data has no `answer`; a whole solution with a \boxed{} will do.
        require_boxed: an answer outside \boxed{} counts as wrong.
    """
    golds = answer if answer is not None else solution
    if golds is None:
        raise ValueError("math_answer needs a column `answer` or `solution`; rename one with `data.train.columns`")
    return [
        None if gold is None else _score(final_text(completion), str(gold), require_boxed)
        for completion, gold in zip(completions, golds, strict=True)
    ]


def _score(text: str, gold: str, require_boxed: bool) -> float | None:
    final = after_thinking(text)
    boxed = last_boxed(final)
    gold = _bare(gold)
    if len(gold) > 1 and gold.isalpha():  # yes/no, true/false: words, not products of variables
        given = boxed if boxed is not None else final.strip().rstrip(".").rpartition(" ")[2]
        is_allowed = boxed is not None or not require_boxed
        return float(is_allowed and _unwrapped_text(given).casefold() == gold.casefold())

    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing limit at every call in a thread
    timeout_s = _EXPRESSION_TIMEOUT_S if threading.current_thread() is threading.main_thread() else 0
    # no_fallback: text that is no mathematics would otherwise come back as a string that nothing equals
    wanted = math_verify.parse(rf"$\boxed{{{gold}}}$", fallback_mode="no_fallback", parsing_timeout=timeout_s)
    if not wanted:
        return None
    if boxed is None and require_boxed:
        return 0.0
    if (boxed is not None and len(boxed) > MAX_TEXT) or not is_tame_text(final if boxed is None else boxed):
        return float(boxed is not None and boxed == gold)
    given_text = final if boxed is None else rf"$\boxed{{{boxed}}}$"
    given_parsed = math_verify.parse(given_text, parsing_timeout=timeout_s)
    if not all(is_tame(expression) for expression in (*wanted, *given_parsed)):
        return float(any(given == right for given in given_parsed for right in wanted))
    return float(math_verify.verify(wanted, given_parsed, timeout_seconds=timeout_s))


def _bare(gold: str) -> str:
    r"""The gold without its surroundings: "72 + 1 ... #### 73" -> "73"; r"$\frac{1}{2}$" -> r"\frac{1}{2}"."""
    boxed = last_boxed(gold)
    bare = (boxed if boxed is not None else gold.rpartition("####")[2]).strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if bare.startswith(opening) and bare.endswith(closing) and len(bare) > len(opening) + len(closing):
            bare = bare[len(opening) : -len(closing)].strip()
    return _unwrapped_text(bare)


def _unwrapped_text(text: str) -> str:
    r"""r"\text{Yes}" -> "Yes"; anything else as it is."""
    stripped = text.strip()
    for command in (r"\text{", r"\textbf{", r"\mathrm{"):
        if stripped.startswith(command) and stripped.endswith("}") and stripped.count("{") == 1:
            return stripped[len(command) : -1].strip()
    return stripped
