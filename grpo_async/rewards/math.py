r"""Mathematical answers, compared symbolically by math-verify (extra `math`).

Meant for `run_in: process`: math-verify limits its time with signals, which work in the main thread of a process only.
In a thread it runs without that limit, and only the reward's own `timeout_s` holds.

A guard keeps expressions from sympy that would keep it busy forever: `\boxed{9^{9^{9^{9}}}}`, `99999999!`, a set of 3000. Such a
power is one C call: it holds the interpreter, so that no time limit inside the process ends it, and a policy needs one sample of
it. What the guard refuses is compared as text or structure only. Sizes are estimated in decimal digits:
digits(b^e) = log10(b) x |e|; 9^9^9: 0.95 x 387420489, refused; 2^2^3: 0.3 x 8 = 2.4.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import math
import re
import threading
from collections.abc import Sequence
from typing import Any

from grpo_async.rewards.text import after_thinking, final_text, last_boxed
from grpo_async.utils.extras import needs

if importlib.util.find_spec("math_verify") is None:
    raise ModuleNotFoundError(
        f"math_answer {needs('math_verify')}", name="math_verify"
    )  # at import, so that it is a config error and not the failure of every group

_EXPRESSION_TIMEOUT_S = 5
_MAX_TEXT = 1500  # characters of one answer
_MAX_DIGITS = 5000.0
_MAX_LOG10 = 300.0  # of a float
_MAX_NODES = 600
_MAX_TERMS = 10_000.0  # of a sum or product with numbers as limits
_MAX_DEPTH = 60  # of braces; the LaTeX parser's time grows much faster than this
# Possessive (`++`) and anchored, so that a text of 200k digits is read once and not 200k times.
_POWERS = re.compile(
    r"(?<![0-9.])[0-9]++(?:\.[0-9]++)?(?:\s*+(?:\^|\*\*)\s*+[({]?\s*+-?[0-9]++(?:\.[0-9]++)?\s*+[)}]?)++"
)
_FACTORIALS = re.compile(r"(?<![0-9])([0-9]++)\s*+\)*+!")
_BINOMIAL_OF_MANY = re.compile(r"binom[^a-z]{0,40}?[0-9]{5}")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")


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
    if not all(_is_small(expression) for expression in (*wanted, *given_parsed)):
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


# ------------------------------------------------------------------------------------------------------ the guard


def _is_small_text(text: str) -> bool:
    """Whether no chain of powers (`9^9^9`, `9**9**9`), factorial or binomial of plain numbers in `text` is enormous, and its
    braces are not too deep: math-verify evaluates those already while it reads them.
    """
    if _BINOMIAL_OF_MANY.search(text) or _depth(text) > _MAX_DEPTH:
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


def _is_small(expression: Any) -> bool:
    """Whether a sympy expression (or text, or anything else that math-verify returns) is small enough to be evaluated."""
    import sympy

    if not isinstance(expression, sympy.Basic):
        return True
    num_nodes = sum(1 for _ in itertools.islice(sympy.preorder_traversal(expression), _MAX_NODES + 1))
    return num_nodes <= _MAX_NODES and _size(expression)[0] <= _MAX_DIGITS


def _depth(text: str) -> int:
    """Deepest nesting of braces; those that are never closed count too."""
    depth = deepest = 0
    for character in text:
        if character == "{":
            depth += 1
            deepest = max(deepest, depth)
        elif character == "}":
            depth = max(0, depth - 1)
    return deepest


def _size(node: Any) -> tuple[float, float]:
    """On the safe side: most decimal digits that `node`, or anything inside it, has when evaluated; and log10 of |node|, at most
    300, 0 for letters. They differ: a fraction has digits on both sides. 2^3 -> (0.9, 0.9), 1/1000 -> (3, -3)."""
    import sympy

    if isinstance(node, sympy.Rational):
        above, below = _log10(abs(node.p)), _log10(node.q)
        return max(above, below), min(above - below, _MAX_LOG10) if node.p else 0.0
    if isinstance(node, sympy.Float):
        return 17.0, min(_log10(abs(float(node))), _MAX_LOG10) if node else 0.0
    inside = [_size(argument) for argument in node.args]
    digits, magnitudes = [size for size, _ in inside], [magnitude for _, magnitude in inside]
    largest, magnitude = max(digits, default=1.0), max(magnitudes, default=0.0)
    if isinstance(node, sympy.Pow):
        power = 10.0 ** magnitudes[1]
        is_root = node.exp.is_Rational and abs(node.exp) <= 1
        largest = largest if is_root else max(largest, digits[0] * power)
        magnitude = max(magnitudes[0], 0.0) * power
    elif isinstance(node, (sympy.factorial, sympy.factorial2, sympy.gamma, sympy.subfactorial, sympy.binomial)):
        magnitude = _factorial_digits(10.0**magnitude)
        largest = max(largest, magnitude)
    elif isinstance(node, (sympy.Sum, sympy.Product)):
        num_terms = _num_terms(node)
        largest = math.inf if num_terms > _MAX_TERMS else largest * num_terms
    elif isinstance(node, sympy.Add):
        largest, magnitude = sum(digits), magnitude + math.log10(len(inside))
    elif isinstance(node, sympy.Mul):
        largest, magnitude = sum(digits), sum(magnitudes)
    return largest, min(magnitude, _MAX_LOG10)


def _num_terms(node: Any) -> float:
    import sympy

    terms = 1.0
    for limits in node.limits:
        bounds = limits[1:]
        if len(bounds) == 2 and all(isinstance(bound, sympy.Integer) for bound in bounds):
            terms *= min(abs(float(bounds[1] - bounds[0])) + 1.0, 1e300)
    return terms


def _log10(number: float) -> float:
    return math.log10(number) if number > 0 else 0.0


def _factorial_digits(n: float) -> float:
    return n * math.log10(n) if n > 1.0 else 1.0
