"""What a process prints: a log that user code fills is cut off, and says so; no text is refused."""

from __future__ import annotations

import io

from grpo_async.utils.resilient_stream import ResilientStream


def test_what_is_printed_beyond_the_limit_is_dropped_and_one_line_says_so() -> None:
    file = io.StringIO()
    stream = ResilientStream(file, "standard output", lambda text: None, max_chars=10)
    assert [stream.write(text) for text in ("12345", "67890", "abc", "d")] == [5, 5, 3, 1]
    assert file.getvalue() == "1234567890\n[grpo-async: what is printed beyond 10 characters is dropped]\n"


def test_a_stream_whose_encoding_lacks_a_character_gets_its_escape() -> None:
    """Else a warning with half a character would end the run, and a reward that prints one would fail its group."""
    content = io.BytesIO()
    file = ResilientStream(io.TextIOWrapper(content, encoding="latin-1"), "standard output", lambda text: None)
    file.write("é … \ud800\n")
    file.flush()
    assert content.getvalue() == b"\xe9 \\u2026 \\ud800\n"
