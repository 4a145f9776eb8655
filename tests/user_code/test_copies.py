"""What a call may change: copies of whatever it was given."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from grpo_async.user_code.calls import UserCall, own_copy


@dataclass
class Point:
    tags: list[str]


class Board(dict[str, Any]):
    pass


def _reached(value: Any) -> Iterator[Any]:
    """The containers in `value` that can be changed."""
    if isinstance(value, (list, tuple, deque, dict)):
        for item in (*value.values(),) if isinstance(value, dict) else value:
            yield from _reached(item)
    if isinstance(value, Point):
        yield value.tags
    if not isinstance(value, (tuple, str, int)):
        yield value


@pytest.mark.parametrize(
    "value",
    [
        ({"a": 1}, [2]),
        {"a": {3}, "b": bytearray(b"x")},
        [Point(["a"])],
        {"a": [np.zeros(2)]},
        OrderedDict(a=deque([[1]])),
        Board(a=[1]),
    ],
    ids=repr,
)
def test_nothing_of_a_copy_that_can_be_changed_is_shared(value: Any) -> None:
    copied = own_copy(value)
    assert type(copied) is type(value)
    assert repr(copied) == repr(value)
    assert not {id(each) for each in _reached(value)} & {id(each) for each in _reached(copied)}


def test_equal_entries_of_a_list_are_copied_apart() -> None:
    first, second = own_copy([[1]] * 2)
    assert first is not second


def test_what_cannot_be_copied_is_shared_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    lock = threading.Lock()
    with caplog.at_level(logging.WARNING):
        copies = [own_copy({"lock": lock, "seen": [1]}) for _ in range(2)]
    assert all(each["lock"] is lock for each in copies)
    assert copies[0]["seen"] is not copies[1]["seen"]
    assert [record.getMessage().count("lock") > 0 for record in caplog.records] == [True]


def test_a_call_gets_copies_of_its_arguments_and_its_live_objects_themselves() -> None:
    def plain(rows: list[list[int]], client: list[int]) -> None:
        rows[0].append(1)
        client.append(1)

    async def later(rows: list[list[int]], client: list[int]) -> None:
        plain(rows, client)

    rows: list[list[int]] = [[]]
    client: list[int] = []
    UserCall(plain, {"rows": rows}, live={"client": client}).attempt()
    asyncio.run(UserCall(later, {"rows": rows}, live={"client": client}).attempt_async())
    assert (rows, client) == ([[]], [1, 1])
