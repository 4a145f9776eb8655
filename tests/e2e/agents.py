"""Agents of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


async def length(row: Mapping[str, Any], client: Any) -> dict[str, Any]:
    """Rewards by length, and asks twice: the second time about something else, which is a branch."""
    answer = await client.openai.chat.completions.create(model="any", messages=row["prompt"])
    said = answer.choices[0].message.content or ""
    other = [{"role": "user", "content": said or "?"}]
    await client.openai.chat.completions.create(model="any", messages=other, max_tokens=4)
    return {"reward": len(said) % 10 / 10, "said": said}


def branches_are_seen(
    completions: Any, result: list[Any], branches: list[Any], said: list[str], **_: Any
) -> list[float]:
    """A reward function that needs what an agent gives."""
    assert all(each["said"] == text for each, text in zip(result, said, strict=True))
    return [float(len(each)) for each in branches]
