"""A calculator for the model: `grpo_async.tools.calculator:calculator`.

Evaluates arithmetic by walking its syntax tree; nothing is executed. Integers are exact, and every number is bounded before
it is computed, so 9**9**9 is an error at once.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

_MAX_CHARS = 300  # also bounds the depth of the syntax tree
_MAX_BITS = 4096  # of an integer: 1234 digits

_Number = int | float

_BINARY: dict[type[ast.operator], Callable[[_Number, _Number], _Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression, for example "(2 + 3) * 4 / 5".

    Args:
        expression: Numbers, parentheses and the operators + - * / // % **.

    Returns:
        The value.
    """
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"the expression is longer than {_MAX_CHARS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"not an arithmetic expression: {expression}") from error
    try:
        return _written(_value(tree.body))
    except OverflowError as error:
        raise ValueError("the result is too large") from error


def _value(node: ast.expr) -> _Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return _bounded(_apply(sign, _value(left), _value(right)))
        case ast.BinOp(op=ast.BitXor()):
            raise ValueError("^ is not a power; write **")
    raise ValueError(f"only numbers and + - * / // % ** are allowed, not {ast.unparse(node)}")


def _apply(sign: ast.operator, left: _Number, right: _Number) -> _Number:
    if isinstance(left, int) and isinstance(right, int):
        # 2 ** (bits - 1) <= abs(left), so the power has at least (bits - 1) x right bits.
        if isinstance(sign, ast.Pow) and (left.bit_length() - 1) * right > _MAX_BITS:
            raise ValueError("the result is too large")
        if isinstance(sign, ast.Div) and right != 0 and left % right == 0:
            return left // right  # exact if there is an exact value
    result = _BINARY[type(sign)](left, right)
    if isinstance(result, complex):
        raise ValueError("a root of a negative number is not a real number")
    return result


def _bounded(value: _Number) -> _Number:
    if isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            raise ValueError("the result is too large")
    elif not math.isfinite(value):
        raise ValueError("the result is too large")
    return value


def _written(value: _Number) -> str:
    """6 -> 6; 6.0 -> 6.0; 0.1 + 0.2 -> 0.3: twelve digits, so that binary fractions do not show."""
    if isinstance(value, int):
        return str(value)
    return repr(float(f"{value:.12g}"))
