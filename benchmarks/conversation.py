"""What a turn of a long conversation costs the client: CPU time of the turn 2 against the turn 64.

    python -m benchmarks conversation [--turns 64] [--conversations 20] [--tokenizer FOLDER]

The client, the renderer, the parser and the tools are those of a run; a server in a process of its own answers every request
at once with a tool call of about 60 tokens, and every tool result has about 60 more. Counted is the CPU time of this process from
one request to the next: serialise the context, send, read the tokens, decode, parse, call the tool, render the suffix.
Without --tokenizer a byte-level BPE with 16,384 tokens is trained on Python's own library, and ChatML with Hermes calls is used.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

MAX_RATIO = 1.5

CHATML = """{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

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
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(json.loads(options.serve))
        return 0
    tokenizer = load_tokenizer(options.tokenizer)
    costs, context = asyncio.run(measure(tokenizer, options.turns, options.conversations))
    return report(costs, context, len(tokenizer))


def load_tokenizer(folder: Path | None):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if folder is not None:
        return AutoTokenizer.from_pretrained(folder)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_384,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    core.train([str(file) for file in library], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )


async def measure(tokenizer, turns: int, conversations: int) -> tuple[list[list[float]], int]:
    """CPU milliseconds of each turn, [conversations][turns], and the tokens of the context at the end."""
    from grpo_async.chat.renderer import ChatRenderer
    from grpo_async.inference.client import InferenceClient
    from grpo_async.inference.router import FixedServers
    from grpo_async.records import Origin, TaggedMessage
    from grpo_async.rollout.conversation import Conversation, RolloutStart, SamplingSettings
    from grpo_async.tools import Tool, ToolExecutor

    renderer = ChatRenderer(tokenizer)
    tool = Tool.from_function(look_up)
    renderer.check_tools([tool.schema])
    answer = THOUGHT * 2 + '\n<tool_call>\n{"name": "look_up", "arguments": {"number": 12345}}\n</tool_call>'
    ids = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    server = subprocess.Popen([sys.executable, __file__, "--serve", json.dumps(ids)], stdout=subprocess.PIPE, text=True)
    marks: list[float] = []

    class Marking(InferenceClient):
        async def generate(self, request, *, on_tokens=None, affinity=""):
            marks.append(time.process_time())
            return await super().generate(request, on_tokens=on_tokens, affinity=affinity)

    costs = []
    try:
        url = server.stdout.readline().strip()  # waits: it prints or ends
        async with Marking(
            FixedServers([url]), token=None, max_connections=8, request_timeout_s=60.0, wait_timeout_s=60.0
        ) as client:
            settings = SamplingSettings(
                temperature=1.0, max_completion_tokens=10_000_000, max_model_len=10_000_000, max_turns=turns + 1
            )
            message = TaggedMessage(role="user", content="Sum up what you can find.", origin=Origin.PROMPT)
            prompt_ids = renderer.prompt_ids([message], tools=[tool.schema])
            for number in range(conversations + 1):
                marks.clear()
                start = RolloutStart(
                    rollout_id=f"r{number}", prompt_ids=prompt_ids, seed=number, affinity=f"g{number}/0",
                    tools=ToolExecutor([tool], max_result_chars=8192), tool_names=[tool.name],
                )  # fmt: skip
                completion = await Conversation(client, renderer, settings).run(start)
                if len(completion.turns) != turns + 1 or any(not turn.tool_calls for turn in completion.turns[:-1]):
                    raise SystemExit("a turn did not call the tool: the tokenizer's template or parser does not fit")
                if number:  # the first one warms up
                    costs.append([1000 * (after - before) for before, after in zip(marks, marks[1:], strict=False)])
            return costs, len(prompt_ids) + len(completion.completion_ids)
    finally:
        server.kill()
        server.wait(10.0)


def report(costs: list[list[float]], context: int, vocabulary: int) -> int:
    turns = len(costs[0])
    print(f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}, vocabulary {vocabulary}")
    print(f"{len(costs)} conversations of {turns} turns, {context} tokens at the end; CPU ms of the client per turn:\n")
    print("| turn | median | quartiles |\n|---|---|---|")
    for turn in sorted({2, 8, 16, 32, turns} & set(range(2, turns + 1))):
        low, middle, high = statistics.quantiles([row[turn - 1] for row in costs], n=4)
        print(f"| {turn} | {middle:.2f} | {low:.2f} - {high:.2f} |")
    ratios = [row[turns - 1] / row[1] for row in costs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"\nturn {turns} / turn 2: median {middle:.2f}, quartiles {low:.2f} - {high:.2f} (limit {MAX_RATIO})")
    return 0 if middle <= MAX_RATIO else 1


def serve(ids: list[int]) -> None:
    """Answer every request with `ids`; print the address first."""
    import socket

    import orjson
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    chunk = {"token_ids": ids, "logprobs": [-0.5] * len(ids), "policy_version": 0, "finish_reason": "stop"}
    body = orjson.dumps(chunk) + b"\n"

    async def generate(request: Request) -> Response:
        await request.body()  # waits: for the benchmark's own client
        return Response(body, media_type="application/x-ndjson")

    listener = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    app = Starlette(routes=[Route("/rollout/generate", generate, methods=["POST"])])
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


if __name__ == "__main__":
    raise SystemExit(main())
