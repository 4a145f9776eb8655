r"""Mathematical answers, compared symbolically by math-verify (extra `math`).

Intended for `run_in: process`: math-verify limits its time with signals, which work only in the main thread of a
process. A guard keeps expressions from sympy that would take forever, such as `\boxed{9^{9^{9^{9}}}}`: such a power
is one C call that holds the GIL, so that no time limit inside the process ends it. They are compared as text only.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
import threading
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from grpo_async.rewards.call import with_checked_arguments
from grpo_async.rewards.text import after_thinking, answer_of_solution, boxed_answer, last_turns
from grpo_async.utils.extras import needs

if importlib.util.find_spec("math_verify") is None:
    raise ModuleNotFoundError(
        f"math_answer {needs('math_verify')}", name="math_verify"
    )  # at import, so that it is a config error instead of failing every group

_TIMEOUT_S = 5  # of one expression, if signals can be used
_MAX_TEXT = 1500  # characters of one answer
_MAX_DIGITS = 5000.0
_MAX_DEPTH = 60  # nesting of braces; the LaTeX parser's time grows much faster than linearly
# Possessive (`++`) and anchored, so that a text of 200k digits is read once and not 200k times.
_POWERS = re.compile(
    r"(?<![0-9.])[0-9]++(?:\.[0-9]++)?(?:\s*+(?:\^|\*\*)\s*+[({]?\s*+-?[0-9]++(?:\.[0-9]++)?\s*+[)}]?)++"
)
_FACTORIALS = re.compile(r"(?<![0-9])([0-9]++)\s*+\)*+!")
_FACTORIAL_SIGN = re.compile(r"[0-9)}]\s*+!")
_LARGE_EXPONENT = re.compile(r"(?:\^|\*\*)\s*+[({]*+\s*+-?[0-9]{5}")  # also the end of a sum
_BINOMIAL_OF_MANY = re.compile(r"binom[^a-z]{0,40}?[0-9]{5}")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_CHOICES = "ABCDEFGHIJ"
_CHOICE = re.compile(r"\(?([A-J])[).:]?|\(([A-J])\)[^A-J]+")
_MARKUP = re.compile(r"\\(?:text|math)[a-z]*|[${}*\s]|\\(?=\W)")
_MIXED = re.compile(r"(?<![\d.])([0-9]++)\s++([0-9]++)\s*+/\s*+([0-9]++)(?!\.\d)")
_THOUSANDS = re.compile(r"(?<=\d)(?:\s|~|\{,\}|,?\\[,;:! ])+(?=\d{3}(?!\d))")  # but for plain commas


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
    r"""1.0 if the final answer equals the gold one, otherwise 0.0; None if the row has no gold answer.

    The final answer is the content of the last \boxed{} after any thinking, with the boxes that only a comma, "and" or "or"
    joins to it; without a box, the mathematics that math-verify finds. The gold is the `answer` column, or else `solution`: its
    \boxed{}, or what follows `####`, or all of it. Equal text is equal; a gold from A to J is a choice; all else is compared by
    math-verify, without units.

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
        None if gold is None else _score(after_thinking(text), _gold_text(gold), require_boxed)
        for text, gold in zip(last_turns(completions, prompts, opened_by_template), golds, strict=True)
    ]


def _gold_text(gold: Any) -> str:
    """A gold as people write it: 1e-05 -> "0.00001", [1, 2] -> "1, 2"."""
    if isinstance(gold, list | tuple):
        return ", ".join(map(_gold_text, gold))
    return format(Decimal(repr(gold)), "f") if isinstance(gold, float) else str(gold)


def _score(text: str, gold: str, require_boxed: bool) -> float | None:
    import math_verify

    wanted = _readable(boxed_answer(gold) or answer_of_solution(gold)).strip("$ ")
    if not wanted:
        return None
    boxed = boxed_answer(text)
    if boxed is None and require_boxed:
        return 0.0
    given = _readable(answer_of_solution(text)[-_MAX_TEXT:] if boxed is None else boxed)
    if _key(given) == _key(wanted):
        return 1.0
    if len(given) > _MAX_TEXT:
        return 0.0
    if (letter := _choice(wanted)) is not None:
        return float(letter == (_said_choice(given) if boxed is None else _choice(given) or _choice(given.upper())))
    if wanted.isalpha() and len(wanted) > 1:  # a word, not a product of variables
        return 0.0
    found = _parsed(given if boxed is None else rf"\boxed{{{given}}}")
    return float(math_verify.verify(_parsed(rf"\boxed{{{wanted}}}"), found, timeout_seconds=_time_limit()))


def _readable(text: str) -> str:
    r"""As math-verify reads it: "12\,000" -> "12000"; "1 1/2" -> r"1\frac{1}{2}"; "30°" -> "30"."""
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", _THOUSANDS.sub("", text))
    return re.sub(r"°|\^\{?\\circ\}?", "", text).replace("−", "-").strip()


def _key(text: str) -> str:
    """What is compared as text: without markup and spaces."""
    key = _MARKUP.sub("", text).strip(".")
    return key.casefold() if len(key) > 1 else key


def _choice(text: str) -> str | None:
    r"""The letter of a choice: "B", "(B)", "B." and r"\textbf{(B)}\ 12" -> "B"."""
    found = _CHOICE.fullmatch(_MARKUP.sub("", text))
    return next(filter(None, found.groups())) if found else None


def _said_choice(text: str) -> str | None:
    """The last letter that a text names as its answer: "The answer is A." -> "A"."""
    import math_verify

    choices = math_verify.StringExtractionConfig(strings=tuple(_CHOICES), lowercase=False)
    found = math_verify.parse(text, [choices], parsing_timeout=_time_limit())
    return str(found[0]) if found else None


def _parsed(text: str) -> list[Any]:
    """The mathematics in a text; [] if there is none, or if it would take sympy too long."""
    import math_verify
    from latex2sympy2_extended import NormalizationConfig

    if not _is_small_text(text):
        return []
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # in a thread it warns of the missing limit at every call
    normalization = NormalizationConfig(units=True, malformed_operators=True, nits=True, boxed="all")
    latex = math_verify.LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalization)
    kinds = [latex, math_verify.ExprExtractionConfig()]
    # no_fallback: text that is not mathematics would otherwise come back as a string that nothing equals
    return list(math_verify.parse(text, kinds, fallback_mode="no_fallback", parsing_timeout=_time_limit()))


def _time_limit() -> int:
    return _TIMEOUT_S if threading.current_thread() is threading.main_thread() else 0


# ------------------------------------------------------------------------------------------------------ the guard


def _is_small_text(text: str) -> bool:
    """Whether no chain of powers (`9^9^9`, `9**9**9`), exponent, factorial or binomial in `text` is enormous, and its braces are
    not nested too deeply: math-verify already evaluates those while it parses them.
    """
    if _LARGE_EXPONENT.search(text) or _BINOMIAL_OF_MANY.search(text) or _depth(text) > _MAX_DEPTH:
        return False
    if len(_FACTORIAL_SIGN.findall(text)) > 2:  # ((9!)!)!
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
