"""What rollouts cost the trainer's process: its CPU time, with a server that computes nothing.

    python -m benchmarks client [--in-flight 1 64 256 1024 4096] [--rounds 3] [--json FILE]
    python -m benchmarks client --part conversation [--turns 64] [--conversations 20] [--json FILE]

rollouts      Everything from the prompt to the trained group is as in a run: worker, client, router, conversations, rewards,
              buffer, store, timeline. The server is another process, whose CPU time does not count; it streams `--rate` tokens per
              second for each rollout, in chunks like the real servers. "thread" is the rollout thread alone; "process" includes
              rewards and the threads of store and timeline.
conversation  CPU time of turn 64 of a long tool conversation, compared with turn 2: serialize the context, send, read the tokens,
              decode, parse, call the tool, render the suffix. A call and its result have about 60 tokens each.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._rollout_side import Load, load_tokenizer, rollout_server, rollout_side
from benchmarks.report import Report, in_turns, parser_of
from grpo_async.utils.processes import raise_open_files_limit

MOST_MS_PER_100_TOKENS = 1.0
TARGET_IN_FLIGHT = 1024  # rollouts, for this target
MAX_RATIO = 1.5  # CPU time of the last turn of a conversation / that of the second
TIMEOUT_S = 60.0


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--part", choices=["rollouts", "conversation"], default="rollouts")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 64, 256, 1024, 4096], help="rollouts at once")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement")
    parser.add_argument("--tokens", type=int, default=256, help="mean length of a rollout")
    parser.add_argument("--rate", type=float, default=30.0, help="tokens per second of a rollout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=64, help="turns of a conversation")
    parser.add_argument("--conversations", type=int, default=20)
    options = parser.parse_args(arguments)
    raise_open_files_limit()
    report = Report("client", options)
    {"rollouts": _rollouts, "conversation": _conversations}[options.part](report, options)
    return report.finish()


def _rollouts(report: Report, options: argparse.Namespace) -> None:
    loads = {
        f"{in_flight} in flight": Load(in_flight=in_flight, tokens=options.tokens, rate=options.rate, seed=options.seed)
        for in_flight in options.in_flight
    }
    costs: dict[str, list[dict[str, float]]] = {name: [] for name in loads}
    for _, name in in_turns(list(loads), options.rounds):
        costs[name].append(_cost_of(loads[name], seconds=options.seconds))
    for name, load in loads.items():
        report.row(f"{name}: rate", [cost["tokens"] / cost["wall"] for cost in costs[name]], "tokens/s")
        for who in ("thread", "process"):
            spent = [1e5 * cost[who] / cost["tokens"] for cost in costs[name]]
            report.row(f"{name}: {who}", spent, "ms/100 tokens")
        if load.in_flight == TARGET_IN_FLIGHT:
            what = f"CPU ms of the process per 100 tokens, {name}"
            report.target(what, statistics.median(spent), at_most=MOST_MS_PER_100_TOKENS)
    report.note(f"rollouts of {options.tokens} tokens on average; streamed with {options.rate:g} tokens/s each")


def _cost_of(load: Load, *, seconds: float) -> dict[str, float]:
    """The cost of so many seconds (Side.so_far), after a warmup of as many rollouts as are in flight."""
    with tempfile.TemporaryDirectory(prefix="bench-client-") as folder, rollout_side(Path(folder), load) as side:
        while side.rollouts < load.in_flight:
            side.step()
        before = side.so_far()
        while time.perf_counter() - before["wall"] < seconds:
            side.step()
        return {name: value - before[name] for name, value in side.so_far().items()}


def look_up(number: int) -> str:
    """Look up a number.

    Args:
        number: which one

    Returns:
        What is known about it.
    """
    fact = (
        "Of the parts that were counted in the warehouse on that day, the following number was written into the book: "
    )
    return fact * 2 + str(number * 7919)


def _conversations(report: Report, options: argparse.Namespace) -> None:
    tokenizer = load_tokenizer()
    thought = "The result so far is not enough, so one more number has to be looked up before the sum can be given. "
    answer = thought * 2 + '\n<tool_call>\n{"name": "look_up", "arguments": {"number": 12345}}\n</tool_call>'
    ids = (*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
    with rollout_server(rate=0.0, tokens=len(ids), answer=ids, end_id=ids[-1], seed=options.seed) as url:
        costs = asyncio.run(_cost_of_turns(tokenizer, url, options))
    last = options.turns
    for turn in sorted({2, 8, 16, 32, last} & set(range(2, last + 1))):
        report.row(f"turn {turn}", [conversation[turn - 1] for conversation in costs], "CPU ms")
    found = [conversation[last - 1] / conversation[1] for conversation in costs]
    report.row(f"turn {last} / turn 2", found, "ratio")
    report.target(f"CPU time of turn {last} / turn 2", statistics.median(found), at_most=MAX_RATIO)


async def _cost_of_turns(tokenizer: Any, url: str, options: argparse.Namespace) -> list[list[float]]:
    """CPU milliseconds of each turn, from one request to the next. [conversations][turns]"""
    from grpo_async.chat.renderer import ChatRenderer
    from grpo_async.inference.client import Generation, InferenceClient
    from grpo_async.inference.router import FixedServers
    from grpo_async.inference.sampling import SamplingSettings
    from grpo_async.records import Origin, TaggedMessage
    from grpo_async.rollout.conversation import Rollout
    from grpo_async.tools import Tool, ToolExecutor

    renderer = ChatRenderer(tokenizer)
    tool = Tool.from_function(look_up)
    renderer.check_tools([tool.schema])
    marks: list[float] = []

    class Marking(InferenceClient):
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            marks.append(time.process_time())
            return await super().generate(*args, **kwargs)

    settings = SamplingSettings(
        temperature=1.0, max_completion_tokens=10_000_000, max_model_len=10_000_000, max_turns=options.turns + 1
    )
    message = TaggedMessage(role="user", content="Sum up what you can find.", origin=Origin.PROMPT)
    prompt_ids = np.array(renderer.prompt_ids([message], tools=[tool.schema]), np.int32)
    costs = []
    async with Marking(
        FixedServers([url]), token=None, request_timeout_s=TIMEOUT_S, wait_timeout_s=TIMEOUT_S
    ) as client:
        for number in range(options.conversations + 1):
            marks.clear()
            rollout = Rollout(
                client=client, renderer=renderer, settings=settings, rollout_id=f"r{number}", prompt_ids=prompt_ids,
                seed=options.seed + number, affinity=f"g{number}/0",
                tools=ToolExecutor([tool], max_result_chars=8192), tool_names=[tool.name],
            )  # fmt: skip
            completion = await rollout.run()
            if len(completion.turns) != options.turns + 1 or any(not turn.tool_calls for turn in completion.turns[:-1]):
                raise SystemExit("a turn did not call the tool: the tokenizer's template or parser does not fit")
            if number:  # the first one warms up
                costs.append([1000 * (after - before) for before, after in pairwise(marks)])
    return costs
