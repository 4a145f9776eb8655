"""What a process prints: a log that user code fills is cut off, and says so."""

from __future__ import annotations

import io

from grpo_async.utils.resilient_stream import ResilientStream


def test_what_is_printed_beyond_the_limit_is_dropped_and_one_line_says_so() -> None:
    file = io.StringIO()
    stream = ResilientStream(file, "standard output", lambda text: None, max_chars=10)
    assert [stream.write(text) for text in ("12345", "67890", "abc", "d")] == [5, 5, 3, 1]
    assert file.getvalue() == "1234567890\n[grpo-async: what is printed beyond 10 characters is dropped]\n"
