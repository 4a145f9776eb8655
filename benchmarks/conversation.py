"""What a turn of a long conversation costs the client: CPU time of turn 2 against that of turn 64.

    python -m benchmarks conversation [--turns 64] [--conversations 20] [--tokenizer FOLDER] [--json FILE]

The client, the renderer, the parser and the tools are those of a run; a server in a process of its own answers every request
at once with a tool call of about 60 tokens, and every tool result has about 60 more. Counted is the CPU time of this process from
one request to the next: serialise the context, send, read the tokens, decode, parse, call the tool, render the suffix.
Without --tokenizer a byte-level BPE with 16,384 tokens is trained on Python's own library, and ChatML with Hermes calls is used.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks._rollout_server import ServerSettings
from benchmarks._rollout_side import rollout_server
from benchmarks._tokenizer import load_tokenizer
from benchmarks.report import Report, add_options

MAX_RATIO = 1.5
TIMEOUT_S = 60.0

THOUGHT = (
    "The result so far is not enough, so one more number has to be looked up before the sum can be given to the user. "
)
FACTS = "Of the parts that were counted in the warehouse on that day, the following number was written into the book: "


def look_up(number: int) -> str:
    """Look up a number.

    Args:
        number: which one

    Returns:
        What is known about it.
    """
    return FACTS * 2 + str(number * 7919)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=64)
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer whose template knows tools")
    add_options(parser)
    options = parser.parse_args(arguments)
    report = Report("conversation", options)

    tokenizer = load_tokenizer(options.tokenizer)
    answer = THOUGHT * 2 + '\n<tool_call>\n{"name": "look_up", "arguments": {"number": 12345}}\n</tool_call>'
    ids = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    settings = ServerSettings(rate=0.0, tokens=len(ids), answer=tuple(ids), end_id=ids[-1])
    with rollout_server(settings) as url:
        work = measure(tokenizer, url, turns=options.turns, conversations=options.conversations, seed=options.seed)
        costs, context = asyncio.run(work)

    last = options.turns
    for turn in sorted({2, 8, 16, 32, last} & set(range(2, last + 1))):
        report.row(f"turn {turn}", [conversation[turn - 1] for conversation in costs], "CPU ms")
    found = [conversation[last - 1] / conversation[1] for conversation in costs]
    report.row(f"turn {last} / turn 2", found, "ratio")
    report.target(f"CPU time of turn {last} / turn 2", statistics.median(found), at_most=MAX_RATIO)
    report.note(f"{context} tokens at the end of a conversation, vocabulary of {len(tokenizer)}")
    return report.finish()


async def measure(
    tokenizer: Any, url: str, *, turns: int, conversations: int, seed: int
) -> tuple[list[list[float]], int]:
    """CPU milliseconds of each turn, [conversations][turns], and the tokens of the context at the end."""
    from grpo_async.chat.renderer import ChatRenderer
    from grpo_async.inference.client import Generation, InferenceClient, OnTokens
    from grpo_async.inference.router import FixedServers
    from grpo_async.inference.surface import GenerateRequest
    from grpo_async.records import Origin, TaggedMessage
    from grpo_async.rollout.conversation import Conversation, RolloutStart, SamplingSettings
    from grpo_async.tools import Tool, ToolExecutor

    renderer = ChatRenderer(tokenizer)
    tool = Tool.from_function(look_up)
    renderer.check_tools([tool.schema])
    marks: list[float] = []

    class Marking(InferenceClient):
        async def generate(
            self,
            request: GenerateRequest,
            *,
            on_tokens: OnTokens | None = None,
            affinity: str = "",
            begun: Generation | None = None,
        ) -> Generation:
            marks.append(time.process_time())
            return await super().generate(request, on_tokens=on_tokens, affinity=affinity, begun=begun)

    costs = []
    context = 0
    servers = FixedServers([url])
    async with Marking(servers, token=None, request_timeout_s=TIMEOUT_S, wait_timeout_s=TIMEOUT_S) as client:
        settings = SamplingSettings(
            temperature=1.0, max_completion_tokens=10_000_000, max_model_len=10_000_000, max_turns=turns + 1
        )
        message = TaggedMessage(role="user", content="Sum up what you can find.", origin=Origin.PROMPT)
        prompt_ids = renderer.prompt_ids([message], tools=[tool.schema])
        for number in range(conversations + 1):
            marks.clear()
            start = RolloutStart(
                rollout_id=f"r{number}", prompt_ids=prompt_ids, seed=seed + number, affinity=f"g{number}/0",
                tools=ToolExecutor([tool], max_result_chars=8192), tool_names=[tool.name],
            )  # fmt: skip
            completion = await Conversation(client, renderer, settings).run(start)
            if len(completion.turns) != turns + 1 or any(not turn.tool_calls for turn in completion.turns[:-1]):
                raise SystemExit("a turn did not call the tool: the tokenizer's template or parser does not fit")
            context = len(prompt_ids) + len(completion.completion_ids)
            if number:  # the first one warms up
                costs.append([1000 * (after - before) for before, after in pairwise(marks)])
    return costs, context


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
