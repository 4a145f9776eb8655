"""Inputs that show what a reward function is worth: gold in every usual rendering, and everything that should earn nothing.

`make_cases(prompt, ...)` gives the cases of one row; pure, and the same for the same seed. A case is one completion, in the
form in which the row's prompt is given: plain text, or messages.

Worked example, gold "72": the gold cases are `72`, `\\boxed{72}`, `<answer>72</answer>`, each also after thinking, and a code
block; the lookalikes are the same with "83" (other digits, same shape), so a function that scores both alike looks at the form.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from grpo_async.records import Prompt
from grpo_async.rewards.text import last_boxed

GOLD_COLUMNS = ("answer", "solution", "ground_truth", "target", "label")
LONG_CHARACTERS = 200_000
_CHARACTERS_PER_TOKEN = 4


class CaseKind(StrEnum):
    """What an input stands for."""

    GOLD = "gold"  # the right answer, in one of its renderings
    LOOKALIKE = "lookalike"  # a gold case with another answer of the same shape
    WRONG = "wrong"  # the answer of another row
    EMPTY = "empty"  # nothing, or whitespace
    GARBAGE = "garbage"  # noise, lists of guesses, very long repetitions
    ECHO = "echo"  # the prompt
    STRESS = "stress"  # must not raise or hang; what it earns is not judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One completion for one row. Gold, lookalike and wrong cases of one `rendering` differ in the answer only."""

    kind: CaseKind
    name: str
    completion: Any
    completion_ids: Sequence[int]
    rendering: str = ""


def find_gold_column(columns: Mapping[str, Any]) -> str | None:
    """The first of the usual names of a gold column that is there and holds a usable value."""
    return next((name for name in GOLD_COLUMNS if gold_text(columns.get(name)) is not None), None)


def gold_text(value: Any) -> str | None:
    """A gold value as text; None if it is none (lists, objects, null, empty text)."""
    if isinstance(value, (str, int, float)):
        return str(value).strip() or None
    return None


def cases_of(prompts: Sequence[Prompt], *, gold_column: str | None, seed: int) -> list[list[Case]]:
    """The cases of each row; the wrong answers of a row are those of the next one."""
    golds = []
    for prompt in prompts:
        name = gold_column or find_gold_column(prompt.columns)
        golds.append(None if name is None else gold_text(prompt.columns.get(name)))
    return [
        make_cases(prompt, gold=gold, other_gold=golds[(row + 1) % len(golds)], seed=seed)
        for row, (prompt, gold) in enumerate(zip(prompts, golds, strict=True))
    ]


def make_cases(prompt: Prompt, *, gold: str | None, other_gold: str | None, seed: int) -> list[Case]:
    """The cases of one row.

    Args:
        prompt: the row.
        gold: its right answer; None = there is none, and so no gold, lookalikes or wrong answers.
        other_gold: the right answer of another row.
        seed: of the garbage.
    """
    rng = random.Random(f"{seed} {prompt.prompt_id}")
    cases = [
        _case(prompt, kind, name, text, rendering)
        for kind, name, text, rendering in (*_answers(gold, other_gold), *_noise(prompt, gold, rng))
    ]
    if prompt.is_conversational:
        cases.append(_tool_call())
    return cases


def same_shape(text: str) -> str | None:
    """Another text of the same length and kind of characters: "72 km" -> "83 ln"; None without letters and digits."""
    lookalike = "".join(_next(character) for character in text)
    return None if lookalike == text else lookalike


def _answers(gold: str | None, other_gold: str | None) -> Iterator[tuple[CaseKind, str, str, str]]:
    if gold is None:
        return
    cores = {"": gold, " (final part)": _final_part(gold)}
    if cores[" (final part)"] == gold:
        del cores[" (final part)"]
    for part, core in cores.items():
        lookalike = same_shape(core)
        for rendering, text in _renderings(core).items():
            yield CaseKind.GOLD, f"gold, {rendering}{part}", text, rendering + part
        for rendering, text in _renderings(lookalike).items() if lookalike is not None else ():
            yield CaseKind.LOOKALIKE, f"same shape as gold, {rendering}{part}", text, rendering + part
    if other_gold is not None and _key(_final_part(other_gold)) != _key(_final_part(gold)):
        for rendering, text in _renderings(_final_part(other_gold)).items():
            yield CaseKind.WRONG, f"another row's answer, {rendering}", text, rendering
    tail = " so it goes on and on" * (LONG_CHARACTERS // 21)
    yield CaseKind.STRESS, "gold, then a very long tail", f"\\boxed{{{gold}}}{tail}", ""


def _renderings(answer: str) -> dict[str, str]:
    """An answer in the forms that reward functions look for."""
    plain = {
        "plain": answer,
        "boxed": f"\\boxed{{{answer}}}",
        "<answer>": f"<answer>{answer}</answer>",
        "code block": f"```python\n{answer}\n```",
    }
    thinking = {f"thinking, {name}": f"<think>Let me see.</think>\n{text}" for name, text in plain.items()}
    return {**plain, **thinking}


def _final_part(gold: str) -> str:
    r"""The answer in a whole solution: "12 + 60 ... #### 72" -> "72"; r"Hence \boxed{4}." -> "4"; else all of it."""
    boxed = last_boxed(gold)
    if boxed:
        return boxed
    return gold.rpartition("####")[2].strip() or gold


def _noise(prompt: Prompt, gold: str | None, rng: random.Random) -> Iterator[tuple[CaseKind, str, str, str]]:
    garbage = {
        "random words": " ".join(_word(rng) for _ in range(40)),
        "random unicode": "".join(chr(_code_point(rng)) for _ in range(200)),
        "control characters": "".join(chr(rng.randrange(32)) for _ in range(60)) + "\x7f\x9b\u202e",
        "emoji": "👍🏽👨‍👩‍👧‍👦🏴‍☠️" * 10,
        "boxed nonsense": "\\boxed{" + _word(rng) + "}",
        "empty tags": "<think></think><answer></answer>\\boxed{}",
        "counting": " ".join(str(number) for number in range(_end_of_counting(gold))),
        "open braces": "\\boxed{" * 200,
        "nested fractions": "$" + "\\frac{1}{" * 200 + "1" + "}" * 200 + "$",
        "a tower of powers": "\\boxed{9^{9^{9^{9^{9}}}}}",
        "a very long number": "\\boxed{" + "9" * 5000 + "}",
        "very long repetition": (_word(rng) + " ") * (LONG_CHARACTERS // 8),
    }
    for name, text in {"empty": "", "whitespace": " \n\t\u00a0 \n"}.items():
        yield CaseKind.EMPTY, name, text, ""
    for name, text in garbage.items():
        yield CaseKind.GARBAGE, name, text, ""
    yield CaseKind.ECHO, "the prompt again", prompt.messages[-1].content, ""
    yield CaseKind.STRESS, "200k opening braces", "{" * LONG_CHARACTERS, ""


def _tool_call() -> Case:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "look_up", "arguments": {"key": "value"}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "", "name": "look_up", "tool_call_id": "abcdefghi"},
    ]
    return Case(kind=CaseKind.EMPTY, name="a tool call without text", completion=messages, completion_ids=_ids(""))


def _case(prompt: Prompt, kind: CaseKind, name: str, text: str, rendering: str) -> Case:
    completion = [{"role": "assistant", "content": text}] if prompt.is_conversational else text
    return Case(kind=kind, name=name, completion=completion, completion_ids=_ids(text), rendering=rendering)


def _ids(text: str) -> list[int]:
    """Made up, for there is no tokenizer here: one for about four characters and one for the end of the turn."""
    return [1] * (1 + -(-len(text) // _CHARACTERS_PER_TOKEN))


def _next(character: str) -> str:
    if not character.isascii() or not character.isalnum():
        return character
    if character.isdigit():
        return str(int(character) % 9 + 1)  # never 0, so no leading zero
    first = "a" if character.islower() else "A"
    return chr((ord(character) - ord(first) + 1) % 26 + ord(first))


def _end_of_counting(gold: str | None) -> int:
    """Such that the last number is not the answer by chance."""
    return 101 if gold is None or "100" not in gold else 102


def _word(rng: random.Random) -> str:
    return "".join(rng.choice("bcdfghklmnprstvw") + rng.choice("aeiou") for _ in range(3))


def _code_point(rng: random.Random) -> int:
    code = rng.randrange(0xA1, 0x2FFFF)
    return code if not 0xD800 <= code <= 0xDFFF else 0x4E00


def _key(text: str) -> str:
    return "".join(text.split()).casefold()
