"""Numbers, durations, names and lists as every command and message writes them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from itertools import islice, takewhile
from operator import eq

_CLOSE_ENOUGH = 0.7
"""difflib's ratio of two names; below it a suggestion is more often noise than help."""
_MAX_WORD = 60  # difflib's time grows with the square


def finite(value: object) -> float | None:
    """`value` where it is a finite number, else None: metrics.jsonl has null for what was not finite, files may hold anything."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    return None


def format_number(value: float) -> str:
    """Three significant digits: 0.123456 -> "0.123", 1234.5 -> "1,234", 1.5e6 -> "1.5M", 999.7 -> "1,000", 1e-05 -> "1e-05".

    For sentences and pages. Successive lines of a terminal have fixed decimals, so that their numbers align.
    """
    size = abs(float(f"{value:.3g}"))
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if limit <= size < 1e15:
            return f"{value / limit:.3g}{unit}"
    return f"{value:,.0f}" if 1e3 <= size < 1e6 else f"{value:.3g}"


def format_bytes(number: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def percent(fraction: float) -> str:
    """0.875 -> "88%"; 0.004 -> "0.4%"; 0.999 -> "99.9%"; 0.0004 -> "<0.1%"; 0.99996 -> ">99.9%"."""
    if not (0.0 < fraction < 0.01 or 0.99 < fraction < 1.0):
        return f"{fraction:.0%}"
    text = f"{fraction:.1%}"
    return {"0.0%": "<0.1%", "100.0%": ">99.9%"}.get(text, text)


def duration(seconds: float) -> str:
    """3725 -> "1:02:05", 75 -> "1:15", 2.5 -> "2.5 s", 0.0042 -> "4.2 ms"."""
    if seconds >= 59.95:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
    return f"{seconds:.3g} s" if seconds >= 0.1 or seconds <= 0.0 else f"{1000.0 * seconds:.3g} ms"


def duplicates(names: Iterable[str]) -> list[str]:
    """Names that occur more than once, sorted: ["b", "a", "b"] -> ["b"]."""
    return sorted(name for name, number in Counter(names).items() if number > 1)


def count(number: int, noun: str) -> str:
    """1, "group" -> "1 group"; 3000, "group" -> "3,000 groups"; 2, "process" -> "2 processes"."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def first_line(text: str) -> str:
    """The first line that is not blank; "" where all are."""
    return text.strip().partition("\n")[0].rstrip()


def last_line(text: str) -> str:
    """The last line that is not blank, without the space around it; "" where all are."""
    return text.rstrip().rpartition("\n")[2].strip()


def shortlist(texts: Collection[str], separator: str = "; ", *, limit: int = 8) -> str:
    """The first of them, and how many more there are: a, b, c with `limit` 2 -> "a; b and 1 more"."""
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return separator.join(islice(texts, limit)) + more


def clipped(text: str, limit: int = 60) -> str:
    """At most `limit` characters, the last an ellipsis where some are left out."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def both_ends(text: str, limit: int) -> str:
    """At most `limit` characters (3 at least), the middle left out: "abcdefghij", 7 -> "abc…hij"."""
    half = (limit - 1) // 2
    return text if len(text) <= limit else f"{text[:half]}…{text[-half:]}"


def backticked(names: Iterable[object]) -> str:
    """Names as a message quotes them: a, b -> "`a`, `b`"; none -> "(none)"."""
    return ", ".join(f"`{name}`" for name in names) or "(none)"


def json_kind(value: object) -> str:
    """A value's JSON type, in words, with the value where it is short: 5 -> "a number (5)"."""
    words = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    if value is None:
        return "null"
    word = words.get(type(value), type(value).__name__)
    return f"{word} ({text})" if len(text := repr(value)) <= 40 else word


def dtype_name(dtype: object) -> str:
    """torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def text_of_parts(parts: Iterable[object]) -> str:
    """The text of a message's content parts: [{"type": "text", "text": "2+"}, {"type": "text", "text": "2"}] -> "2+2".

    Raises:
        ValueError: a part is not text.
    """
    texts = []
    for number, part in enumerate(parts):
        text = part
        if isinstance(part, Mapping):
            if part.get("type") not in ("text", "input_text", "output_text", "refusal"):
                raise ValueError(f"part {number} is of type {part.get('type')!r}; only text can be used")
            text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise ValueError(f"the text of part {number} must be text, got {json_kind(text)}")
        texts.append(text)
    return "".join(texts)


def common_prefix_length(some: Iterable[object], others: Iterable[object]) -> int:
    """How many items at the beginning are equal: a, b, c and a, b, x -> 2."""
    return sum(takewhile(bool, map(eq, some, others)))


def did_you_mean(word: str, known: Iterable[str], *, limit: int = 1) -> str:
    """ "; did you mean 'rollout' or 'rollouts'?": the nearest of the known names; empty where none is near."""
    quoted = " or ".join(f"'{name}'" for name in nearest(word, known, limit=limit))
    return f"; did you mean {quoted}?" if quoted else ""


def nearest(word: str, known: Iterable[str], *, limit: int = 1) -> list[str]:
    """The known names that are near the word, the nearest first: what a misspelled one may have meant."""
    return get_close_matches(word, list(known), n=limit, cutoff=_CLOSE_ENOUGH) if len(word) <= _MAX_WORD else []
