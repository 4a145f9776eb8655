"""Which answers may be given to a scorer that evaluates them as Python.

Some scorers of reasoning-gym call `eval` or sympy's `parse_expr` (which calls `eval`) on the text that the model wrote: it could
run any code with the rights of the run. What the task asks for is a list, a tuple or a formula, so only such text is let through.
"""

from __future__ import annotations

import ast

_LARGEST_INTEGER = 10**15
_LARGEST_EXPONENT = 100  # 9**9**9 would compute until the time limit

_FUNCTIONS = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "asin",
        "acos",
        "atan",
        "acot",
        "sinh",
        "cosh",
        "tanh",
        "coth",
        "asinh",
        "acosh",
        "atanh",
        "exp",
        "log",
        "ln",
        "sqrt",
        "Abs",
        "erf",
    ]
)
_SUMS = (ast.Add, ast.Sub, ast.UAdd, ast.USub)
_PRODUCTS = (ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.BitXor)
_COLLECTIONS = (ast.List, ast.Tuple, ast.Set, ast.Dict)


def is_harmless_literal(text: str) -> bool:
    """Whether `eval` of the text does no more than build lists, text and numbers, or raises. "[[0, 1], [1, 0]]" and "0 1" (no
    Python) are harmless, "[0] * 10**9" and "print()" are not."""
    tree = _parsed(text)
    if tree is None:
        return True  # `eval` raises too
    allowed = (ast.Expression, ast.Constant, ast.Name, ast.expr_context, ast.BinOp, ast.UnaryOp, *_SUMS, *_COLLECTIONS)
    return all(isinstance(node, allowed) for node in ast.walk(tree))


def is_formula(text: str) -> bool:
    """Whether the text is a formula of numbers, names, + - * / ** and elementary functions: "(8 - 2)*4", "x**2/2 + sin(x) + C".
    What Python cannot parse is none: sympy rewrites text such as "f()!" before it evaluates it."""
    tree = _parsed(text)
    return tree is not None and "#" not in text and all(_is_part_of_formula(node) for node in ast.walk(tree))


def _parsed(text: str) -> ast.Expression | None:
    try:
        return ast.parse(text.strip(), mode="eval")  # `eval` takes leading blanks, ast.parse does not
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_part_of_formula(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
    if isinstance(node, ast.Constant):
        return type(node.value) is float or (type(node.value) is int and node.value <= _LARGEST_INTEGER)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _is_small_exponent(node.right)
    parts = (ast.Expression, ast.Name, ast.expr_context, ast.BinOp, ast.UnaryOp, ast.Pow, *_SUMS, *_PRODUCTS)
    return isinstance(node, parts)


def _is_small_exponent(exponent: ast.expr) -> bool:
    """No power and no large number in it."""
    for node in ast.walk(exponent):
        if isinstance(node, ast.Pow):
            return False
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value > _LARGEST_EXPONENT:
            return False
    return True
