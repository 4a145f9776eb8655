r"""Keeps expressions away from sympy that would keep it busy for ever: `\boxed{9^{9^{9^{9}}}}`, `99999999!`, a set of 3000.

Such a power is one C call: it holds the interpreter, so that no time limit inside the process ends it, and a policy needs one
sample of it. What is refused here is compared as text or structure only.

Sizes are estimated in decimal digits: digits(b^e) = log10(b) x |e|; 9^9^9: 0.95 x 387420489, refused; 2^2^3: 0.3 x 8 = 2.4.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

MAX_TEXT = 1500  # characters of one answer
MAX_DIGITS = 5000.0
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


def is_tame_text(text: str) -> bool:
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
            if digits > MAX_DIGITS:
                return False
            exponent = min(number**exponent, 1e300) if digits < 300 else 1e300
    factorials = _FACTORIALS.finditer(text)
    return all(len(found[1]) <= 4 and _factorial_digits(float(found[1])) <= MAX_DIGITS for found in factorials)


def is_tame(expression: Any) -> bool:
    """Whether a sympy expression (or text, or anything else that math-verify returns) is small enough to be evaluated."""
    import sympy

    if not isinstance(expression, sympy.Basic):
        return True
    num_nodes = sum(1 for _ in itertools.islice(sympy.preorder_traversal(expression), _MAX_NODES + 1))
    return num_nodes <= _MAX_NODES and _digits(expression) <= MAX_DIGITS


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


def _digits(node: Any) -> float:
    """Most decimal digits that `node`, or anything inside it, has when evaluated, on the safe side."""
    import sympy

    if isinstance(node, sympy.Rational):
        return max(_log10(abs(node.p)), _log10(node.q))
    if isinstance(node, sympy.Float):
        return 17.0
    inside = [_digits(argument) for argument in node.args]
    largest = max(inside, default=1.0)
    if isinstance(node, sympy.Pow):
        is_root = node.exp.is_Rational and abs(node.exp) <= 1
        return largest if is_root else max(largest, inside[0] * 10.0 ** _magnitude(node.exp))
    if isinstance(node, (sympy.factorial, sympy.factorial2, sympy.gamma, sympy.subfactorial, sympy.binomial)):
        return max(largest, _factorial_digits(10.0 ** max(_magnitude(argument) for argument in node.args)))
    if isinstance(node, (sympy.Sum, sympy.Product)):
        return math.inf if _num_terms(node) > _MAX_TERMS else largest * _num_terms(node)
    if isinstance(node, (sympy.Add, sympy.Mul)):
        return sum(inside)
    return largest


def _magnitude(node: Any) -> float:
    """log10 of |node|, at most 300; 0 for letters: 2^3 -> 0.9. Unlike its digits, which a fraction has on both sides."""
    import sympy

    if isinstance(node, sympy.Rational):
        return min(_log10(abs(node.p)) - _log10(node.q), 300.0) if node.p else 0.0
    if isinstance(node, sympy.Float):
        return min(_log10(abs(float(node))), 300.0) if node else 0.0
    inside = [_magnitude(argument) for argument in node.args]
    if isinstance(node, sympy.Pow):
        return min(max(inside[0], 0.0) * float(10.0 ** inside[1]), 300.0)
    if isinstance(node, sympy.Mul):
        return min(sum(inside), 300.0)
    if isinstance(node, sympy.Add):
        return min(max(inside) + math.log10(len(inside)), 300.0)
    if isinstance(node, (sympy.factorial, sympy.factorial2, sympy.gamma, sympy.subfactorial, sympy.binomial)):
        return min(_factorial_digits(10.0 ** max(inside)), 300.0)
    return max(inside, default=0.0)


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
