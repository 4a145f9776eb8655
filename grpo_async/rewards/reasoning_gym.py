"""The scorers of reasoning-gym's tasks, guarded (extra `reasoning-gym`); for data of `type: reasoning_gym`.

What the scorers do with text without an answer, over all 106 tasks: one gives 1.0 to any text, some raise, about thirty give 0.01
to 0.5, and nine evaluate the text as Python. Here an exception scores 0, and so does an answer whose score text without an answer
would also get. Text that is evaluated (by `eval`, or by sympy's `parse_expr`, which calls it: any code, with the rights of the run)
must be a list or a formula. Intended for `run_in: process`: importing the library takes seconds, and only in the main
thread of a process can a scorer that computes forever be stopped; elsewhere only the reward's own `timeout_s` applies.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import logging
import math
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from grpo_async.errors import message_of
from grpo_async.rewards.call import with_checked_arguments
from grpo_async.rewards.text import after_thinking, last_boxed, last_turns
from grpo_async.utils.extras import needs
from grpo_async.utils.warn_once import WarnOnce

if importlib.util.find_spec("reasoning_gym") is None:
    raise ModuleNotFoundError(
        f"task_score {needs('reasoning_gym')}", name="reasoning_gym"
    )  # at import, so that it is a config error instead of failing every group

logger = logging.getLogger(__name__)

_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc asin acos atan acot sinh cosh tanh coth asinh acosh atanh exp log ln sqrt Abs erf".split()  # noqa: SIM905
)
_PRODUCTS = (ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.BitXor)
_COLLECTIONS = (ast.List, ast.Tuple, ast.Set, ast.Dict)
_PARTS = (
    ast.Expression,
    ast.Name,
    ast.expr_context,
    ast.BinOp,
    ast.UnaryOp,
    ast.Pow,
    ast.Add,
    ast.Sub,
    ast.UAdd,
    ast.USub,
)
_WORDS = re.compile(r"[\w\s,'\"\[\]-]*")
_MAX_INTEGER, _MAX_EXPONENT = 10**15, 100  # 9**9**9 would compute until the time limit


def is_harmless(text: str) -> bool:
    """Whether evaluating the text can only build lists, text, numbers and formulas of elementary functions, or raise.

    "[[0, 1], [1, 0]]", "x**2/2 + sin(x) + C" and "0 1" (not Python) are harmless; "[0] * 10**9", "print()" and "x.diff" are not,
    nor is "f()!", which sympy rewrites before it evaluates it.
    """
    try:
        nodes = list(
            ast.walk(ast.parse(text.strip(), mode="eval"))
        )  # `eval` takes leading whitespace, ast.parse does not
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _WORDS.fullmatch(text) is not None and not re.search("[0-9]{16}", text)
    has_items = any(isinstance(n, _COLLECTIONS) or isinstance(getattr(n, "value", None), str) for n in nodes)
    return "#" not in text and all(_is_harmless(node, has_items) for node in nodes)


def _is_harmless(node: ast.AST, has_items: bool) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (str, float)) or (isinstance(node.value, int) and node.value <= _MAX_INTEGER)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        exponent, base = list(ast.walk(node.right)), list(ast.walk(node.left))
        numbers = [part.value for part in exponent if isinstance(part, ast.Constant)]
        is_small = all(isinstance(number, int | float) and number <= _MAX_EXPONENT for number in numbers)
        return (
            is_small
            and not any(isinstance(part, (ast.Pow, ast.Mult)) for part in exponent)
            and ast.Pow not in map(type, base)
        )
    if isinstance(node, _PRODUCTS):
        return not has_items  # a list or text repeated many times
    return isinstance(node, (*_PARTS, *_COLLECTIONS))


# Tasks whose scorer evaluates the answer; tests/rewards/test_reasoning_gym.py compares the list with the library's source.
EVALUATED = (
    "string_insertion",
    "spiral_matrix",
    "binary_matrix",
    "n_queens",
    "simple_integration",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "countdown",
)
_NO_ANSWERS = ("", "?")
_FULL_SCORE = 0.99
_MAX_ANSWER_CHARS = 8192
_ANSWER_TIMEOUT_S = 5.0  # in the main thread of a worker process
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

_warn_once = WarnOnce(logger)

AnswerFrom = Literal["after_thinking", "boxed", "tag"]


class _OutOfTimeError(Exception):
    """The scorer exceeded its time limit."""


def prepare_worker() -> None:
    """Called once in each worker process, because the import takes seconds, which must not be part of a call."""
    import reasoning_gym  # noqa: F401


@with_checked_arguments
def task_score(
    completions: Sequence[Any],
    task: Sequence[str],
    task_data: Sequence[str],
    *,
    prompts: Sequence[Any] | None = None,
    opened_by_template: bool = False,
    answer_from: AnswerFrom = "after_thinking",
    binarize: bool = False,
    **_: Any,
) -> list[float | None]:
    r"""The score that the row's task gives the answer, from 0.0 to 1.0.

    Example: the task `gcd` with the answer 6: "<think>...</think> 6" -> 1.0, "12" -> 0.0, "it is 6" -> 0.14 (the library gives
    1 character of 7), with `binarize` 0.0, with `answer_from: boxed` and r"it is \boxed{6}" 1.0.

    Args:
        completions: plain text or messages.
        task: the column `task`.
        task_data: the column `task_data`.
        answer_from: after_thinking: all text after `</think>`. boxed: the last \boxed{} of it. tag: the last
            <answer>...</answer> of it. A completion without box or tag gets 0.0.
        binarize: 1.0 for the full score and 0.0 for anything less.
    """
    if answer_from not in get_args(AnswerFrom):
        raise ValueError(f"answer_from must be one of {', '.join(get_args(AnswerFrom))}, got {answer_from!r}")
    scorers = {data: _Scorer(name, data) for name, data in set(zip(task, task_data, strict=True))}
    scores: list[float | None] = []
    for text, data in zip(last_turns(completions, prompts, opened_by_template), task_data, strict=True):
        answer = _answer(after_thinking(text), answer_from)
        score = 0.0 if answer is None else scorers[data].score(answer)
        scores.append(float(score >= _FULL_SCORE) if binarize else score)
    return scores


class _Scorer:
    """The scorer of one row."""

    def __init__(self, task: str, task_data: str) -> None:
        data = ast.literal_eval(task_data)
        self._task = task
        self._entry: dict[str, Any] = data["entry"]
        self._score_answer = _scorer_of(task, repr(data["config"]))
        self._score_of_no_answer = max(self._library_score(text, quiet=True) for text in _NO_ANSWERS)

    def score(self, answer: str) -> float:
        """The score, from 0 to 1. Code that the scorer would run scores 0; the known answer may always be evaluated."""
        is_safe = self._task not in EVALUATED or answer == self._entry["answer"] or is_harmless(answer)
        if len(answer) > _MAX_ANSWER_CHARS or not is_safe:
            return 0.0
        score = self._library_score(answer)
        return score if score > self._score_of_no_answer else 0.0

    def _library_score(self, answer: str, *, quiet: bool = False) -> float:
        """The scorer's result; 0 if it raised, ran out of time or returned no finite number."""
        try:
            with _time_limit():
                score = float(self._score_answer(answer, self._entry))
            if not math.isfinite(score):
                raise ValueError(f"it returned {score}")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any exception means that the answer cannot be read
            if not quiet:
                text = "the scorer of %s failed (%s): such answers get 0, which is logged once"
                _warn_once((self._task, type(error)), text, self._task, message_of(error))
            return 0.0
        return min(1.0, max(0.0, score))


@functools.lru_cache(maxsize=256)
def _scorer_of(task: str, config: str) -> Callable[[str, Mapping[str, Any]], float]:
    """The task's scorer. It belongs to a dataset of the task, since some look at its config; seed and size only affect new rows."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, seed=0, size=1, **ast.literal_eval(config))
    scorer: Callable[[str, Mapping[str, Any]], float] = dataset.score_answer
    return scorer


def _answer(text: str, answer_from: AnswerFrom) -> str | None:
    if answer_from == "boxed":
        return last_boxed(text)
    if answer_from == "tag":
        tags = _TAG.findall(text)
        return tags[-1].strip() if tags else None
    return text.strip()


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Raise _OutOfTimeError in the block when the time is over; works only in the main thread, where signals do."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_alarm(*_: object) -> None:
        raise _OutOfTimeError(f"took longer than {_ANSWER_TIMEOUT_S:g} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, _ANSWER_TIMEOUT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
