"""The options that are short for a query."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_async.errors import ConfigError
from grpo_async.store.query import parse_query
from grpo_async.viewer.short_forms import query_text, sort_order


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ""),
        ({"query": "reward<1 or stale"}, "reward<1 or stale"),
        ({"query": "reward<1 or stale", "step": "3"}, "(reward<1 or stale) and step=3"),
        ({"step": "3..5"}, "step=3..5"),
        ({"step": "3.."}, "step>=3"),
        ({"step": "..5"}, "step<=5"),
        ({"step": "last"}, "step=last"),
        ({"status": "trained, stale"}, "group_status IN ('trained', 'stale')"),
        ({"min_reward": 0.25, "max_reward": -1e-05}, "group_reward>=0.25 and group_reward<=-1e-05"),
        ({"truncated": True}, "group_truncated>0"),
        ({"truncated": False}, "group_truncated=0"),
        ({"search": 'say "hi" \\ now'}, "contains(lower(text), 'say \"hi\" \\ now')"),
    ],
)
def test_options_become_a_query_that_can_be_read(options: dict[str, Any], expected: str) -> None:
    assert query_text(**options) == expected
    parse_query(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": "x"}, r"--step x: write a step \(12\)"),
        ({"step": ".."}, r"--step \.\.: write a step"),
        ({"step": "5..3"}, "the range ends before it begins"),
        (
            {"status": "trained,odd"},
            "'odd' is not a status; the statuses are trained, filtered, stale, failed, cancelled",
        ),
    ],
)
def test_mistakes_name_the_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        query_text(**options)


def test_orders_begin_with_the_highest() -> None:
    assert sort_order(None) == ""
    assert sort_order("reward") == "-reward"
    assert sort_order("-reward") == "-reward"
    assert sort_order("reward:asc") == "reward"
    assert sort_order("step, length:asc") == "-step,length"
    for wrong in ("reward:up", ":asc", "a,,b"):
        with pytest.raises(ConfigError, match="--sort"):
            sort_order(wrong)
