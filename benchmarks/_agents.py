"""Agents that call a tool again and again, in a process of their own; for `benchmarks client --part agents`.

stdin   {"url", "keys", "turns", "tool", "question"}, then "go"
stdout  "ready", then "done" when each key's agent has made its calls
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import aiohttp

from benchmarks.client import look_up


async def _agent(http: aiohttp.ClientSession, work: dict[str, Any], key: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": work["question"]}]
    for _ in range(work["turns"]):
        body = {"model": "policy", "messages": messages, "tools": [work["tool"]]}
        url, headers = f"{work['url']}/chat/completions", {"authorization": f"Bearer {key}"}
        async with http.post(url, json=body, headers=headers) as answer:
            message = (await answer.json())["choices"][0]["message"]
        messages.append(message)
        for call in message["tool_calls"]:
            result = look_up(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


async def _main() -> None:
    work = json.loads(sys.stdin.readline())
    print("ready", flush=True)
    sys.stdin.readline()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(_agent(http, work, key) for key in work["keys"]))
    print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(_main())
