"""An agent as people write them, for train.yaml: a loop around the package openai, with a calculator.

It knows nothing of training. Its result is its reward.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from grpo_async.tools.calculator import calculator

if TYPE_CHECKING:
    from grpo_async.agents.function import AgentClient

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Computes an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
_MAX_CALLS = 3  # of the model


async def run(row: Mapping[str, Any], client: AgentClient) -> float:
    """Ask the model until it answers without a tool call: 1.0 where the answer is the row's, else 0.0."""
    messages = list(row["prompt"])
    for _ in range(_MAX_CALLS):
        response = await client.openai.chat.completions.create(model=client.model, messages=messages, tools=TOOLS)
        message = response.choices[0].message
        if not message.tool_calls:
            return float((message.content or "").strip() == row["answer"])
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = _calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def _calculate(arguments: str) -> str:
    """What the model sees: the value, or what is wrong with the call."""
    try:
        return calculator(**json.loads(arguments))
    except (TypeError, ValueError, ArithmeticError) as error:
        return f"error: {error}"
