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
from grpo_async.rewards.text import after_thinking, answer_of_solution, boxed_answer, last_boxed, last_turns
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
_FACTORIAL_SIGN = re.compile(r"[0-9)}]\s*+!")
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
    r"""1.0 if the final answer equals the gold one, otherwise 0.0; None if the row has no gold answer.

    The final answer is the content of the last \boxed{} after any thinking, with the boxes that only a comma, "and" or "or"
    joins to it; without a box, what the text concludes. The gold is the `answer` column, or else `solution`: its \boxed{}, or
    what follows `####`, or all of it. Equal text is equal; letters from A to J are choices; words, times and units are compared
    as such (5 cm = 5, but not 5 km); all else is compared by math-verify, and a gold that it cannot read as text only.

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
        None if gold is None else _score(text, _gold_text(gold), require_boxed)
        for text, gold in zip(last_turns(completions, prompts, opened_by_template), golds, strict=True)
    ]


def _gold_text(gold: Any) -> str:
    """A gold as people write it: 1e-05 -> "0.00001", [1, 2] -> "1, 2"."""
    if isinstance(gold, list | tuple):
        return ", ".join(map(_gold_text, gold))
    return format(Decimal(repr(gold)), "f") if isinstance(gold, float) else str(gold)


def _score(text: str, gold: str, require_boxed: bool) -> float | None:
    wanted = _readable(_answer_in(gold))
    if not wanted:
        return None
    final = after_thinking(text)
    boxed = boxed_answer(final)
    if boxed is None:
        return float(not require_boxed and _concludes(_readable(answer_of_solution(final)), wanted))
    given = {boxed, _joined_boxes(final)} if "," in wanted else {boxed}  # a list may be given in several boxes
    return float(any(_is_same(_readable(answer), wanted) for answer in given))


def _answer_in(gold: str) -> str:
    r"""The gold without its surroundings: "72 + 1 ... #### 73" -> "73"; r"$\frac{1}{2}$" -> r"\frac{1}{2}"."""
    bare = answer_of_solution(gold) if last_boxed(gold) is None else _joined_boxes(gold)
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inside = bare[len(opening) : -len(closing)].strip()
        if bare.startswith(opening) and bare.endswith(closing) and inside and opening not in inside:
            return inside
    return bare


def _joined_boxes(text: str) -> str:
    r"""The boxes that math-verify takes for one answer: r"\boxed{1} papers and \boxed{2} bins" -> "1,2"."""
    from latex2sympy2_extended.math_normalization import extract_boxed_content

    return str(extract_boxed_content(text, "last")).strip()


def _is_same(given: str, wanted: str) -> bool:
    """Compare two answers as text, as choices (A to J), and as mathematics."""
    if len(given) > _MAX_TEXT:
        return given == wanted
    (number, unit), (wanted_number, wanted_unit) = _quantity(given), _quantity(wanted)
    if (unit and wanted_unit and unit != wanted_unit) or {_plain(given), _plain(wanted)} == {"e", "E"}:
        return False  # e is a number
    if _key(given) == _key(wanted) or _key(number) == _key(wanted_number):
        return True
    letter = _choice(wanted)
    if letter is not None and letter.isupper():
        return (_choice(given) or "").upper() == letter
    return not _is_text(wanted) and _is_equal(rf"$\boxed{{{given}}}$", wanted)


def _concludes(text: str, wanted: str) -> bool:
    """Whether a text without a box gives `wanted` as its answer, and no other beside it."""
    if len(text) <= _MAX_TEXT and _key(text) == _key(wanted):
        return True
    plain = _plain(text)
    conclusion = _SENTENCE_END.split(plain)[-1][-_MAX_TEXT:]
    letter = _choice(wanted)
    if letter is not None and letter.isupper():
        said = [next(filter(None, found.groups())).upper() for found in _SAID_CHOICE.finditer(plain)]
        return (said[-1] if said else _choice(plain) or _choice(conclusion)) == letter
    words = _plain(wanted).casefold()
    before = plain.casefold().removesuffix(words)
    if len(before) < len(plain) and _WORDS.fullmatch(words):
        return _BEFORE_CONCLUSION.search(before) is not None
    if _is_text(wanted) or not _parsed(rf"$\boxed{{{wanted}}}$"):
        return False
    unit, wanted_unit = _quantity(re.sub(r"^\D*(?=[-+]?[0-9])", "", conclusion))[1], _quantity(wanted)[1]
    is_other_unit = unit and wanted_unit and unit != wanted_unit
    return not is_other_unit and not _ALTERNATIVES.search(conclusion) and _is_equal(text, wanted)


def _is_equal(given: str, wanted: str) -> bool:
    """Compare by math-verify, to as many decimals as the smallest number in the two needs."""
    import math_verify

    if not _is_small_text(given):
        return False
    found, golds = _parsed(given), _parsed(rf"$\boxed{{{wanted}}}$")
    more = max([0, *(_leading_zeros(expression) - 3 for expression in (*found, *golds))])
    return bool(
        math_verify.verify(
            golds, found, float_rounding=6 + more, numeric_precision=15 + more, timeout_seconds=_time_limit()
        )
    )


def _parsed(text: str) -> list[Any]:
    """The mathematics in a text; [] if there is none, or nothing with a value (`1/0`)."""
    import math_verify
    import sympy

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # in a thread it warns of the missing limit at every call
    # no_fallback: text that is not mathematics would otherwise come back as a string that nothing equals
    found = math_verify.parse(text, fallback_mode="no_fallback", parsing_timeout=_time_limit())
    return [expression for expression in found if expression not in (sympy.nan, sympy.zoo)]


def _time_limit() -> int:
    return _EXPRESSION_TIMEOUT_S if threading.current_thread() is threading.main_thread() else 0


def _leading_zeros(expression: Any) -> int:
    """Zeros before the first digit of the smallest number in it: 1/2^{99}, which is 1.6e-30, has 30."""
    import sympy

    kinds = (sympy.Number, sympy.Pow, sympy.exp)
    numbers = [part for part in sympy.preorder_traversal(expression) if isinstance(part, kinds) and part.is_number]
    sizes = [sympy.Abs(number).evalf(3) for number in numbers]
    return max([0, *(int(sympy.ceiling(-sympy.log(size, 10))) for size in sizes if size.is_Float and size > 0)])


# ------------------------------------------------------------------------------------------------- how it is written

_SYMBOLS = str.maketrans({"°": r"^\circ", "−": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ",
            "≥": r"\ge ", "√": r"\sqrt ", "²": "^2", "³": "^3", "¢": r"\text{ cents}",
            "€": r"\text{ euros}", "£": r"\text{ pounds}", "¥": r"\text{ yen}"})  # fmt: skip
_WRAPPER = re.compile(
    r"\\(?:(?:text|math)(?:bf|it|rm|sf|normal)?|mbox|operatorname)\s*\{([^{}]*)\}|[*$`]|\\[()\[\],;:!]|\\(?=\s)"
)
_THOUSANDS = re.compile(r"(?<=\d)(?:\s|~|\{,\}|,?\\[,;:! ])+(?=\d{3}(?!\d))")  # but for plain commas
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d++(?:\.\d*+)?|\.\d++)[eE]\+?(-?\d++)(?!\w)")
_MIXED = re.compile(r"(?<![\d.])([0-9]++)\s++([0-9]++)\s*+/\s*+([0-9]++)(?!\.\d)")
_DOLLARS = re.compile(r"^\s*\\?\$\s*([-+]?[\d.,]+)\s*$")
_CURRENCY_FIRST = re.compile(r"^\s*([-+]?)\s*([€£¥])\s*([\d.,]+)\s*$")
_TIME = re.compile(r"\d{1,2}:\d\d(?::\d\d)?")
_SENTENCE_END = re.compile(r"[.!?:]\s+|\n+")
_WORDS = re.compile(r"[^\\]*?[A-Za-z]{2}[^\\]*")  # no LaTeX
_BEFORE_CONCLUSION = re.compile(r"(?:(?<=[a-z])(?<!\bnot)(?<!\bnor)(?<!\bor)(?<!\band)(?<!n't)\s|[,:;.!?=]\s*|\n)\W*$")
_ALTERNATIVES = re.compile(r"[\d)}]\s*,?\s*\bor\b\W*\d")
_CHOICE = re.compile(r"\(?([A-Ja-j])[).:]*|(?:\(([A-J])\)|([A-J])[).:]\s)(?!.*\b[A-J]\b).+", re.DOTALL)
_SAID_CHOICE = re.compile(
    r"\b(?i:answer|option|choice|choose|pick|select)\b[\s:]*(?:(?i:is|option|choice|must|be|should|the|correct)\b[\s:]*)*"
    r"(?:\(?([A-J])\b|\(([a-j])\))(?!\)?\s*(?:,|/|&|or\b|and\b)\s*\(?[A-J]\b)"
    r"|(?<!or )(?<!and )\b([A-J])\)? is (?:the )?(?:correct|right|answer)"
)
_QUANTITY = re.compile(
    r"((?:[^A-Za-z\\]|\\[a-z]+)*?[\d})]?)\s*(\^\{?\\circ\}?\s*[CF]?|\\?%|[A-Za-z][A-Za-z./ ]*(?:\^\{?\d\}?)?)"
)
_UNITS = {"hr": "h", "min": "minute", "sec": "s", "lb": "pound", "mph": "mi/h", "kmh": "km/h", "kph": "km/h",
          r"\%": "percent", "%": "percent"}  # fmt: skip
_OTHER_UNITS = ("dollar", "cent", "euro", "yen", "rupee", "am", "week", "month", "degC", "degF")  # that sympy lacks


def _readable(text: str) -> str:
    r"""As LaTeX that math-verify reads: "12\,000." -> "12000"; "30°" -> r"30^\circ"; "1e-5" -> r"1\times 10^{-5}"."""
    text = _CURRENCY_FIRST.sub(r"\1\3\2", _DOLLARS.sub(r"\1\\text{ dollars}", text)).translate(_SYMBOLS)
    text = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", _THOUSANDS.sub("", text))
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"\\(?:mathrm|text)\{([ei])\}", r"\1", text)
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi", text)
    return text.strip(" \n=").removesuffix(".").strip()


def _plain(text: str) -> str:
    r"""Without markup: r"\textbf{(B)}\ 12." -> "(B) 12"."""
    return _WRAPPER.sub(r"\1", text).strip(" \n.!")


def _key(text: str) -> str:
    """What is compared as text: without markup, spaces, and the variants of writing that math-verify knows."""
    from latex2sympy2_extended import NormalizationConfig, normalize_latex

    key = normalize_latex(
        " ".join(_plain(text).split()), NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
    )
    key = re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", key)
    return key.casefold() if len(key) > 1 else key


def _is_text(wanted: str) -> bool:
    """Whether it is a word, which is no product of variables, or a time, which is no quotient."""
    return (len(_plain(wanted)) > 1 and _plain(wanted).isalpha()) or _TIME.match(wanted) is not None


def _choice(text: str) -> str | None:
    """The letter of a choice: "B", "(B)", "B." and "(B) 12" -> "B"."""
    found = _CHOICE.fullmatch(_plain(text))
    return next(filter(None, found.groups())) if found else None


def _quantity(text: str) -> tuple[str, str]:
    """A quantity's number and the name of its unit: "5 cm" -> "5", "centimeter"; no name if the unit is not known."""
    found = _QUANTITY.fullmatch(_plain(text))
    if found is None or re.search("[0-9]", found[1]) is None:
        return text, ""
    unit = re.sub(r"\^\{?\\circ\}?\s*", "deg", found[2].replace(".", "").strip())
    unit = re.sub(r"\b(?:sq|square) (\w+)", r"\1^2", unit)
    names = [_unit_name(part) for part in re.split(r"\s*/\s*|\s+per\s+", _UNITS.get(unit.removesuffix("s"), unit))]
    return found[1], "/".join(names) if all(names) else ""


def _unit_name(unit: str) -> str:
    """One name for a unit and its abbreviations: "cm", "centimeters" -> "centimeter"; "" for "apples"."""
    from sympy.physics import units

    base, power, exponent = unit.partition("^")
    base = _UNITS.get(base.removesuffix("s"), base)
    for name in (base, base.casefold().removesuffix("s")):
        if name in _OTHER_UNITS or isinstance(getattr(units, name, None), units.Quantity):
            return str(getattr(units, name, name)) + power + exponent.strip("{}")
    return "".join(sorted(unit)) if len(unit) <= 2 else ""  # of one or two letters: perhaps variables


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
