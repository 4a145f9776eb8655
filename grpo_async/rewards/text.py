"""Rewards that compare text: 1.0 for a match, 0.0 for none, None if the row has no usable answer. Also how all built-
in rewards read a completion, be it plain text or a list of messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any

from pydantic import Field

from grpo_async.records import THINKING, answer_start
from grpo_async.rewards.call import with_checked_arguments
from grpo_async.utils.text import text_of_parts

# A sign counts only where no operand comes before it (`3-5` ends in 5). Digits that belong to a name or an exponent
# (`H2O`, `m^2`, `s^{-1}`, `1.2.3`) are not numbers. Thousands: `1,234` or LaTeX's `1{,}234`, `1\,234`.
_SEPARATOR = r"(?:,(?:\\!\s?)?|\{,\}|\\[,;: ])"
_INTEGER = rf"(?:[0-9]{{1,3}}(?:{_SEPARATOR}[0-9]{{3}})+(?![0-9])|[0-9]+)"
_UNSIGNED = rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_NOT_IN_EXPONENT = r"(?<!\^\{)(?<!\^[-−+])(?<!\^\{[-−+])"
_NUMBER = re.compile(rf"(?<![A-Za-z0-9_.^)\]]){_NOT_IN_EXPONENT}([-−+]?)({_UNSIGNED})(?:\s?/\s?({_UNSIGNED}))?")
_MAX_EXPONENT = 400  # 1e999999999 as a fraction would fill the memory
_OPENINGS = tuple(opening for opening, _ in THINKING)
_MAX_DIGITS = 1000  # Python refuses to parse whole numbers of more than 4300 digits


@with_checked_arguments
def exact_match(
    completions: Sequence[Any],
    answer: Sequence[Any],
    *,
    prompts: Sequence[Any] | None = None,
    ignore_case: bool = False,
    opened_by_template: bool = False,
    **_: Any,
) -> list[float | None]:
    """1.0 if the text after any thinking equals the `answer` column, apart from whitespace at both ends."""
    return [
        None if gold is None else float(_key(after_thinking(text), ignore_case) == _key(str(gold), ignore_case))
        for text, gold in zip(last_turns(completions, prompts, opened_by_template), answer, strict=True)
    ]


def _check_pattern(arguments: Mapping[str, Any]) -> None:
    pattern = arguments.get("pattern", "")
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"pattern: {pattern!r} is not a regular expression: {error}") from error


def regex_match(completions: Sequence[Any], *, pattern: str, **_: Any) -> list[float | None]:
    """1.0 if the regular expression `pattern` is found anywhere in the text (`re.search`; `.` does not match newlines).

    A pattern that backtracks without end holds the GIL: use `run_in: process` for intricate ones.
    """
    compiled = re.compile(pattern)
    return [float(compiled.search(final_text(completion)) is not None) for completion in completions]


regex_match.check_arguments = _check_pattern  # type: ignore[attr-defined]


@with_checked_arguments
def number_match(
    completions: Sequence[Any],
    answer: Sequence[Any],
    *,
    prompts: Sequence[Any] | None = None,
    relative_tolerance: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None,
    opened_by_template: bool = False,
    **_: Any,
) -> list[float | None]:
    """1.0 if the last number after any thinking equals the last number in the `answer` column; in both, the number in the last
    \\boxed{} or after the last `####` goes before.

    Reads signs, decimals, exponents, fractions such as 3/4, thousands separators, and ignores units and currencies:
    "so it costs $1,250.00 a year." equals "#### 1250". |a - b| <= relative_tolerance x |answer|; None = 1e-6, and whole numbers
    exactly.
    """
    scores: list[float | None] = []
    for text, gold in zip(last_turns(completions, prompts, opened_by_template), answer, strict=True):
        wanted = None if gold is None else _final_number(str(gold))
        given = _final_number(after_thinking(text))
        if wanted is None:
            scores.append(None)
        elif given is None:
            scores.append(0.0)
        else:
            are_whole = given.denominator == wanted.denominator == 1
            tolerance = (0.0 if are_whole else 1e-6) if relative_tolerance is None else relative_tolerance
            scores.append(float(abs(given - wanted) <= Fraction(tolerance) * abs(wanted)))
    return scores


def _final_number(text: str) -> Fraction | None:
    """The number that an answer marks as its result, or else its last one: "#### 42 (in 3 steps)" -> 42."""
    boxed = last_boxed(text)
    if boxed is None and (marked := _NUMBER.search(text.rpartition("####")[2])) and "####" in text:
        return _value(marked)
    return last_number(text if boxed is None else boxed)


def last_number(text: str) -> Fraction | None:
    """The last number in `text`; None if there is none."""
    last = None
    for last in _NUMBER.finditer(text):  # noqa: B007 - only the last one is wanted
        pass
    return None if last is None else _value(last)


def _value(found: re.Match[str]) -> Fraction | None:
    sign, number, divisor = found.groups()
    value = _fraction(number)
    if value is not None and divisor is not None:
        below = _fraction(divisor)
        value = value / below if below else None
    return -value if value is not None and sign in ("-", "−") else value


def _fraction(text: str) -> Fraction | None:
    digits = re.sub(_SEPARATOR, "", text)
    if len(digits) > _MAX_DIGITS:
        return None
    exponent = digits.lower().partition("e")[2]
    if exponent and (len(exponent) > 5 or abs(int(exponent)) > _MAX_EXPONENT):
        return None
    return Fraction(digits)


def _key(text: str, ignore_case: bool) -> str:
    stripped = text.strip()
    return stripped.casefold() if ignore_case else stripped


# --------------------------------------------------------------------------------------- what is read from a completion


def final_text(completion: Any) -> str:
    """Text of the last assistant message, "" if there is none; a plain string is its own text.

    Example: [{"role": "assistant", "content": "4"}, {"role": "tool", "content": "ok"}] -> "4".
    """
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role") == "assistant":
            content = message.get("content") or ""
            return content if isinstance(content, str) else text_of_parts(content)
    return ""


def after_thinking(text: str) -> str:
    """The answer of a turn: the text after its thinking; all of it if there is none, nothing if the thinking does not end."""
    return text[answer_start(text) :]


def last_turns(completions: Sequence[Any], prompts: Sequence[Any] | None, opened_by_template: bool) -> list[str]:
    """The final text of each completion, behind the `<think>` that the prompt has opened, if any: then thinking that does not end
    has no answer. The prompt does so itself ("Think first. <think>", or an assistant's message that is continued), or its template.

    Args:
        prompts: as rewards get them; None: only the template can have opened the thinking.
        opened_by_template: `ChatRenderer.thinking_is_open`; the run gives it to every reward that names it.
    """
    given = [None] * len(completions) if prompts is None else prompts
    return [
        _opened_thinking(prompt, completion, opened_by_template) + final_text(completion)
        for prompt, completion in zip(given, completions, strict=True)
    ]


def _opened_thinking(prompt: Any, completion: Any, opened_by_template: bool) -> str:
    is_first = isinstance(completion, str) or sum(message.get("role") == "assistant" for message in completion) < 2
    is_continued = not isinstance(prompt, str) and bool(prompt) and prompt[-1].get("role") == "assistant"
    if is_first and (is_continued or (isinstance(prompt, str) and prompt.rstrip().endswith(_OPENINGS))):
        text = prompt if isinstance(prompt, str) else final_text(prompt)
        return next((opening for opening, closing in THINKING if text.rfind(opening) > text.rfind(closing)), "")
    return THINKING[0][0] if opened_by_template else ""


def answer_of_solution(solution: str) -> str:
    r"""Its last \boxed{}, or the line that follows `####`, or all of it: "72 + 1 ... #### 73" -> "73"."""
    boxed = last_boxed(solution)
    if boxed is not None:
        return boxed
    _, mark, marked = solution.rpartition("####")
    return (marked.strip().partition("\n")[0] if mark else solution).strip()


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{...}, \boxed 5 or \fbox{...}, braces balanced; None if there is none.

    Example: r"\boxed{1} so \boxed{\frac{1}{2}}" -> r"\frac{1}{2}".
    """
    boxes = _boxes(text)
    return text[slice(*boxes[-1])].strip() if boxes else None


def boxed_answer(text: str) -> str | None:
    r"""The last box with those that are joined to it: r"\boxed{1}, so \boxed{3} or $\boxed{4}$" -> "3,4"."""
    boxes = _boxes(text)
    joined = boxes[-1:]
    for begin, end in boxes[-2::-1]:
        if end > joined[0][0] or _JOINS_BOXES.fullmatch(text, end, joined[0][0]) is None:
            break
        joined.insert(0, (begin, end))
    return ",".join(dict.fromkeys(text[slice(*box)].strip() for box in joined)) if joined else None


def _boxes(text: str) -> list[tuple[int, int]]:
    """Begin and end of the contents of all complete boxes, in the order of their beginnings."""
    found = []
    openings: list[int | None] = []  # for each open brace: begin of a box's content, None for other braces
    for token in _BOXES_AND_BRACES.finditer(text):
        kind = token[0]
        if kind == "}":
            if openings and (start := openings.pop()) is not None:
                found.append((start, token.start()))
        elif kind == "{":
            openings.append(None)
        elif token[1]:
            found.append(token.span(1))
        elif len(kind) > 2:
            openings.append(token.end())
    return sorted(found)


# One pass, however many boxes are incomplete. A backslash escapes the next character: the brace of `\{` is an ordinary character.
_BOXES_AND_BRACES = re.compile(r"\\{1,2}(?:boxed|fbox)(?:\s*\{|\s+([^\s{}$]+)|(?=\d)([\d.]+))|\\.|[{}]", re.DOTALL)
_JOINS_BOXES = re.compile(
    r"\}?(?:[\s$,;*]|\\[()\[\],; ]|\\q?quad|\\text\{\s*(?:and|or)\s*\}|\band\b|\bor\b)*+\\{1,2}(?:boxed|fbox)\s*\{?"
)
