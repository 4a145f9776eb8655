r"""Mathematical answers, compared symbolically by math-verify (extra `math`).

Intended for `run_in: process`: math-verify limits its time with signals, which work only in the main thread of a process.
In a thread it runs without that limit, and only the reward's own `timeout_s` applies.

A guard keeps expressions from sympy that would take forever: `\boxed{9^{9^{9^{9}}}}`, `99999999!`, a set of 3000. Such a
power is one C call: it holds the GIL, so that no time limit inside the process ends it, and one sample of a policy is
enough. Refused expressions are compared as text only. Sizes are estimated in decimal digits:
digits(b^e) = log10(b) x |e|; 9^9^9: 0.95 x 387420489, refused; 2^2^3: 0.3 x 8 = 2.4.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
import threading
from collections.abc import Sequence
from typing import Any

from grpo_async.rewards.call import with_checked_arguments
from grpo_async.rewards.text import after_thinking, answer_of_solution, last_boxed, last_turns
from grpo_async.utils.extras import needs

if importlib.util.find_spec("math_verify") is None:
    raise ModuleNotFoundError(
        f"math_answer {needs('math_verify')}", name="math_verify"
    )  # at import, so that it is a config error instead of failing every group

_EXPRESSION_TIMEOUT_S = 5
_MAX_TEXT = 1500  # characters of one answer
_MAX_DIGITS = 5000.0
_MAX_DEPTH = 60  # nesting of braces; the LaTeX parser's time grows much faster than linearly
# Possessive (`++`) and anchored, so that a text of 200k digits is read once and not 200k times.
_POWERS = re.compile(
    r"(?<![0-9.])[0-9]++(?:\.[0-9]++)?(?:\s*+(?:\^|\*\*)\s*+[({]?\s*+-?[0-9]++(?:\.[0-9]++)?\s*+[)}]?)++"
)
_FACTORIALS = re.compile(r"(?<![0-9])([0-9]++)\s*+\)*+!")
_LARGE_EXPONENT = re.compile(r"(?:\^|\*\*)\s*+[({]*+\s*+-?[0-9]{5}")  # also the end of a sum
_BINOMIAL_OF_MANY = re.compile(r"binom[^a-z]{0,40}?[0-9]{5}")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def prepare_worker() -> None:
    """Called once in each worker process, because importing sympy takes seconds, which must not be part of a call."""
    import math_verify

    math_verify.parse("$1$")  # builds its regular expressions


@with_checked_arguments
def math_answer(
    completions: Sequence[Any],
    answer: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    *,
    prompts: Sequence[Any] | None = None,
    opened_by_template: bool = False,
    require_boxed: bool = False,
    **_: Any,
) -> list[float | None]:
    r"""1.0 if the final answer equals the gold one mathematically, otherwise 0.0; None if the gold answer cannot be read.

    The final answer is the content of the last \boxed{} after any thinking; without one, what math-verify finds in the
    text. The gold is the `answer` column, or else `solution`: its last \boxed{}, or what follows `####`, or all of it.

    Example: r"... \boxed{0.5}" and the gold r"$\frac{1}{2}$" -> 1.0.

    Args:
        completions: plain text or messages.
        answer: gold answers.
        solution: gold answers if the data has no `answer`; may be whole solutions with a \boxed{}.
        require_boxed: an answer outside \boxed{} counts as wrong.
    """
    golds = answer if answer is not None else solution
    if golds is None:
        raise ValueError("math_answer needs a column `answer` or `solution`; rename one with `data.train.columns`")
    return [
        None if gold is None else _score(text, str(gold), require_boxed)
        for text, gold in zip(last_turns(completions, prompts, opened_by_template), golds, strict=True)
    ]


def _score(text: str, gold: str, require_boxed: bool) -> float | None:
    final = after_thinking(text)
    boxed = last_boxed(final)
    gold = _bare(gold)
    if len(gold) > 1 and gold.isalpha():  # yes/no, true/false: words, not products of variables
        given = boxed if boxed is not None else "".join(final.split()[-1:]).strip(".!*")
        is_allowed = boxed is not None or not require_boxed
        return float(is_allowed and _unwrapped_text(given).casefold() == gold.casefold())

    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # in a thread it warns of the missing limit at every call
    timeout_s = _EXPRESSION_TIMEOUT_S if threading.current_thread() is threading.main_thread() else 0
    # no_fallback: text that is not mathematics would otherwise come back as a string that nothing equals
    wanted = math_verify.parse(rf"$\boxed{{{gold}}}$", fallback_mode="no_fallback", parsing_timeout=timeout_s)
    if not wanted:
        return None
    if boxed is None and require_boxed:
        return 0.0
    if (boxed is not None and len(boxed) > _MAX_TEXT) or not _is_small_text(final if boxed is None else boxed):
        return float(boxed is not None and boxed == gold)
    given_text = final if boxed is None else rf"$\boxed{{{boxed}}}$"
    given_parsed = math_verify.parse(given_text, parsing_timeout=timeout_s)
    return float(math_verify.verify(wanted, given_parsed, timeout_seconds=timeout_s))


def _bare(gold: str) -> str:
    r"""The gold without its surroundings: "72 + 1 ... #### 73" -> "73"; r"$\frac{1}{2}$" -> r"\frac{1}{2}"."""
    bare = answer_of_solution(gold)
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if bare.startswith(opening) and bare.endswith(closing) and len(bare) > len(opening) + len(closing):
            bare = bare[len(opening) : -len(closing)].strip()
    return _unwrapped_text(bare)


def _unwrapped_text(text: str) -> str:
    r"""r"\text{Yes}" -> "Yes"; anything else is returned unchanged."""
    stripped = text.strip()
    for command in (r"\text{", r"\textbf{", r"\mathrm{"):
        if stripped.startswith(command) and stripped.endswith("}") and stripped.count("{") == 1:
            return stripped[len(command) : -1].strip()
    return stripped


# ------------------------------------------------------------------------------------------------------ the guard


def _is_small_text(text: str) -> bool:
    """Whether no chain of powers (`9^9^9`, `9**9**9`), exponent, factorial or binomial in `text` is enormous, and its braces are
    not nested too deeply: math-verify already evaluates those while it parses them.
    """
    if _LARGE_EXPONENT.search(text) or _BINOMIAL_OF_MANY.search(text) or _depth(text) > _MAX_DEPTH:
        return False
    if text.count("!") > 2:  # ((9!)!)!
        return False
    for chain in _POWERS.finditer(text):
        numbers = [float(number[:400]) for number in _NUMBER.findall(chain[0])]
        digits = 0.0
        exponent = 1.0
        for number in reversed(numbers):  # 2^3^4 = 2^(3^4)
            digits = max(_log10(number), 0.2) * exponent  # 1.0001^n is small and still takes n steps
            if digits > _MAX_DIGITS:
                return False
            exponent = min(number**exponent, 1e300) if digits < 300 else 1e300
    factorials = _FACTORIALS.finditer(text)
    return all(len(found[1]) <= 4 and _factorial_digits(float(found[1])) <= _MAX_DIGITS for found in factorials)


def _depth(text: str) -> int:
    """Deepest nesting of braces; braces that are never closed count, too."""
    depth = deepest = 0
    for character in text:
        if character == "{":
            depth += 1
            deepest = max(deepest, depth)
        elif character == "}":
            depth = max(0, depth - 1)
    return deepest


def _log10(number: float) -> float:
    return math.log10(number) if number > 0 else 0.0


def _factorial_digits(n: float) -> float:
    return n * math.log10(n) if n > 1.0 else 1.0
